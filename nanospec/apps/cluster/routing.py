"""Choose the replica that has computed much of a prompt's beginning before, unless it has more to do.

A prompt has a prefix every `PREFIX_STEP` characters, known by the hash of its text, so that two prompts have
as many hashes in common as prefixes. The balancer remembers where the `MAX_REMEMBERED` latest prefixes were
sent. It knows neither Ray nor what is still in a cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from math import ceil
from typing import Any

PREFIX_STEP = 128  # characters: about two pages of the KV cache
MAX_PREFIXES = 512  # of one prompt
MAX_REMEMBERED = 200_000  # prefixes
KNOWN = 1 / 3  # of a prompt that counts as known: to compute less of it again adds at most half to the rest


def prefix_hashes(body: bytes, client: bytes = b"") -> list[bytes]:
    """Return the hashes of a request's prefixes, the shortest first; none if the body is no request. `client`
    and cache_salt change them, as such requests share no cached prefixes."""
    try:
        request: Any = json.loads(body)
        prompt = request["messages"] if "messages" in request else request["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        digest, hashes = hashlib.blake2b(client, digest_size=12), []
        digest.update(f"{request.get('cache_salt', '')} ".encode())
        for i in range(min(len(text) // PREFIX_STEP, MAX_PREFIXES)):
            digest.update(text[i * PREFIX_STEP : (i + 1) * PREFIX_STEP].encode())
            hashes.append(digest.digest())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # the replica says what is wrong with it
    return hashes


class Balancer:
    """Chooses among replicas.

    Attributes:
        slack: how many more requests than the idlest a replica may have and still be chosen for its cache.
        running: requests by replica, which the caller counts.
    """

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self.running: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def choose(self, prefixes: Sequence[bytes], replicas: Collection[str]) -> str:
        """Return the replica for a request with these prefixes, which then counts as one that has them."""
        least = min(self.running[replica] for replica in replicas)
        # A small part, as of a system prompt that all share, is not looked for: the idlest replica gets the
        # request, and soon all replicas hold that part.
        longest = reversed(prefixes[ceil(len(prefixes) * KNOWN) - 1 :])
        holders = ([r for r in replicas if r in self._holders.get(prefix, ())] for prefix in longest)
        free = [r for r in next(filter(None, holders), []) if self.running[r] <= least + self.slack]
        chosen = min(free or replicas, key=lambda r: (self.running[r], self._sent[r]))
        self._sent[chosen] += 1
        for prefix in reversed(prefixes):  # short ones last, as they outlive longer ones
            self._holders.setdefault(prefix, set()).add(chosen)
            self._holders.move_to_end(prefix)
        while len(self._holders) > MAX_REMEMBERED:
            self._holders.popitem(last=False)
        return chosen
