"""Hermes' format, also used by Qwen: each call is a JSON object between `<tool_call>` and `</tool_call>`."""

from .parser import CallFormat

HERMES = CallFormat(
    name="Hermes and Qwen (JSON in <tool_call>)",
    template=("<tool_call>", r'"arguments\\?"'),  # some formats have other text than JSON between the markers
    begin="<tool_call>",
    call=('{"name": "', '", "arguments": ', "}"),
    opening="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
