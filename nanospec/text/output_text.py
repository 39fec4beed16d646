"""The text of one output while its tokens arrive: decoded, cut at stop strings, streamed in pieces.

`tokenizers.DecodeStream` decodes incrementally, too, but with byte tokens (as in Llama 2) it fails on bytes
that are not UTF-8, which sampling may draw (tokenizers 0.23): `<0x3D> <0xAA> ▁` raises an exception,
`<0x41> <0x80>` gives "A" where `decode` gives U+FFFD twice. It also has no `flush`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..outputs import Piece
from .tokenizer import REPLACEMENT, Tokenizer


class Detokenizer:
    """Decode one output while its tokens arrive.

    The texts returned by `push` and the final `flush`, joined, equal `decode` of all ids. A piece never ends
    inside a character: bytes that may still become one are held back. Each call decodes a short window of the
    latest ids, which is cut where decoding its two halves apart gives the same text as decoding it whole.
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
        certain = len(text) - text.endswith(REPLACEMENT)
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
        stop: the stop string that ended it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        """`min_tokens`: the number of tokens before which stop strings do not count."""
        self.text, self.token_texts = "", list[str]()
        self.stop: str | None = None
        self.num_tokens, self.num_text_tokens = 0, sys.maxsize
        self.tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._streamed = self._num_pieces = 0  # characters and pieces handed out
        self._hold_back = max((len(s) for s in stops), default=1) - 1

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
        if max(found)[0] < 0:
            return False
        cut, self.stop = min((at, s) for at, s in found if at >= 0)
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
