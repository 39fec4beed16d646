"""The text of one output while its tokens arrive: decoded, cut at stop strings, streamed in pieces."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..outputs import Piece
from .detokenize import Detokenizer
from .tokenizer import Tokenizer


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
