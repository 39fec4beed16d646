"""User input: `validation` checks settings, `files` reads files, `chat` converts prompts and conversations,
and `tokenizer` converts text to token ids and back.
"""
