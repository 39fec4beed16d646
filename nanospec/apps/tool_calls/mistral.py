"""Mistral's formats: a list of JSON objects after `[TOOL_CALLS]`, or `[TOOL_CALLS]name[ARGS]{...}` for each
call in newer models. The chat templates require ids of nine letters and digits."""

from .parser import CallFormat

MISTRAL = CallFormat(
    name="Mistral ([TOOL_CALLS])",
    template=(r"\[TOOL_CALLS\]",),
    begin="[TOOL_CALLS]",
    call=('{"name": "', '", "arguments": ', "}"),
    opening="[TOOL_CALLS][",
    separator=", ",
    closing="]",
    id_format="{:.9}",
)
MISTRAL_ARGS = MISTRAL._replace(
    template=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    call=("", "[ARGS]", ""),
    opening="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    closing="",
)
