"""How the conversations that a model invents to learn from begin: kinds, system prompts, first words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of conversation: how often, under which system prompts, with which first words."""

    share: float
    systems: tuple[str, ...]
    openings: tuple[str, ...]


KINDS = {
    "chat": Kind(
        0.3,
        ("", "", "You are a helpful assistant.", "You answer questions in a few clear sentences."),
        ("", "", "", "", "What is", "Why", "How do I", "How does", "Explain", "Can you", "I am", "Who",
         "Give me", "Describe", "What are the differences between", "List", "When", "Tell me about",
         "Should I", "Help me", "Suggest", "Compare", "Is it", "My"),
    ),
    "writing": Kind(
        0.12,
        ("", "", "You are a writer.", "You help people write letters, stories and essays."),
        ("Write a story about", "Write an email", "Write a short poem", "Write an essay", "Draft a",
         "Create a", "Continue the story: ", "Write a letter to", "Write a blog post", "Write a dialogue"),
    ),
    "code": Kind(
        0.2,
        ("", "", "You are an expert programmer.", "You are a coding assistant. Answer with code."),
        ("Write a Python function", "Write a Python class", "Write a program that", "How do I write",
         "Write a JavaScript function", "Implement", "Write an SQL query", "Write unit tests for",
         "Explain this code:\n\n```python\ndef ", "Fix the bug in this code:\n\n```python\n",
         "Add type hints to this function:\n\n```python\ndef ", "Write a C function",
         "Rename the variables in this code:\n\n```python\ndef ", "Write HTML", "Write a bash script"),
    ),
    "maths": Kind(
        0.1,
        ("", "You are a patient teacher of mathematics. Solve problems step by step."),
        ("Solve", "What is ", "If ", "A train", "Calculate", "A shop sells", "Find the", "Prove that",
         "How many", "There are", "John has", "Convert"),
    ),
    "translate": Kind(
        0.06,
        ("", "You are a translator. Answer with the translation only."),
        ("Translate into French: ", "Translate into German: ", "Translate into Spanish: ",
         "Translate this to English: ", "How do you say"),
    ),
    "summarise": Kind(
        0.1,
        ("", "You summarise texts.", "You extract facts from texts and list them."),
        ("Summarize the following text.\n\n", "Summarize this article in three sentences:\n\n",
         "Extract the names and dates from this text:\n\n", "Rewrite this text more formally:\n\n",
         "Answer the question with a quotation from the text.\n\nText: ", "Correct the grammar:\n\n",
         "Give the key points of:\n\n"),
    ),
    "text": Kind(  # no chat: a text that goes on
        0.04,
        ("",),
        ("The ", "Once upon a time", "In ", "# ", "import ", "def ", "A ", "Chapter 1\n\n", "It was ",
         "History of ", "How to ", "According to ", "<!DOCTYPE html>\n"),
    ),
    "copy": Kind(  # quotes an earlier answer, in place of {}
        0.08,
        ("", "", "You are a careful editor."),
        ("Repeat the following text word for word.\n\n{}",
         "Quote the first two sentences of this text.\n\n{}",
         "Correct the mistakes in this text and change nothing else:\n\n{}", "{}\n\nSummarize this.",
         "{}\n\nRewrite the text above so that it is shorter.", "Translate into Spanish:\n\n{}",
         "Here is a text:\n\n{}\n\nReplace the first sentence with a better one; give the whole text.",
         "{}\n\nWhat is the main point of this text? Quote it."),
    ),
}  # fmt: skip
CODE_COPY = Kind(  # as "copy", for answers with code in them
    0.0,
    ("", "", "You are a coding assistant. Answer with code."),
    ("Add comments to this code:\n\n{}", "Rename the function in this code and give the whole code:\n\n{}",
     "Add type hints to this code:\n\n{}", "Rename the variables in this code:\n\n{}",
     "{}\n\nAdd error handling to this code.", "{}\n\nWrite a test for this code.",
     "Repeat this code without changes:\n\n{}", "Explain this code line by line:\n\n{}"),
)  # fmt: skip
