"""The grammar that constrains calls, so that their arguments parse and match the schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...extras.grammar.response_format import JSON_STYLE
from .offer import ToolSet
from .parser import CallFormat

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer


def grammar_of(
    format: CallFormat, tools: ToolSet, tokenizer: Tokenizer, answer: Mapping[str, Any] | None
) -> str:
    """Return the grammar, in llguidance's dialect of Lark, of outputs with calls and, unless these are
    required, of outputs without: any text, or JSON if `answer` is a `response_format`."""
    added = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}

    def literal(text: str) -> str:
        quoted = json.dumps(text)
        for marker in {format.begin, format.closing.strip(), "[ARGS]"} & added.keys():
            quoted = quoted.replace(marker, f'" <[{added[marker]}]> "')
        return quoted

    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(tools.functions)))]
    for i, function in enumerate(tools.functions):
        before, between, after = format.call
        schema = function["parameters"] if tools.required or function["strict"] else {"type": "object"}
        rules.append(f"json{i}: {_json(schema)}")
        rules.append(f"call{i}: {literal(before + function['name'] + between)} json{i} {literal(after)}")
    more = f"({literal(format.separator)} call)*" if tools.parallel else ""
    # After a call, Qwen generates a newline, which must not be only the start of another call.
    calls = f"call {more} {literal(format.closing)}" + (' "\\n"?' if tools.parallel else "")
    if tools.required:
        start = f"{literal(format.opening)} {calls}"
    elif answer is not None:
        start = f"{literal(format.opening)} {calls} | answer"
        schema = answer.get("json_schema", {}).get("schema", {"type": "object"})
        rules.append(f"answer: {_json(schema)}")
    else:
        # Text must not spell the marker with other tokens, since what follows it would be unconstrained.
        text = r"(.|\n)*" if format.opening else r"([^{\s](.|\n)*)?"
        rules.append(f"TEXT: /{text}/ & ~/(.|\\n)*{re.escape(format.begin)}(.|\\n)*/")
        lead = "lead" if format.begin in added else "lead[lazy]"
        rules.append(f"{lead}: TEXT {literal(format.begin)}")
        block = f"lead {literal(format.opening.removeprefix(format.begin))} {calls}"
        start = f"({block})* TEXT" if tools.parallel else f"{block} | TEXT"
        start = start if format.opening else f"{calls} | TEXT"
    return "\n".join([f"start: {start}", *rules])


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE})
