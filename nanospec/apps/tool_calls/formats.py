"""The formats of tool calls, and the choice of one for a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...config import SamplingParams
from .grammar import grammar_of
from .hermes import HERMES
from .llama3 import LLAMA3
from .mistral import MISTRAL, MISTRAL_ARGS
from .offer import ToolSet
from .parser import CallFormat, CallParser

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

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
        grammar = grammar_of(format, tools, tokenizer, answer)
        params = replace(params, response_format={"type": "grammar", "grammar": grammar})
    if tokenizer.backend.token_to_id(format.begin) in tokenizer.special_token_ids:
        params = replace(params, skip_special_tokens=False)
    return params, partial(CallParser, format, math.inf if tools.parallel else 1)


def _format_of(template: str) -> CallFormat:
    """Return the format for a chat template. Raises ValueError."""
    if not re.search(r"\btools\b", template):
        raise ValueError("tools are not supported by the chat template of this model; omit them.")
    for format in FORMATS:
        if all(re.search(pattern, template) for pattern in format.template):
            return format
    names = ", ".join(dict.fromkeys(each.name for each in FORMATS))
    raise ValueError(f"tools are not supported in this model's format, only in {names}; omit them.")
