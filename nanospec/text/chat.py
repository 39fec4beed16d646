"""Prompts in all forms that users give: texts, token ids in lists, arrays or tensors, one or several, and
conversations, which a chat template turns into text.

Templates are Jinja programs that come with the model. As in transformers they run in Jinja's sandbox, which
keeps them from Python's internals but does not limit their running time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import as_int, read_text, reason, shown

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
MAX_TEMPLATE = 1 << 16  # characters of a template
MAX_PROMPT = 1 << 24  # characters that a template may write
COMMON = re.compile("add_generation_prompt|.*_token")  # variables that any template gets


def as_list(prompts: Any) -> list[Any]:
    """Return prompts as a list, a single one as a list of one."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or _is_scalar(prompts):
        return [prompts]
    if not _is_row(prompts):
        raise ValueError(f"prompts={shown(prompts)} must be a text, token ids, or a list of these.")
    return [prompts] if len(prompts) and _is_scalar(prompts[0]) else list(prompts)


def text_and_ids(
    prompt: Any, max_model_len: int, encode: Callable[[str, int], list[int]]
) -> tuple[str | None, list[int]]:
    """Return the text of a prompt, None if it has only ids, and its token ids. Of a prompt with both, the ids
    count; `encode` is `Tokenizer.encode_prompt`."""
    given = prompt
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown := sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"})):
        raise ValueError(f"a prompt holds {shown(unknown[0])}; known are 'prompt' and 'prompt_token_ids'.")
    are_ids = not isinstance(ids, str | bytes | bytearray) and _is_row(ids)
    if not (isinstance(text, str) if ids is None else are_ids and isinstance(text, str | None)):
        raise ValueError(f"{shown(given)} needs a text as 'prompt' or token ids as 'prompt_token_ids'.")
    if ids is not None and len(ids) >= max_model_len:
        raise ValueError(too_long(len(ids), max_model_len))
    return text, encode(text or "", max_model_len) if ids is None else list(map(as_int, ids))


def conversations(messages: Any) -> list[Any]:
    """Return conversations as a list, a single one as a list of one."""
    is_one = _is_row(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)
    return list(messages) if isinstance(messages, list | tuple) and not is_one else [messages]


def check_conversation(messages: Any) -> None:
    """Raise ValueError unless this is a list of messages."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError(f"messages={shown(messages)} must be a list of {{'role': ..., 'content': ...}}.")


def too_long(num_tokens: int, max_model_len: int) -> str:
    """Return the message for a prompt of too many tokens."""
    return (
        f"The prompt has {num_tokens} tokens, but max_model_len={max_model_len} must hold it and at least "
        "one new token; shorten it or raise max_model_len."
    )


def _is_scalar(value: object) -> bool:
    """Return whether this may be one token id, also as a tensor or an array."""
    if isinstance(value, str):  # numpy's strings have no dimensions either
        return False
    return not isinstance(value, Iterable) or getattr(value, "ndim", None) == 0


def _is_row(value: object) -> bool:
    """Return whether this has a length and an order: a list, or an array of at least one dimension."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model folder by name, a single one as "default".

    `config` is the content of its tokenizer_config.json; a file chat_template.jinja takes precedence.
    """
    path = folder / "chat_template.jinja"
    found: Any = read_text(path) if path.is_file() else config.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {str(entry.get("name")): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        said = f"{folder / 'tokenizer_config.json'}: chat_template={shown(found)}"
        raise ValueError(f"{said} must be a template, or several by name.")
    return found


def render(templates: Mapping[str, str], messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """Return the prompt of a conversation as text.

    `variables` are those of the template, such as `tools`. `chat_template` among them is a template or the
    name of one; the default is "tool_use" for a conversation with tools, then "default". Raises ValueError
    if there is no template, it fails on the messages, or it does not use one of the variables.
    """
    more, name = variables.pop("chat_template_kwargs", None), variables.pop("chat_template", None)
    has_tools = isinstance(tools := variables.get("tools"), list | tuple) and tools
    name = ("tool_use" if has_tools else "default") if name is None else name
    if not isinstance(more, dict | None) or not isinstance(name, str):
        said = f"chat_template_kwargs={shown(more)} must be a dict, chat_template={shown(name)} a text."
        raise ValueError(said)
    variables.update(more or {})
    source = name if "{" in name else templates.get(name, templates.get("default"))
    if source is None:
        raise ValueError(
            f"the model has no chat template {shown(name)} among {shown(list(templates))}. Either it is a "
            "base model or its chat_template.jinja is missing; give a plain prompt instead."
        )
    try:
        template, used = _compiled(source)
        given = {name: value for name, value in variables.items() if value is not None}
        unused = [name for name in given if name not in used and not COMMON.fullmatch(name)]
        if not unused:
            return _written(template, {"tools": None, "documents": None, **given, "messages": messages})
    except Exception as error:  # a template may divide by zero, call itself without end, ...
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise ValueError(f"the chat template refuses these messages: {kind}{reason(error)}.") from error
    raise ValueError(f"the chat template has no use for {shown(unused[0])}; leave it out.")


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """Return the template and the names of the variables that it reads."""
    if len(source) > MAX_TEMPLATE:
        raise jinja2.TemplateError(f"it has more than {MAX_TEMPLATE} characters")
    extensions = [GenerationTag, loopcontrols]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = _tojson
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja.from_string(source), jinja2.meta.find_undeclared_variables(jinja.parse(source))


def _written(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    text = ""
    for piece in template.generate(variables):
        text += piece
        if len(text) > MAX_PROMPT:
            raise jinja2.TemplateError(f"it writes more than {MAX_PROMPT} characters")
    return text


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks text for training: render its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    """Return JSON that is not HTML-escaped, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
