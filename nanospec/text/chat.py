"""Chat templates: from the messages of a conversation to the text of a prompt.

Templates are Jinja and come with the model, so they run in a sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ALWAYS = re.compile("add_generation_prompt|.*_token")  # given to all templates, used or not


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates of a model folder by name, a single one as `default`.

    `config` is the content of its tokenizer_config.json; a file chat_template.jinja comes first.
    """
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template") or {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template)


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
        there = ", ".join(templates) or "none"
        raise ValueError(
            f"the model has no chat template {name!r} (it has: {there}). Either it is a base model or its "
            "chat_template.jinja is missing; give a plain prompt instead."
        )
    try:
        used = _variables(source)
        for option in (name for name, value in variables.items() if value is not None):
            if option not in used and not ALWAYS.fullmatch(option):  # it would be dropped
                raise ValueError(f"the chat template has no use for {option!r}; leave it out.")
        return _compiled(source).render(messages=messages, **{"tools": None, "documents": None, **variables})
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}.") from error


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _variables(source: str) -> frozenset[str]:
    """What a template makes use of."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **kwargs)  # not HTML-escaped

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
