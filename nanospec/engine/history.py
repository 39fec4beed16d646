"""Texts of finished requests in which n-gram lookup finds drafts for later requests of the same client.

Texts are stored by key, the salt of the prefix cache, and searched only for requests with the same key. They
are ranked by the n-grams that they share with a prompt, of which those with certain hashes are compared.
Memory is bounded: the oldest texts of a key and the least recently used keys are removed.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

N, SAMPLE = 8, np.uint64(4)  # length of the n-grams; one in `SAMPLE` is compared
MAX_REFERENCE = 1 << 13  # tokens searched for a request
MAX_PER_KEY, MAX_TOKENS = 1 << 16, 1 << 20  # tokens stored per key and in all, in about 5 bytes each
_MULTIPLIER, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)

Text = tuple[NDArray[np.int32], NDArray[np.uint16]]  # tokens, followed by -1; sampled hashes


class History:
    """The texts of finished requests. `max_len`: maximum number of tokens searched, 0 to store none."""

    def __init__(self, max_len: int) -> None:
        self.requires_key = False  # whether requests without a key (b"") have no history
        self.num_tokens = 0
        self._limit = min(max_len, MAX_REFERENCE)
        self._by_key = OrderedDict[bytes, deque[Text]]()  # latest last

    def add(self, key: bytes, tokens: Sequence[int]) -> None:
        """Store a text, or its end if it is longer than the limit."""
        if not self._limit or (self.requires_key and not key):
            return
        text = np.array((*tokens[-self._limit + 1 :], -1), np.int32)
        texts = self._by_key.setdefault(key, deque())
        self._by_key.move_to_end(key)
        texts.append((text, _sampled_hashes(text[:-1])))
        self.num_tokens += len(text)
        excess = sum(len(each) for each, _ in texts) - MAX_PER_KEY
        while excess > 0 or self.num_tokens > MAX_TOKENS:
            oldest_key, oldest = next(iter(self._by_key.items())) if excess <= 0 else (key, texts)
            removed = len(oldest.popleft()[0])
            self.num_tokens -= removed
            excess -= removed
            if not oldest:
                del self._by_key[oldest_key]

    def search(self, key: bytes, prompt: Sequence[int]) -> NDArray[np.int32]:
        """Return the texts that share most n-grams with `prompt`, of equal ones the latest, as far as they
        fit. The best is last, because lookup prefers the latest of equally long matches."""
        if not (texts := self._by_key.get(key)):
            return np.empty(0, np.int32)
        self._by_key.move_to_end(key)
        wanted = np.zeros(1 << 16, bool)
        wanted[_sampled_hashes(np.array(prompt, np.int32))] = True
        shared = [np.count_nonzero(wanted[hashes]) for _, hashes in texts]
        best_last = [texts[i][0] for i in np.argsort(shared, kind="stable")]
        num_tokens = np.cumsum([len(text) for text in reversed(best_last)])
        count = int(np.searchsorted(num_tokens, self._limit, side="right"))
        return np.concatenate(best_last[len(best_last) - count :])


def _sampled_hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint16]:
    """Return the different hashes of the sampled n-grams."""
    hashes = np.zeros(max(len(tokens) - N + 1, 0), np.uint64)
    for i in range(N):
        hashes = (hashes ^ tokens[i : i + len(hashes)].astype(np.uint64)) * _MULTIPLIER
        hashes ^= hashes >> _SHIFT
    return np.unique((hashes[hashes % SAMPLE == 0] >> np.uint64(16)).astype(np.uint16))
