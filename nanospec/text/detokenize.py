"""Detokenize incrementally, at a cost per token that does not depend on the length of the text.

`tokenizers.DecodeStream` does the same, but with byte tokens (as in Llama 2) it fails on bytes that are not
UTF-8, which sampling may draw (tokenizers 0.23): `<0x3D> <0xAA> ▁` raises an exception, `<0x41> <0x80>` gives
"A" where `decode` gives U+FFFD twice. It also has no `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._limit = self.MAX_WINDOW

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
        if len(self._window) > self._limit:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the text held back and start anew."""
        piece = self._decode(self._window)[self._returned :]
        self._window, self._returned, self._limit = [], 0, self.MAX_WINDOW
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
                self._limit = self.MAX_WINDOW
                return
        self._limit = 2 * len(self._window)  # try again later, keeping the cost per token constant
