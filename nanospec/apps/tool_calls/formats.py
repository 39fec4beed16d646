"""The choice of a format of calls for a model, and the grammar that makes calls match their schemas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...config import SamplingParams
from ...extras.grammar.response_format import JSON_STYLE
from .offer import ToolSet
from .parser import CallFormat, CallParser

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

# Each call is a JSON object between <tool_call> and </tool_call>.
HERMES = CallFormat(
    template=("<tool_call>", r'"arguments\\?"'),  # some formats have other text than JSON between the markers
    begin="<tool_call>",
    call=('{"name": "', '", "arguments": ', "}"),
    opening="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
# The output consists of JSON objects, after <|python_tag|> or without a marker.
LLAMA3 = CallFormat(
    template=(r"<\|start_header_id\|>", r'"parameters\\?": '),
    begin="<|python_tag|>",
    call=('{"name": "', '", "parameters": ', "}"),
    opening="",
    separator="; ",
    closing="",
)
# A list of JSON objects after [TOOL_CALLS]. The chat templates require ids of nine letters and digits.
MISTRAL = CallFormat(
    template=(r"\[TOOL_CALLS\]",),
    begin="[TOOL_CALLS]",
    call=('{"name": "', '", "arguments": ', "}"),
    opening="[TOOL_CALLS][",
    separator=", ",
    closing="]",
    id_format="{:.9}",
)
# Newer models: [TOOL_CALLS]name[ARGS]{...} for each call.
MISTRAL_ARGS = MISTRAL._replace(
    template=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    call=("", "[ARGS]", ""),
    opening="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    closing="",
)
FORMATS = (MISTRAL_ARGS, MISTRAL, HERMES, LLAMA3)  # the first one that matches a template is used


def prepare(
    tools: ToolSet, tokenizer: Tokenizer, params: SamplingParams
) -> tuple[SamplingParams, Callable[[], CallParser]]:
    """Return the parameters of a request that offers tools, and the constructor of the parser of an output.
    Raises ValueError if the model's chat template or the `response_format` do not support tools."""
    format, answer = _format_of(tokenizer.tool_template), params.response_format
    if answer is not None and answer["type"] not in ("json_object", "json_schema"):
        kind = f"response_format with type {answer['type']!r}"
        raise ValueError(f"{kind} cannot be combined with tools; use 'json_schema', or omit one of them.")
    is_strict = any(function["strict"] for function in tools.functions)
    if tools.required or is_strict or answer is not None:
        grammar = _grammar(format, tools, tokenizer, answer)
        params = replace(params, response_format={"type": "grammar", "grammar": grammar})
    if tokenizer.backend.token_to_id(format.begin) in tokenizer.special_token_ids:
        params = replace(params, skip_special_tokens=False)
    return params, partial(CallParser, format, math.inf if tools.parallel else 1)


def _format_of(template: str) -> CallFormat:
    """Return the format for a chat template. Raises ValueError."""
    if not re.search(r"\btools\b", template):
        raise ValueError("tools are not supported by this model's chat template; omit them, or use Qwen2.5.")
    for format in FORMATS:
        if all(re.search(pattern, template) for pattern in format.template):
            return format
    known = "Hermes and Qwen, Llama 3, and Mistral"
    raise ValueError(f"tools are not supported in this model's format, only in those of {known}; omit them.")


def _grammar(
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
    # Qwen writes a newline after a call; the grammar must also allow the output to end there.
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
