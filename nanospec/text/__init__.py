"""User input: `validation` checks settings, `files` reads files, `chat` converts prompts and conversations, and
`tokenizer` encodes and decodes text.
"""
