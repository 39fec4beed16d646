"""Text to token ids and back: encoding, chat templates, and decoding while tokens still arrive.

`Tokenizer` reads what a Hugging Face model folder holds (`tokenizer.json` and friends) through the
`tokenizers` library. `Detokenizer` turns a growing list of ids into a growing text, at a cost per
token that does not depend on how much came before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8, or not yet


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        vocab_size: number of tokens, added ones included. A model may have more rows (padding).
        bos_token_id: the token that begins a text, None if the model has none.
        eos_token_ids: every token that ends an output, the usual one first: those that
            generation_config.json names, then config.json, then tokenizer_config.json.
        special_token_ids: tokens that are no text, such as `<|im_end|>`.
        named_tokens: texts of the tokens that tokenizer_config.json names, such as `eos_token`.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no tokenizer.json; nanospec needs one, so save the model with a "
                "fast tokenizer (transformers: tokenizer.save_pretrained)."
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ValueError(f"{path} is not a tokenizer ({error}); fetch it again.") from error
        self.backend.no_truncation()  # some files carry settings from training
        self.backend.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(
            i for i, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        self.named_tokens = named_tokens(config)
        bos, eos = self.named_tokens.get("bos_token"), self.named_tokens.get("eos_token")
        bos_id = self.backend.token_to_id(bos) if bos else None
        configs = [read_json(folder / f"{name}.json") for name in ("generation_config", "config")]
        if bos_id is None:
            bos_id = next((i for c in configs for i in as_ids(c.get("bos_token_id"))), None)
        self.bos_token_id: int | None = bos_id
        ends = [i for c in configs for i in as_ids(c.get("eos_token_id"))]
        ends += as_ids(self.backend.token_to_id(eos) if eos else None)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._templates = chat_templates(folder, config)
        self._byte_ids = byte_fallback_ids(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in it, such as `<|im_end|>`, count as such.

        `add_special_tokens` adds what the model wants around a text, usually a BOS. Pass False for
        a rendered chat: its template has written the BOS already. Raises ValueError for text with
        an unpaired surrogate, which broken JSON escapes produce.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            bad = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if bad is None:
                raise
            raise ValueError(
                f"the text holds U+{ord(bad):04X}, half of a surrogate pair, not a character; "
                "remove it."
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary give nothing; broken UTF-8 gives U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation, as text; encode it with `add_special_tokens=False`.

        `messages` are dicts with `role` and `content`; `kwargs` are further variables of the
        template, such as `tools`, and `chat_template` names one of several templates. Raises
        ValueError when the model has no template or the template refuses the messages.
        """
        name = kwargs.pop("chat_template", "tool_use" if kwargs.get("tools") else "default")
        source = self._templates.get(name, self._templates.get("default"))
        if source is None:
            there = ", ".join(self._templates) or "none"
            raise ValueError(
                f"the model has no chat template {name!r} (it has: {there}). Either it is a "
                "base model or its chat_template.jinja is missing; give a plain prompt instead."
            )
        variables = {"tools": None, "documents": None, **self.named_tokens, **kwargs}
        try:
            return compile_template(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}.") from error


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError, naming the first difference, unless both give every token the same id."""
    ours, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (target, draft))
    different = [(i, token) for token, i in ours.items() if theirs.get(token) != i]
    different += [(i, token) for token, i in theirs.items() if token not in ours]
    if different:
        _, token = min(different)
        one, other = (vocab.get(token, "missing") for vocab in (ours, theirs))
        raise ValueError(
            f"The draft model's vocabulary differs from the target's in {len(different)} tokens; {token!r}, "
            f"say, is {one} in the target and {other} in the draft model. Only a model with the same "
            "vocabulary can draft."
        )


class Detokenizer:
    """Decodes one output while its tokens arrive.

    The texts returned by `push` and the final `flush`, joined, equal `decode` of all ids. A piece
    never ends inside a character: bytes that may still become one are held back. `push([id])`
    token by token gives the text that each token completes.

    How: only a short window of the latest ids is decoded again at each call. The window is cut
    where decoding its two halves apart gives the same text as decoding it whole.
    """

    MAX_WINDOW = 16  # ids after which the window is cut
    KEPT = 4  # ids kept at least, as context for the next ones

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text that were returned already
        self._limit = self.MAX_WINDOW

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        to_token = self._tokenizer.backend.id_to_token
        known = [i for i in ids if i not in self._skipped and to_token(i) is not None]
        self._window += known
        if not known or known[-1] in self._tokenizer._byte_ids:
            return ""  # a run of byte tokens is decoded as a whole, so it must end first
        text = self._decode(self._window)
        # A trailing U+FFFD may be the beginning of a character; what stands before it is certain.
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._returned : certain]
        self._returned = max(self._returned, certain)
        if len(self._window) > self._limit:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the text held back and start anew."""
        piece = self._decode(self._window)[self._returned :]
        self._window, self._returned, self._limit = [], 0, self.MAX_WINDOW
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Forget all but the last ids of the window, whose text is `text`.

        A character has at most 4 bytes, so of 4 neighbouring places between tokens at least one
        lies between characters. Halves of a character decode to more than one U+FFFD, which the
        comparison notices. A tokenizer of the SentencePiece kind drops the first space of whatever
        it decodes, hence the comparison with and without it.
        """
        for kept in range(self.KEPT, self.KEPT + 4):
            head, tail = self._decode(self._window[:-kept]), self._decode(self._window[-kept:])
            if text in (head + tail, f"{head} {tail}") and len(text) - self._returned <= len(tail):
                self._window = self._window[-kept:]
                self._returned -= len(text) - len(tail)
                self._limit = self.MAX_WINDOW
                return
        self._limit = 2 * len(self._window)  # try again later, keeping the cost per token constant


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); fetch the model again.") from error


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of tokenizer_config.json: each a text or an object with one."""
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def as_ids(value: int | list[int] | None) -> list[int]:
    """Zero, one or several ids, as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>` if they stand for bytes (as in Llama 2), else none."""
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    letter = ids[ord("A")]
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    return frozenset(i for i in ids if i is not None)


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; a single one is called `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    template = config.get("chat_template") or {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Jinja as chat templates expect it. They come with the model, so they run in a sandbox."""

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
    return environment.from_string(source)
