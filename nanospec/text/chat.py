"""Prompts in all supported forms: strings, token ids in lists, arrays or tensors, one or several, and
conversations, which a chat template converts to text.

Chat templates are Jinja templates that come with the model. As in transformers, they run in Jinja's sandbox,
which blocks access to Python internals but does not limit the running time.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .files import errors_of, read_text
from .validation import as_int, reason, shown

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
MAX_TEMPLATE = 1 << 16  # maximum characters of a template
MAX_PROMPT = 1 << 24  # maximum characters of a rendered prompt
COMMON = re.compile("add_generation_prompt|.*_token")  # variables passed to every template, used or not
OPTIONAL = {  # variables that clients may set for any template; unused ones are ignored -> types
    "enable_thinking": bool, "thinking": bool, "include_reasoning": bool, "reasoning_effort": str,
    "verbosity": str,
}  # fmt: skip
END = "\ue000\ue001\ue002"  # marks the end of a final message that is continued; not in real text


def as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts; a single prompt is wrapped in a list. Raises ValueError for other types."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or _is_scalar(prompts):
        return [prompts]
    if not _is_row(prompts):
        raise ValueError(f"prompts={shown(prompts)} must be a string, token ids, or a list of these.")
    return [prompts] if len(prompts) and _is_scalar(prompts[0]) else list(prompts)


def text_and_ids(
    prompt: Any, max_model_len: int, encode: Callable[[str, int], list[int]]
) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None if it has only token ids) and its token ids. Given token ids are used
    instead of encoding the text. `encode` is `Tokenizer.encode_prompt`. Raises ValueError."""
    original = prompt
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    are_ids = not isinstance(ids, str | bytes | bytearray) and _is_row(ids)
    is_valid = isinstance(text, str) if ids is None else are_ids and isinstance(text, str | None)
    if not is_valid or prompt.keys() - {"prompt", "prompt_token_ids"}:
        forms = "a string, token ids, or a dict with only a string 'prompt' or a list 'prompt_token_ids'"
        raise ValueError(f"prompt={shown(original)} must be {forms}.")
    if ids is not None and len(ids) >= max_model_len:
        raise ValueError(too_long(len(ids), max_model_len))
    return text, encode(text or "", max_model_len) if ids is None else list(map(as_int, ids))


def conversations(messages: Any) -> list[Any]:
    """Return a list of conversations; a single one is wrapped in a list."""
    is_one = _is_row(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)
    return list(messages) if isinstance(messages, list | tuple) and not is_one else [messages]


def check_conversation(messages: Any) -> None:
    """Raise ValueError unless `messages` is a list of dicts."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError(f"messages={shown(messages)} must be a list of {{'role': ..., 'content': ...}}.")


def too_long(num_tokens: int, max_model_len: int) -> str:
    """Return the error message for a prompt with too many tokens."""
    return (
        f"The prompt has {num_tokens} tokens, but max_model_len={max_model_len} must hold it and at least "
        "one new token; shorten it or raise max_model_len."
    )


def _is_scalar(value: object) -> bool:
    """Return whether `value` may be a single token id, possibly as a tensor or array of no dimensions."""
    if isinstance(value, str):  # numpy strings have no dimensions either
        return False
    return not isinstance(value, Iterable) or getattr(value, "ndim", None) == 0


def _is_row(value: object) -> bool:
    """Return whether `value` is a sequence, or an array of at least one dimension."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model folder by name, "default" if there is a single unnamed one, from
    chat_template.jinja or else from `config`, the content of tokenizer_config.json."""
    path, source = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        return {"default": read_text(path)}
    with errors_of(source):
        templates = config.get("chat_template") or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        elif isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        if not all(isinstance(text, str) for text in templates.values()):
            raise ValueError("chat_template must be a template or a list of named templates.")
    return dict(templates)


def render(templates: Mapping[str, str], messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """Render a conversation as the text of a prompt.

    `variables`, such as `tools`, are passed to the template. Of these, `chat_template` is a template or its
    name, by default "tool_use" for a conversation with tools, else "default". `continue_final_message` leaves
    the final message open; it defaults to whether that is the assistant's, unless `add_generation_prompt` is
    set. Raises ValueError if there is no such template, rendering fails, or the template does not use one of
    the variables (except those in `OPTIONAL`).
    """
    more, name = variables.pop("chat_template_kwargs", None), variables.pop("chat_template", None)
    has_tools = isinstance(tools := variables.get("tools"), list | tuple) and tools
    name = ("tool_use" if has_tools else "default") if name is None else name
    if not isinstance(more, dict | None) or not isinstance(name, str):
        problem = f"chat_template_kwargs={shown(more)} must be a dict"
        raise ValueError(f"{problem}, and chat_template={shown(name)} must be a string.")
    variables.update(more or {})
    if continues := _continues(messages, variables):
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + END}]
    source = name if "{" in name else templates.get(name, templates.get("default"))
    if source is None:
        raise ValueError(
            f"the model has no chat template {shown(name)} (available: {shown(list(templates))}). It is a "
            "base model, or its chat_template.jinja is missing; use a plain prompt instead."
        )
    try:
        template, used = compiled(source)
        given = {name: value for name, value in variables.items() if value is not None}
        unused = [name for name in given if not (name in used or name in OPTIONAL or COMMON.fullmatch(name))]
        if not unused:
            text = _rendered(template, {"tools": None, "documents": None, **given, "messages": messages})
    except Exception as error:  # a template may divide by zero, recurse without end, ...
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise ValueError(f"the chat template cannot render these messages: {kind}{reason(error)}.") from error
    if unused:
        raise ValueError(f"the chat template does not use {shown(unused[0])}; omit it.")
    if continues and END not in text:
        raise ValueError("the chat template omits the final message; set continue_final_message to false.")
    return text.rpartition(END)[0] if continues else text


def _continues(messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> bool:
    """Remove `continue_final_message` from the variables, set `add_generation_prompt`, and return whether to
    continue the final message. Raises ValueError."""
    continues, prompts = variables.pop("continue_final_message", None), variables.get("add_generation_prompt")
    if continues and prompts:
        raise ValueError("continue_final_message excludes add_generation_prompt; set only one of them.")
    final = messages[-1] if messages else {}
    is_text = isinstance(final.get("content"), str) and not final.get("tool_calls")
    if continues and not is_text:
        raise ValueError("continue_final_message requires a final message with a string as content.")
    if continues is None and prompts is None:
        continues = is_text and final.get("role") == "assistant"
    variables["add_generation_prompt"] = not continues if prompts is None else prompts
    return bool(continues)


@lru_cache(maxsize=16)
def compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """Return the compiled template and the names of the variables that it uses."""
    if len(source) > MAX_TEMPLATE:
        raise jinja2.TemplateError(f"the template has more than {MAX_TEMPLATE} characters")
    extensions = [GenerationTag, loopcontrols]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = _format_hour
    return jinja.from_string(source), jinja2.meta.find_undeclared_variables(jinja.parse(source))


def _rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    text = ""
    for piece in template.generate(variables):
        text += piece
        if len(text) > MAX_PROMPT:
            raise jinja2.TemplateError(f"the prompt has more than {MAX_PROMPT} characters")
    return text


class GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}` marks text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _format_hour(form: str) -> str:
    """Format the time of the last full hour. Templates write it at the start of a prompt; if it changed with
    every prompt of a conversation, none of the previous one's K/V could be reused."""
    return datetime.now().replace(minute=0, second=0, microsecond=0).strftime(form)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
