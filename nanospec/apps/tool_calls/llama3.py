"""Llama 3's format: the output consists of JSON objects, after `<|python_tag|>` or without a marker."""

from .parser import CallFormat

LLAMA3 = CallFormat(
    name="Llama 3 (JSON with parameters)",
    template=(r"<\|start_header_id\|>", r'"parameters\\?": '),
    begin="<|python_tag|>",
    call=('{"name": "', '", "parameters": ', "}"),
    opening="",
    separator="; ",
    closing="",
)
