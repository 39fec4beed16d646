"""Texts of finished requests in which n-gram lookup finds drafts for later requests of the same client.

Texts are stored by key, the salt of the prefix cache, and searched only for requests with the same key. They
are ranked by the number of n-grams they share with the prompt, estimated from a sample of their hashes. The
oldest texts of a key and the least recently used keys are removed.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

N, SAMPLE = 8, np.uint64(4)  # length of the n-grams; one in `SAMPLE` is compared
MAX_REFERENCE = 1 << 13  # tokens searched for a request
MAX_KEYS, MAX_TEXTS, MAX_TOKENS = 64, 256, 1 << 16  # keys; texts and tokens of each; 30 MB in all
_MULTIPLIER, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)

Text = tuple[NDArray[np.int32], NDArray[np.uint16]]  # tokens, followed by -1; sampled hashes


class History:
    """The texts of finished requests. `max_len`: maximum number of tokens searched, 0 to store none."""

    def __init__(self, max_len: int) -> None:
        self.requires_key = False  # whether requests without a key (b"") have no history
        self._limit = min(max_len, MAX_REFERENCE)
        self._by_key = OrderedDict[bytes, deque[Text]]()  # latest last

    def add(self, key: bytes, tokens: Sequence[int]) -> None:
        """Store a text, or its end if it is longer than the limit, unless it is too short to help."""
        if not self._limit or len(tokens) < 2 * N or (self.requires_key and not key):
            return
        text = np.array((*tokens[-self._limit + 1 :], -1), np.int32)
        texts = self._by_key.setdefault(key, deque(maxlen=MAX_TEXTS))
        texts.append((text, _sampled_hashes(text[:-1])))
        while sum(len(each) for each, _ in texts) > MAX_TOKENS:
            texts.popleft()
        self._by_key.move_to_end(key)
        if len(self._by_key) > MAX_KEYS:
            self._by_key.popitem(last=False)

    def search(self, key: bytes, prompt: Sequence[int]) -> NDArray[np.int32]:
        """Return as many texts as fit, first those that share the most n-grams with `prompt`; later texts win
        ties. The best is last, because lookup prefers the latest of equally long matches."""
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
