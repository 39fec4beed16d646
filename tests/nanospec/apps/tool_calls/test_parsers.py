"""Calls in all formats: streamed in any pieces as in a whole, malformed ones as text."""

from functools import partial

import pytest

from nanospec.apps.tool_calls.formats import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS
from nanospec.apps.tool_calls.parser import CallFormat, CallParser, Part, parse

ODD = '{"q": "a \\"}{\\\\", "l": [1, {"é": null}],\n "m": "</tool_call> ["}'  # braces and markers in strings
ONE = '{"name": "f", "arguments": {"x": 1}}'
BARE = ONE.replace("arguments", "parameters")
X = [("f", '{"x": 1}')]
CASES: dict[str, tuple[CallFormat, str, str, list[tuple[str, str]]]] = {  # format, output -> text, calls
    "no call": (HERMES, " Hi. <tool <tool_cal\n", " Hi. <tool <tool_cal\n", []),
    "hermes": (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", X),
    "hermes, text around": (
        HERMES, f'<\n<tool_call>{{"name":"g","arguments":{ODD}}}</tool_call>\n<tool_call>{ONE}</tool_call>B',
        "<B", [("g", ODD), *X],
    ),
    "hermes, other order": (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", X),
    "hermes, encoded twice": (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\":1}"}', "", X),
    "hermes, brace missing": (HERMES, f"<tool_call>{ONE[:-1]}\n</tool_call>!", "!", X),
    "hermes, marker missing": (HERMES, f"<tool_call>{ONE}\n</tool", "", X),
    "hermes, cut": (HERMES, f"<tool_call>{ONE[:-4]}", "", [("f", '{"x":')]),
    "hermes, cut early": (HERMES, 'A\n<tool_call>\n{"name": "f', 'A\n<tool_call>\n{"name": "f', []),
    "hermes, prose": (HERMES, f"<tool_call> or {{}}\n<tool_call>{ONE}", "<tool_call> or {}", X),
    "hermes, not JSON": (HERMES, "<tool_call>{'name': 1}</tool_", "<tool_call>{'name': 1}</tool_", []),
    "hermes, no name": (HERMES, '<tool_call>{"arguments": {}}\n', '<tool_call>{"arguments": {}}\n', []),
    "llama": (LLAMA3, f"\n{BARE}; {BARE}", "", X * 2),
    "llama, marker": (LLAMA3, f"Hm<|python_tag|>{BARE}", "Hm", X),
    "llama, type": (LLAMA3, '{"type": "function", ' + BARE[1:], "", X),
    "llama, JSON": (LLAMA3, '{"name": "Bob"} {}', '{"name": "Bob"} {}', []),
    "llama, text": (LLAMA3, f" Call {BARE}", f" Call {BARE}", []),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{ONE}, {ONE[:-1]}, "id": "abcdefghi"}}]', "", X * 2),
    "mistral, names": (MISTRAL_ARGS, 'A[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f{"x": 1}', "A", X * 2),
    "mistral, no call": (MISTRAL, "[TOOL_CALLS]a b", "[TOOL_CALLS]a b", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_any_pieces_give_the_same_parts(name: str) -> None:
    format, output, text, calls = CASES[name]
    cuts = [(i, j) for i in range(len(output)) for j in (i, i + 1, i + 3, i + 11)]
    for pieces in [list(output), *([output[:i], output[i:j], output[j:]] for i, j in cuts)]:
        parser, found, read = CallParser(format, 9), "", list[tuple[str, str]]()
        for part in [part for piece in pieces for part in parser.push(piece)] + parser.push("", ended=True):
            if part.call is None:
                found += part.text
            elif part.name:
                read.append((part.name, part.text))
            else:
                read[part.call] = read[part.call][0], read[part.call][1] + part.text
        assert (found, read) == (text, calls), pieces


def test_arguments_are_returned_as_they_are_generated() -> None:
    parser = CallParser(HERMES, 9)
    assert not parser.push('<tool_call>{"name": "f", "arguments": ')
    start, arguments = parser.push('{"city": "Par')
    assert (start.call, start.name, start.text, arguments) == (0, "f", "", Part('{"city": "Par', 0))
    assert parser.push("is") == [Part("is", 0)]


def test_limit_of_calls_and_ids() -> None:
    text, [call] = parse(f"<tool_call>{ONE}</tool_call>" * 2 + "B", partial(CallParser, HERMES, 1))
    assert (text, call["function"]) == ("B", {"name": "f", "arguments": '{"x": 1}'})
    assert len(call["id"].removeprefix("call_")) == 24
    _, calls = parse(f"[TOOL_CALLS][{ONE},{ONE}]", partial(CallParser, MISTRAL, 9))
    one, other = (call["id"] for call in calls)
    assert all(each.isalnum() and len(each) == 9 for each in (one, other))
    assert one != other
