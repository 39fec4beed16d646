"""Parse the requests of the server and of batches into prompts and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..config import SamplingParams
from ..extras.grammar.response_format import validate
from ..text.chat import OPTIONAL
from ..text.validation import shown
from .openai_format import normalize_messages
from .options import did_you_mean
from .tool_calls.formats import prepare
from .tool_calls.offer import ToolSet
from .tool_calls.parser import CallParser

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

ONE_OF = 'a request must be a JSON object with either "prompt" or "messages"'
OPTIONS = {**OPTIONAL, "continue_final_message": bool, "add_generation_prompt": bool}  # of the chat template
RESERVED = {"self", "chat_template", "chat_template_kwargs", "messages", "tools", "documents", "tokenize"}


@dataclass
class Task:
    """A request: a `prompt` (text or token ids) or `messages`. `index`, `names`, `url` and `key` describe its
    line in a batch."""

    index: int  # line number, from 0
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    tools: ToolSet | None = None  # only in OpenAI's format
    parser: Callable[[], CallParser] | None = None  # set by `encode`, if there are tools
    raw: bool = False  # continue the text instead of applying the chat template
    names: Mapping[str, Any] = field(default_factory=dict)  # the line's custom_id and id
    url: str = ""  # endpoint of a line in OpenAI's format, also that of its result; "" in nanospec's format
    key: str = ""  # fingerprint of the line, its parameters and the model


def parse_task(
    request: Mapping[str, Any], params: SamplingParams, system: str | None = None, raw: bool = False,
    known: tuple[str, ...] = (),
) -> Task:  # fmt: skip
    """Parse a request; `params` holds the defaults of its sampling fields. Raises ValueError, which for an
    unknown field may suggest one of `known`."""
    if ("prompt" in request) == ("messages" in request):
        raise ValueError(ONE_OF + (f", got {shown(list(request))}." if request else "."))
    others = {"prompt", "messages", "chat_template_kwargs", *OPTIONS}
    tools = request.get("tools") if isinstance(request.get("tools"), ToolSet) else None
    others |= {"tools"} if tools else set()  # in nanospec's format, the field is unknown
    sampling = {name: value for name, value in request.items() if name not in others}
    parameters = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(sampling.keys() - parameters):
        names = {*others, *known, *parameters}
        hint = did_you_mean(unknown[0], names) or f"; known fields are {', '.join(sorted(names))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{hint}")
    if "response_format" in sampling:
        sampling["response_format"] = validate(sampling["response_format"])
    task = Task(0, replace(params, **sampling), request.get("prompt"), tools=tools, raw=raw)
    task.template_options = template_options(request)
    if "messages" in request:
        task.messages = with_system(normalize_messages(request["messages"]), system)
    elif isinstance(prompt := task.prompt, str):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError('"prompt" contains an unpaired surrogate, which is not a character; remove it.')
        if system and not raw:
            message = {"role": "user", "content": prompt}
            task.prompt, task.messages = None, with_system([message], system)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError('"prompt" must be a string or a list of token ids.')
    needless = ("chat_template_kwargs", "continue_final_message", "add_generation_prompt")
    if raw and task.messages is None and (name := next(filter(request.get, needless), None)):
        raise ValueError(f'{name} requires "messages", as the chat template is not applied to a "prompt".')
    return task


def template_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template. Raises ValueError."""
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise ValueError("chat_template_kwargs must be an object.")
    if reserved := sorted(given.keys() & RESERVED):
        raise ValueError(f"chat_template_kwargs must not contain {shown(reserved[0])}.")
    named = {name: request.get(name) for name in OPTIONS}
    options = {name: value for name, value in {**named, **given}.items() if value is not None}
    if isinstance(thinking := options.get("thinking"), dict):  # as in Anthropic's API
        options["thinking"] = thinking.get("type") != "disabled"
    for name, kind in OPTIONS.items():
        if not isinstance(value := options.get(name), kind | None):
            form = "a string" if kind is str else "true or false"
            raise ValueError(f"{name}={shown(value)} must be {form}.")
    if "thinking" in options:
        options.setdefault("enable_thinking", options["thinking"])
    elif options.get("reasoning_effort") == "none":  # in OpenAI's API
        options.setdefault("enable_thinking", False)
    return options


def encode(task: Task, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """Return the token ids of a task's prompt. If it has tools, set its parser and constrain its output.
    Raises ValueError for a task that the model does not support."""
    if task.tools is not None and (task.tools.functions or tokenizer.uses_in_template("tools")):
        # A request that must not call functions keeps them in its prompt, for the prefix cache.
        task.template_options["tools"] = task.tools.tools
        if task.tools.functions:
            task.params, task.parser = prepare(task.tools, tokenizer, task.params)
    if task.messages is not None:
        text = tokenizer.apply_chat_template(task.messages, **task.template_options)
        return tokenizer.encode_prompt(text, max_model_len, add_special_tokens=False)
    if isinstance(task.prompt, str):
        return tokenizer.encode_prompt(task.prompt, max_model_len)
    return task.prompt or []


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Prepend a system message to a conversation without one."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]
