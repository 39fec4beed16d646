"""Encode and decode text with the `tokenizers` library and the files of a Hugging Face model folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .chat import read_templates, render
from .checks import check_size, read_json, reason, shown

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
# How byte-level vocabularies (GPT-2's and those after it) write bytes: letters for themselves, others beyond.
LETTERS = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = [byte for byte in range(256) if byte not in LETTERS]
BYTES = {chr(byte): byte for byte in LETTERS} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        name: the folder's.
        vocab_size: number of tokens, added ones included. A model may have more rows (padding).
        eos_token_ids: every token that ends an output: those of generation_config.json, then of config.json,
            then of tokenizer_config.json.
        special_token_ids: tokens that are not text, such as `<|im_end|>`.
        byte_token_ids: tokens of single bytes (as in Llama 2), mostly none.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.name = folder.resolve().name
        self.backend = _read(folder)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder().items()
        self.special_token_ids = frozenset(i for i, token in added if token.special)
        file = folder / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        self._named_tokens = _named_tokens(config)
        ends = [i for name in ("generation_config", "config") for i in _end_ids(folder / f"{name}.json")]
        if "eos_token" in self._named_tokens:
            ends.append(self.backend.token_to_id(self._named_tokens["eos_token"]))
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.byte_token_ids = _byte_token_ids(self.backend)
        self._templates = read_templates(folder, config)

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens written out in it, such as `<|im_end|>`, are recognized.
        `add_special_tokens` adds the model's own, usually a BOS, which a rendered chat has already."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # no str, or what broken JSON escapes produce
            half = re.search("[\ud800-\udfff]", text) if isinstance(text, str) else None
            if half:
                raise ValueError(f"the text has {half[0]!r}, half of a surrogate pair.") from None
            raise ValueError(f"{shown(text)} is not a text.") from None

    def encode_prompt(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises ValueError for a text too long for the window, before encoding it
        takes long."""
        if len(text) > max_model_len * self._longest_token:
            said = f"The prompt has {len(text)} characters"
            raise ValueError(f"{said}, too many for max_model_len={max_model_len}.")
        return self.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Ids outside the vocabulary give nothing; broken UTF-8 gives U+FFFD."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError):  # the library's ids have 32 bits
            raise ValueError(f"{shown(ids)} are no token ids.") from None

    def text_of(self, token: int) -> str:
        """Return the text of one token, also of a special one, as it reads behind others: some tokenizers
        drop the space that a text begins with. U+FFFD stands for part of a character."""
        anchor, before = self._anchor
        whole = self.decode([*anchor, token], skip_special_tokens=False)
        fits = whole.startswith(before) and whole != before
        return whole[len(before) :] if fits else self.decode([token], skip_special_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length divided by this many tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, also if they are part of a character."""
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
        """Return the prompt of a conversation as text, to encode with `add_special_tokens=False`. `messages`
        are dicts with `role` and `content`; for `kwargs` and errors see `chat.render`."""
        variables = {**self._named_tokens, **kwargs}
        return render(self._templates, messages, add_generation_prompt=add_generation_prompt, **variables)


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer.json; nanospec needs one, so save the model with a "
            "fast tokenizer (transformers: tokenizer.save_pretrained)."
        )
    check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.decode(backend.encode("a 1 \u00e9\n").ids)  # may find that parts do not fit
        if not backend.get_vocab_size(with_added_tokens=True):
            raise ValueError("it has no tokens")
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError(f"{path} is not a tokenizer ({reason(error)}); fetch it again.") from error
    backend.no_truncation()  # some files carry settings from training
    backend.no_padding()
    return backend


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError, naming the first difference, unless both give every token the same id."""
    ours, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (target, draft))
    different = [(i, t) for t, i in (theirs | ours).items() if ours.get(t) != theirs.get(t)]
    if different:
        _, token = min(different)
        one, other = (vocab.get(token, "missing") for vocab in (ours, theirs))
        raise ValueError(
            f"The draft model's vocabulary differs from the target's in {len(different)} tokens; {token!r}, "
            f"say, is {one} in the target and {other} in the draft model. Only a model with the same "
            "vocabulary can draft."
        )


def _end_ids(path: Path) -> list[Any]:
    """Return the ids of the tokens that end texts, from a JSON file that may be missing."""
    given = read_json(path).get("eos_token_id") if path.is_file() else None
    found = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(i) is int and 0 <= i < 2**31 for i in found):
        raise ValueError(f"{path}: eos_token_id={shown(given)} must be a token id or a list of token ids.")
    return found


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ... of tokenizer_config.json, each a text or an object with one."""
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {n: token.get("content") if isinstance(token, dict) else token for n, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _byte_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens `<0x00>` to `<0xFF>` if they stand for bytes (as in Llama 2)."""
    letter = backend.token_to_id("<0x41>")
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
