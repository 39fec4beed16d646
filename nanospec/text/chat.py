"""Chat templates: from the messages of a conversation to the text of a prompt.

Templates are Jinja and come with the model, so they run in a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from ..models.files import read_text, reason
from .budget import TooMuch
from .checks import shown
from .sandbox import Sandbox

ALWAYS = re.compile("add_generation_prompt|.*_token")  # given to all templates, used or not


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates of a model folder by name, a single one as `default`.

    `config` is the content of its tokenizer_config.json; a file chat_template.jinja comes first.
    """
    path = folder / "chat_template.jinja"
    template = read_text(path) if path.is_file() else config.get("chat_template")
    if template is None or isinstance(template, str):
        return {"default": template} if template else {}
    entries = list(template.items()) if isinstance(template, dict) else template
    if isinstance(template, list):
        entries = [(e.get("name"), e.get("template")) if isinstance(e, dict) else (None, e) for e in template]
    if not isinstance(entries, list) or not all(isinstance(text, str) for entry in entries for text in entry):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template={shown(template)} must be a template, or "
            "several by name."
        )
    return dict(entries)


def as_message(prompt: str) -> list[dict[str, Any]]:
    """A text as the only message of a conversation."""
    return [{"role": "user", "content": prompt}]


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """A conversation with this system message, unless it begins with one or there is none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def render(templates: Mapping[str, str], messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """The prompt for a conversation, as text, by the template that `chat_template` among the variables
    (those of the template, such as `tools`) names or is, else by `tool_use` if there are tools, else by
    `default`.

    Raises ValueError when there is no template, it refuses the messages, or has no use for what is given.
    """
    variables.update(variables.pop("chat_template_kwargs", None) or {})
    name = variables.pop("chat_template", None) or ("tool_use" if variables.get("tools") else "default")
    source = name if "{" in name else templates.get(name, templates.get("default"))
    if source is None:
        there = ", ".join(map(shown, templates)) or "none"
        raise ValueError(
            f"the model has no chat template {shown(name)} (it has: {there}). Either it is a base model or "
            "its chat_template.jinja is missing; give a plain prompt instead."
        )
    try:
        template, used = _compiled(source), _variables(source)
    except Exception as error:
        raise _refused(error) from error
    for option in (name for name, value in variables.items() if value is not None):
        if option not in used and not ALWAYS.fullmatch(option):  # it would be dropped
            raise ValueError(f"the chat template has no use for {shown(option)}; leave it out.")
    given = {"tools": None, "documents": None, **variables, "messages": messages}
    try:
        return _sandbox().render(template, given)
    except Exception as error:  # a template may divide by zero, call itself without end, ...
        raise _refused(error) from error


def _refused(error: Exception) -> ValueError:
    """What a template does wrong, as a sentence: Jinja's errors say it, others need their names."""
    kind = "" if isinstance(error, jinja2.TemplateError | TooMuch) else f"{type(error).__name__}: "
    return ValueError(f"the chat template refuses these messages: {kind}{reason(error)}.")


@lru_cache(maxsize=16)
def _variables(source: str) -> frozenset[str]:
    """What a template makes use of."""
    return frozenset(jinja2.meta.find_undeclared_variables(_sandbox().parse(source)))


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _sandbox().compiled(source)


@lru_cache(maxsize=1)
def _sandbox() -> Sandbox:
    return Sandbox()
