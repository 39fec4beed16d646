"""Choose the replica that has computed much of a prompt's beginning before, unless it has more to do.

A prompt is cut into pieces of `PIECE` characters, and each piece is named by a hash of all text up to its
end, so that two prompts share as many names as they have pieces in common from the start. The balancer
remembers where the `MOST` latest pieces were sent. It knows neither Ray nor what is still in a cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from math import ceil
from typing import Any

PIECE = 128  # characters: about two pages of the KV cache
MOST_PIECES = 512  # of one prompt
MOST = 200_000  # pieces that are remembered
SHARE = 1 / 3  # of a prompt that counts as known: to compute less of it again adds at most half to the rest


def pieces(body: bytes, client: bytes = b"") -> list[bytes]:
    """Return the names of a request's pieces, the shortest beginning first; none if the body is no request.
    Names differ by `client` and cache_salt, as such requests share no cached prefixes."""
    try:
        asked: Any = json.loads(body)
        prompt = asked["messages"] if "messages" in asked else asked["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        digest, names = hashlib.blake2b(client, digest_size=12), []
        digest.update(f"{asked.get('cache_salt', '')} ".encode())
        for i in range(min(len(text) // PIECE, MOST_PIECES)):
            digest.update(text[i * PIECE : (i + 1) * PIECE].encode())
            names.append(digest.digest())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # the replica says what is wrong with it
    return names


class Balancer:
    """Chooses among replicas.

    Attributes:
        slack: how many more requests than the idlest a replica may have and still be chosen for its cache.
        running: requests by replica, which the caller counts.
    """

    def __init__(self, slack: int, most: int = MOST) -> None:
        self.slack, self._most = slack, most
        self.running: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def choose(self, names: Sequence[bytes], replicas: Collection[str]) -> str:
        """Return the replica for a request with these pieces, which then counts as one that has them."""
        least = min(self.running[replica] for replica in replicas)
        # A small part, as of a system prompt that all share, is not looked for: the idlest replica gets the
        # request, and soon all replicas hold that part.
        longest = reversed(names[ceil(len(names) * SHARE) - 1 :])
        holders = ([r for r in replicas if r in self._holders.get(name, ())] for name in longest)
        free = [r for r in next(filter(None, holders), []) if self.running[r] <= least + self.slack]
        chosen = min(free or replicas, key=lambda r: (self.running[r], self._sent[r]))
        self._sent[chosen] += 1
        for name in reversed(names):  # beginnings last, as they outlive what follows them
            self._holders.setdefault(name, set()).add(chosen)
            self._holders.move_to_end(name)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)
        return chosen
