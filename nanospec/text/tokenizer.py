"""Text to tokens and back, by the `tokenizers` library and the files of a Hugging Face model folder; the text
of an output while its tokens arrive: decoded, cut at stop strings, streamed in pieces."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..outputs import Piece
from . import check_size, read_json, reason, shown
from .chat import read_templates, render


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
        self.has_chat_template = bool(self._templates)

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


class Detokenizer:
    """Decode one output while its tokens arrive.

    The texts returned by `push` and the final `flush`, joined, equal `decode` of all ids. A piece never ends
    inside a character: bytes that may still become one are held back. Each call decodes a short window of the
    latest ids, which is cut where decoding its two halves apart gives the same text as decoding it whole.

    `tokenizers.DecodeStream` raises an exception on byte tokens (as in Llama 2) that are not UTF-8, such as
    `<0x3D> <0xAA> ▁`, which sampling may draw (tokenizers 0.23). It has no `flush`.
    """

    MAX_WINDOW = 16  # ids after which the window is cut
    KEPT = 4  # ids kept at least, as context for the next ones

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text that were returned already

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        to_token = self.tokenizer.backend.id_to_token
        known = [i for i in ids if i not in self._skipped and to_token(i) is not None]
        self._window += known
        if not known or known[-1] in self.tokenizer.byte_token_ids:
            return ""  # a run of byte tokens is decoded as a whole, so it must end first
        text = self._decode(self._window)
        # A trailing U+FFFD may be the beginning of a character; what stands before it is certain.
        certain = len(text) - text.endswith("\ufffd")
        piece = text[self._returned : certain]
        self._returned = max(self._returned, certain)
        if len(self._window) > self.MAX_WINDOW:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the text held back and start anew."""
        piece = self._decode(self._window)[self._returned :]
        self._window, self._returned = [], 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Drop all but the last ids of the window, whose text is `text`.

        A character has at most 4 bytes, so of 4 neighbouring places between tokens at least one lies between
        characters. Halves of a character decode to more than one U+FFFD, which the comparison notices. A
        SentencePiece tokenizer drops the first space, hence the comparison with and without it.
        """
        for kept in range(self.KEPT, self.KEPT + 4):
            head, tail = self._decode(self._window[:-kept]), self._decode(self._window[-kept:])
            if text in (head + tail, f"{head} {tail}") and len(text) - self._returned <= len(tail):
                self._window = self._window[-kept:]
                self._returned -= len(text) - len(tail)
                return


class OutputText:
    """The text of one output; without a tokenizer it stays empty.

    Attributes:
        text: the whole, without the stop string.
        token_texts: what each token added to it.
        num_tokens: the tokens of the output, of which the first `num_text_tokens` are of the text. Behind
            them are a stop token, or those that the stop string cut off.
        stop: the stop string that ended it. Those before `min_tokens` tokens do not count.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.text, self.token_texts = "", list[str]()
        self.stop: str | None = None
        self.num_tokens, self.num_text_tokens = 0, sys.maxsize
        self.tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._streamed = self._num_pieces = 0  # characters and pieces handed out
        self._hold_back = max(map(len, stops), default=1) - 1

    def push(self, token: int, is_text: bool = True) -> bool:
        """Add a token; return whether it completes a stop string, which is cut off."""
        if not is_text:
            self.num_text_tokens = self.num_tokens
        self.num_tokens += 1
        if self._detokenizer is None:
            return False
        self.token_texts.append(self._detokenizer.push([token]) if is_text else "")
        return self._append(self.token_texts[-1])

    def flush(self) -> bool:
        """Add the text that was held back at the end; return whether it completes a stop string."""
        return not self.stop and self._detokenizer is not None and self._append(self._detokenizer.flush())

    def _append(self, new: str) -> bool:
        old = len(self.text)
        self.text += new
        if not self._stops or self.num_tokens < self._min_tokens:
            return False
        found = [(self.text.find(s, max(old - len(s) + 1, 0)), s) for s in self._stops]
        if not (found := [(at, s) for at, s in found if at >= 0]):
            return False
        cut, self.stop = min(found)
        self.text = self.text[:cut]
        begin = 0
        for i, piece in enumerate(self.token_texts):
            if piece and begin >= cut:
                self.num_text_tokens = min(self.num_text_tokens, i)
            self.token_texts[i] = piece[: max(cut - begin, 0)]
            begin += len(piece)
        return True

    def new_pieces(self, sources: Sequence[int], ended: bool) -> list[Piece]:
        """Return the pieces not handed out yet, without what may turn out to begin a stop string, unless the
        output has `ended`. `sources`: of all tokens, see `Piece`."""
        end = len(self.text) - (0 if ended else self._hold_back)
        pieces = []
        for piece in map(Piece, self.token_texts[self._num_pieces :], sources[self._num_pieces :]):
            if self._streamed + len(piece.text) > end:
                break
            pieces.append(piece)
            self._streamed += len(piece.text)
        self._num_pieces += len(pieces)
        if ended and self._streamed < end:  # the rest of an unfinished character
            pieces.append(Piece(self.text[self._streamed :], -1))
            self._streamed = end
        return pieces


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = "save the model with a fast tokenizer (transformers: tokenizer.save_pretrained)"
        raise FileNotFoundError(f"{folder} holds no tokenizer.json; {fix}.")
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
    if different := {(i, token) for token, i in ours.items() ^ theirs.items()}:
        token = min(different)[1]
        raise ValueError(
            f"Only a model with the target's vocabulary can draft: {token!r}, say, is "
            f"{ours.get(token, 'missing')} in the target and {theirs.get(token, 'missing')} in the draft's."
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
