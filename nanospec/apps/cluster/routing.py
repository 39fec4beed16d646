"""Which replica gets a request: one that has computed much of its beginning before, unless it has more to do.

A prompt is cut into pieces of `PIECE` characters, and each piece is named by a hash of all text up to its
end, so that two prompts have as many names in common as they begin alike. Where a piece was sent is
remembered for the `MOST` latest. Nothing here knows Ray, nor what a replica still has in its cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import ceil
from typing import Any

PIECE = 128  # characters: about two pages of the KV cache
MOST_PIECES = 512  # of one prompt
MOST = 200_000  # pieces that are remembered
SHARE = 1 / 3  # of a prompt that counts as known: to compute less of it again adds at most half to the rest
_there: tuple[str, ...] = ()


def replicas() -> tuple[str, ...]:
    """The replicas that take requests, as far as this process has been told."""
    return _there


def tell(names: Iterable[str]) -> None:
    """These are the replicas now."""
    global _there
    _there = tuple(sorted(names))


def pieces(body: bytes, client: bytes = b"") -> list[bytes]:
    """The names of a request's pieces, the shortest beginning first; none if it is no request. Requests of
    another `client`, or with another cache_salt, have others, as they share no cached prefixes."""
    try:
        asked: Any = json.loads(body)
        prompt = asked["messages"] if "messages" in asked else asked["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        name = hashlib.blake2b(client + str(asked.get("cache_salt", "")).encode(), digest_size=12).digest()
        data = [text[i : i + PIECE].encode() for i in range(0, len(text) - PIECE + 1, PIECE)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # the replica says what is wrong with it
    names = []
    for piece in islice(data, MOST_PIECES):
        name = hashlib.blake2b(name + piece, digest_size=12).digest()
        names.append(name)
    return names


class Balancer:
    """Chooses among replicas, and knows what each of them has to do, as far as it was sent from here.

    Attributes:
        slack: how many more requests than the idlest a replica may have and still be chosen for its cache.
        running: requests by replica.
    """

    def __init__(self, slack: int, most: int = MOST) -> None:
        self.slack, self._most = slack, most
        self.running: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def choose(self, names: Sequence[bytes], replicas: Collection[str]) -> str:
        """The replica for a request with these pieces, which then counts as one that has them."""
        least = min(self.running[replica] for replica in replicas)
        holders = self._longest(names, replicas)
        free = [replica for replica in holders if self.running[replica] <= least + self.slack]
        chosen = min(free or replicas, key=lambda r: (self.running[r], self._sent[r]))
        self._sent[chosen] += 1
        self._remember(names, chosen)
        return chosen

    @contextmanager
    def busy(self, replica: str) -> Iterator[None]:
        """One more request of a replica, while the block runs."""
        self.running[replica] += 1
        try:
            yield
        finally:
            self.running[replica] -= 1
            if not self.running[replica]:
                del self.running[replica]

    def _longest(self, names: Sequence[bytes], replicas: Collection[str]) -> list[str]:
        """Who of these was sent the longest beginning that anybody of them was sent. Nobody if it is a small
        part, as of a system prompt that all share: the idlest then gets it, and soon all hold it."""
        for name in reversed(names[ceil(len(names) * SHARE) - 1 :]):
            if found := [replica for replica in replicas if replica in self._holders.get(name, ())]:
                return found
        return []

    def _remember(self, names: Sequence[bytes], replica: str) -> None:
        for name in reversed(names):  # beginnings last, as they outlive what follows them
            self._holders.setdefault(name, set()).add(replica)
            self._holders.move_to_end(name)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)
