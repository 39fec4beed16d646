"""Tokenization and detokenization with the `tokenizers` library and the files of a model folder."""

import re
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..kernels import FROM_TARGET
from ..outputs import Piece
from .chat import Messages, compiled, read_templates, render
from .files import check_size, read_json
from .validation import reason, shown


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.name = folder.resolve().name
        self.backend = _read(folder)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)  # the model's may be padded
        added = self.backend.get_added_tokens_decoder().items()
        # Tokens that are not text, such as `<|im_end|>`, and tokens of single bytes (as in Llama 2), if any.
        self.special_token_ids = frozenset(i for i, token in added if token.special)
        self.byte_token_ids = _byte_token_ids(self.backend)
        file = folder / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        self._named_tokens = _named_tokens(config)
        # All tokens that end an output: of generation_config.json, config.json, then tokenizer_config.json.
        ends = [i for name in ("generation_config", "config") for i in _end_ids(folder / f"{name}.json")]
        if "eos_token" in self._named_tokens:
            ends.append(self.backend.token_to_id(self._named_tokens["eos_token"]))
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._templates = read_templates(folder, config)
        self.has_chat_template = bool(self._templates)
        # The template for conversations with tools; see `chat.render`.
        self.tool_template = self._templates.get("tool_use") or self._templates.get("default", "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens in the text, such as `<|im_end|>`, are recognized.
        `add_special_tokens` adds those of the model, usually BOS, which a rendered chat already contains."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # not a str, or an invalid one from broken JSON escapes
            surrogate = re.search("[\ud800-\udfff]", text) if isinstance(text, str) else None
            if surrogate:
                raise ValueError(f"the text has an unpaired surrogate, {surrogate[0]!r}.") from None
            raise ValueError(f"{shown(text)} is not a string.") from None

    def encode_prompt(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError early if it must exceed `max_model_len`."""
        if len(text) > max_model_len * self._longest_token:
            problem = f"The prompt has {len(text)} characters"
            raise ValueError(f"{problem}, too many for max_model_len={max_model_len}.")
        return self.encode(text, add_special_tokens)

    def encode_start(self, text: str, count: int) -> list[int]:
        """Return the first `count` token ids of a text, without the model's special tokens."""
        return self.encode(text[: count * self._longest_token], add_special_tokens=False)[:count]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, skipping ids outside the vocabulary. Invalid UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_of(self, token: int) -> str:
        """Return the text of one token, special ones included, as it appears after other tokens (some
        tokenizers drop a leading space). U+FFFD stands for an incomplete character."""
        anchor, before = self._anchor
        whole = self.decode([*anchor, token], skip_special_tokens=False)
        fits = whole.startswith(before) and whole != before
        return whole[len(before) :] if fits else self.decode([token], skip_special_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: n characters of text are at least n / `_longest_token` tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        anchor = self.encode("a", add_special_tokens=False)[-1:]
        return anchor, self.decode(anchor, skip_special_tokens=False)

    def apply_chat_template(self, messages: Messages, *, tokenize: bool = False, **kwargs: Any) -> Any:
        """Render a conversation as text, to be encoded with `add_special_tokens=False`, or, with `tokenize`
        (transformers' default), as a list of token ids. `messages` are dicts with `role` and `content`. For
        `kwargs` and errors see `chat.render`."""
        text = render(self._templates, messages, **{**self._named_tokens, **kwargs})
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def uses_in_template(self, variable: str) -> bool:
        """Return whether a chat template of the model uses a variable."""
        return any(variable in compiled(source)[1] for source in self._templates.values())


class Detokenizer:
    """Decodes one output incrementally.

    The concatenated results of `push` and the final `flush` equal `decode` of all ids. A result never ends
    inside a character: incomplete ones are held back. Each call decodes only a window of the latest ids, cut
    where decoding its two parts separately gives the same text as decoding it whole.

    `tokenizers.DecodeStream` is not used because it raises an exception for byte tokens (as in Llama 2) that
    are not UTF-8, such as `<0x3D> <0xAA> ▁`, which may be sampled (tokenizers 0.23), and has no `flush`.
    """

    MAX_WINDOW = 16  # number of ids above which the window is cut
    KEPT = 4  # minimum number of ids kept as context for the next ones

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text already returned

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the new text that later ids cannot change."""
        to_token = self.tokenizer.backend.id_to_token
        known = [i for i in ids if i not in self._skipped and to_token(i) is not None]
        self._window += known
        if not known or known[-1] in self.tokenizer.byte_token_ids:
            return ""  # a run of byte tokens is decoded as a whole, once it has ended
        text = self._decode(self._window)
        # A trailing U+FFFD may be the start of a character; the text before it is final.
        final = len(text) - text.endswith("\ufffd")
        piece = text[self._returned : final]
        self._returned = max(self._returned, final)
        if len(self._window) > self.MAX_WINDOW:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the text held back and reset the state."""
        piece = self._decode(self._window)[self._returned :]
        self._window, self._returned = [], 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Drop all but the last ids of the window, whose text is `text`.

        A character has at most 4 bytes, so at least one of 4 consecutive token boundaries is a character
        boundary. A cut inside a character decodes to different text (more U+FFFD), so it is rejected.
        SentencePiece tokenizers drop the first space, so the text is compared with and without it.
        """
        for kept in range(self.KEPT, self.KEPT + 4):
            head, tail = self._decode(self._window[:-kept]), self._decode(self._window[-kept:])
            if text in (head + tail, f"{head} {tail}") and len(text) - self._returned <= len(tail):
                self._window = self._window[-kept:]
                self._returned -= len(text) - len(tail)
                return


class OutputText:
    """The text of one output, without special tokens if `skip`; empty without a tokenizer. Stop strings have
    no effect before `min_tokens` tokens."""

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), min_tokens: int = 0, skip: bool = True
    ) -> None:
        self.text = ""  # without the stop string
        self.token_texts: list[str] = []  # the part of the text that each token added
        self.stop: str | None = None  # the stop string that ended the output
        self.num_tokens = 0
        self.num_text_tokens = sys.maxsize  # tokens before a stop token or stop string, if there is one
        self.tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip)
        self._streamed = self._num_pieces = 0  # characters and pieces already returned by `new_pieces`
        self._hold_back = max(map(len, stops), default=1) - 1

    def push(self, token: int, is_text: bool = True) -> bool:
        """Add a token. If it completes a stop string, cut the text before that string and return True."""
        if not is_text:
            self.num_text_tokens = self.num_tokens
        self.num_tokens += 1
        if self._detokenizer is None:
            return False
        self.token_texts.append(self._detokenizer.push([token]) if is_text else "")
        return self._append(self.token_texts[-1])

    def flush(self) -> bool:
        """Add the text held back by the detokenizer; return whether it completes a stop string."""
        return not self.stop and self._detokenizer is not None and self._append(self._detokenizer.flush())

    def _append(self, new: str) -> bool:
        old = len(self.text)
        self.text += new
        if not self._stops or self.num_tokens < self._min_tokens:
            return False
        matches = [(self.text.find(s, max(old - len(s) + 1, 0)), s) for s in self._stops]
        if not (matches := [(at, s) for at, s in matches if at >= 0]):
            return False
        cut, self.stop = min(matches)
        self.text = self.text[:cut]
        begin = 0
        for i, piece in enumerate(self.token_texts):
            if piece and begin >= cut:
                self.num_text_tokens = min(self.num_text_tokens, i)
            self.token_texts[i] = piece[: max(cut - begin, 0)]
            begin += len(piece)
        return True

    def new_pieces(self, sources: Sequence[int], ended: bool) -> list[Piece]:
        """Return the pieces not returned yet. Text that may be the start of a stop string is held back until
        the output has `ended`. `sources` are those of all tokens, see `Piece`."""
        end = len(self.text) - (0 if ended else self._hold_back)
        pieces = []
        for piece in map(Piece, self.token_texts[self._num_pieces :], sources[self._num_pieces :]):
            if self._streamed + len(piece.text) > end:
                break
            pieces.append(piece)
            self._streamed += len(piece.text)
        self._num_pieces += len(pieces)
        if ended and self._streamed < end:  # the rest of an incomplete character
            pieces.append(Piece(self.text[self._streamed :], FROM_TARGET))
            self._streamed = end
        return pieces


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = "save the model with a fast tokenizer (transformers: tokenizer.save_pretrained)"
        raise FileNotFoundError(f"{folder} has no tokenizer.json; {fix}.")
    check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.decode(backend.encode("a 1 \u00e9\n").ids)  # raises if parts are inconsistent
        if not backend.get_vocab_size(with_added_tokens=True):
            raise ValueError("it has no tokens")
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise ValueError(f"{path} is not a tokenizer ({reason(error)}); download it again.") from error
    backend.no_truncation()  # some files contain settings for training
    backend.no_padding()
    return backend


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError, with the first difference, unless both tokenizers map every token to the same id."""
    ours, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (target, draft))
    if different := {(i, token) for token, i in ours.items() ^ theirs.items()}:
        token = min(different)[1]
        raise ValueError(
            f"A draft model must have the target's vocabulary, but token {token!r} is "
            f"{ours.get(token, 'missing')} in the target's and {theirs.get(token, 'missing')} in the draft's."
        )


def _end_ids(path: Path) -> list[Any]:
    """Return the EOS token ids in a JSON file, which may be missing."""
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"{path}: eos_token_id={shown(value)} must be a token id or a list of token ids.")
    return ids


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ... of tokenizer_config.json, each a string or an object with one."""
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {n: token.get("content") if isinstance(token, dict) else token for n, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _byte_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens `<0x00>` to `<0xFF>` if they represent bytes (as in Llama 2)."""
    letter = backend.token_to_id("<0x41>")
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
