"""Prompts for the comparisons on a CPU: real text of the evaluation set, as chat prompts of a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from bench import common

SHORT = (81, 265)  # tokens
Prompt = list[int]
Encode = Callable[[str], list[int]]


def short_prompts(chat: Encode, count: int) -> list[Prompt]:
    """Code edits, function bodies and maths in turn."""
    pairs = common.code_edit_pairs(100)
    kinds = (
        [asked for asked, _ in pairs],
        [_unfinished(answer) for _, answer in pairs],
        common.spec_bench(80, "math_reasoning"),
    )
    fitting = [[p for p in map(chat, texts) if SHORT[0] <= len(p) <= SHORT[1]] for texts in kinds]
    found = list(chain.from_iterable(zip(*fitting)))[:count]
    if len(found) < count:
        raise ValueError(f"The evaluation text has {len(found)} prompts of {SHORT} tokens, not {count}.")
    return found


def served_texts(chat: Encode, count: int) -> list[str]:
    """User messages, code edits and open questions in turn: one half repeats its input, the other hardly."""
    kinds = [asked for asked, _ in common.code_edit_pairs(100)], common.spec_bench(80, "chat")
    fitting = [[text for text in texts if len(chat(text)) <= SHORT[1]] for texts in kinds]
    found = list(chain.from_iterable(zip(*fitting)))[:count]
    if len(found) < count:
        raise ValueError(f"The evaluation text has {len(found)} messages of {SHORT[1]} tokens, not {count}.")
    return found


def _unfinished(answer: str) -> str:
    """The first half of some code, to complete."""
    lines = answer.removeprefix("```python\n").removesuffix("\n```").strip().splitlines()
    half = "\n".join(lines[: -(-len(lines) // 2)])
    return f"Complete this function, and return all of it.\n\n```python\n{half}\n```"


def long_prompts(
    chat: Encode, encode: Encode, decode: Callable[[list[int]], str], count: int, tokens: int
) -> list[Prompt]:
    """Prompts of nearly `tokens` tokens, by turns of many functions, one of them to edit, and of a play."""
    edits, play = common.code_edit_pairs(100), encode(common.shakespeare()[: 6 * count * tokens])
    found, room = [], tokens - 120
    for i in range(count):
        if i % 2:
            passage = decode(play[i // 2 * room : (i // 2 + 1) * room])
            found.append(chat(f"{passage}\n\nWho speaks here, and what about? Quote some of the lines."))
            continue
        order = edits[7 * i % 100 :] + edits[: 7 * i % 100]
        code = "\n\n".join(answer for _, answer in order)
        listing = decode(encode(code)[:room])
        found.append(chat(f"{listing}\n\nRepeat the last whole function above, with its arguments renamed."))
    return found
