"""Text to token ids and back.

`Tokenizer` reads what a Hugging Face model folder holds (`tokenizer.json` and friends) through the
`tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..models.files import check_size, read_json, reason
from .chat import read_templates, render
from .checks import shown
from .panics import is_panic, without_panics

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
DAMAGED = "({}); where that is no odd text, tokenizer.json is damaged: fetch it again."
# How byte-level vocabularies (GPT-2's and those after it) write bytes: letters for themselves, others beyond.
LETTERS = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = [byte for byte in range(256) if byte not in LETTERS]
BYTES = {chr(byte): byte for byte in LETTERS} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        name: the folder's.
        vocab_size: number of tokens, added ones included. A model may have more rows (padding).
        bos_token_id: the token that begins a text, None if the model has none.
        eos_token_ids: every token that ends an output, the usual one first: those that
            generation_config.json names, then config.json, then tokenizer_config.json.
        special_token_ids: tokens that are no text, such as `<|im_end|>`.
        byte_token_ids: tokens that stand for single bytes (as in Llama 2), mostly none.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.name = folder.resolve().name
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no tokenizer.json; nanospec needs one, so save the model with a "
                "fast tokenizer (transformers: tokenizer.save_pretrained)."
            )
        check_size(path)
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
            self.backend.decode(self.backend.encode("a 1 \u00e9\n").ids)  # may find that parts do not fit
        except BaseException as error:  # plain Exception, or a panic, which is none
            if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise ValueError(f"{path} is not a tokenizer ({reason(error)}); fetch it again.") from error
        self.backend.no_truncation()  # some files carry settings from training
        self.backend.no_padding()
        file = folder / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        if not self.vocab_size:
            raise ValueError(f"{path} is not a tokenizer (it has no tokens); fetch it again.")
        self.special_token_ids = frozenset(
            i for i, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        self._named_tokens = _named_tokens(config)
        ids = {f"{name}_id": self.backend.token_to_id(text) for name, text in self._named_tokens.items()}
        named = {key: [i] for key, i in ids.items() if i is not None}
        configs = [_ids_of(folder / f"{name}.json") for name in ("generation_config", "config")]
        begins = [i for ids in (named, *configs) for i in ids.get("bos_token_id", [])]
        ends = [i for ids in (*configs, named) for i in ids.get("eos_token_id", [])]
        self.bos_token_id: int | None = next(iter(begins), None)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.byte_token_ids = _byte_token_ids(self.backend)
        self._templates = read_templates(folder, config)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return bool(self._templates)

    @without_panics(f"the tokenizer's library cannot encode this {DAMAGED}")
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in it, such as `<|im_end|>`, count as such.

        `add_special_tokens` adds what the model wants around a text, usually a BOS. Pass False for
        a rendered chat: its template has written the BOS already. Raises ValueError for text with
        an unpaired surrogate, which broken JSON escapes produce.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            if not isinstance(text, str):
                raise ValueError(f"{shown(text)} is no text.") from None
            bad = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if bad is None:
                raise
            raise ValueError(
                f"the text holds U+{ord(bad):04X}, half of a surrogate pair, not a character; remove it."
            ) from None

    @without_panics(f"the tokenizer's library cannot decode this {DAMAGED}")
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary give nothing; broken UTF-8 gives U+FFFD."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:  # its ids have 32 bits
            there = [i for i in ids if 0 <= i < self.vocab_size]
            return self.backend.decode(there, skip_special_tokens=skip_special_tokens)
        except TypeError:
            raise ValueError(f"{shown(ids)} are no token ids.") from None

    def text_of(self, token: int) -> str:
        """Text of one token, also of a special one, as it reads behind others: some tokenizers drop the space
        that a text begins with. U+FFFD for part of a character, and for what cannot be decoded."""
        anchor, before = self._anchor
        try:
            whole = self.decode([*anchor, token], skip_special_tokens=False)
            fits = whole.startswith(before) and whole != before
            return whole[len(before) :] if fits else self.decode([token], skip_special_tokens=False)
        except ValueError:
            return REPLACEMENT

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length divided by it."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, also if that is part of a character."""
        text, raw = self.text_of(token), self.backend.id_to_token(token) or ""
        if token in self.byte_token_ids:
            return bytes.fromhex(raw[3:5])
        if REPLACEMENT in text and all(letter in BYTES for letter in raw):
            return bytes(BYTES[letter] for letter in raw)
        return text.encode()

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        anchor = self.encode("a", add_special_tokens=False)[-1:]
        return anchor, self.decode(anchor, skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for a conversation, as text; encode it with `add_special_tokens=False`.

        `messages` are dicts with `role` and `content`; for `kwargs` and errors see `chat.render`.
        """
        variables = {**self._named_tokens, **kwargs}
        return render(self._templates, messages, add_generation_prompt=add_generation_prompt, **variables)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        text = self.apply_chat_template(messages, **template_options)
        return self.encode(text, add_special_tokens=False)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError, naming the first difference, unless both give every token the same id."""
    ours, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (target, draft))
    either = theirs | ours
    different = [(i, token) for token, i in either.items() if ours.get(token) != theirs.get(token)]
    if different:
        _, token = min(different)
        one, other = (vocab.get(token, "missing") for vocab in (ours, theirs))
        raise ValueError(
            f"The draft model's vocabulary differs from the target's in {len(different)} tokens; {token!r}, "
            f"say, is {one} in the target and {other} in the draft model. Only a model with the same "
            "vocabulary can draft."
        )


def _ids_of(path: Path) -> dict[str, list[int]]:
    """The ids of the tokens that begin and end texts, by key, in a file of JSON that may be missing."""
    config = read_json(path) if path.is_file() else {}
    found = {}
    for key in ("bos_token_id", "eos_token_id"):
        given = config.get(key)
        found[key] = given if isinstance(given, list) else [] if given is None else [given]
        if wrong := [i for i in found[key] if type(i) is not int or not 0 <= i < 2**31]:
            which = "" if wrong[0] is given else f", and {shown(wrong[0])} is none"
            raise ValueError(f"{path}: {key}={shown(given)} must be a token id or a list of them{which}.")
    return found


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of tokenizer_config.json: each a text or an object with one."""
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {n: token.get("content") if isinstance(token, dict) else token for n, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _byte_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>` if they stand for bytes (as in Llama 2), else none."""
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    letter = ids[ord("A")]
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    return frozenset(i for i in ids if i is not None)
