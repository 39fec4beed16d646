"""Prefix-aware routing: choose the replica that has cached most of a prompt, unless it is busier than others.

A prompt has a prefix every `PREFIX_STEP` characters, identified by a hash, so two prompts share as many
hashes as prefixes. The balancer remembers which replicas the `MAX_REMEMBERED` latest prefixes were sent to,
not whether they are still cached. It does not depend on Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from math import ceil
from typing import Any

PREFIX_STEP = 128  # characters; about two blocks of the KV cache
MAX_PREFIXES = 512  # of one prompt
MAX_REMEMBERED = 200_000  # prefixes
KNOWN = 1 / 3  # ignore shorter cached shares of a prompt: recomputing them adds under 50% to the prefill


def prefix_hashes(body: bytes, client: bytes = b"") -> list[bytes]:
    """Return the hashes of a request's prefixes, shortest first; [] if the body is invalid. They depend on
    `client` and cache_salt, because requests that differ in these share no cached prefixes."""
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
        return []  # the replica reports the error
    return hashes


class Balancer:
    """Chooses a replica for each request.

    Attributes:
        slack: how many more requests than the least busy replica one may run and still be chosen by cache.
        running: number of requests by replica, updated by the caller.
    """

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self.running: Counter[str] = Counter()
        self._sent: dict[str, int] = {}  # requests by replica since replicas joined or left
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def choose(self, prefixes: Sequence[bytes], replicas: Collection[str]) -> str:
        """Return the replica for a request with these prefixes, and remember that it now caches them."""
        if self._sent.keys() != set(replicas):  # a new replica does not catch up with the others
            self._sent = dict.fromkeys(replicas, 0)
            self.running += Counter()  # forgets replicas without requests
        least = min(self.running[replica] for replica in replicas)
        # Short prefixes, such as a shared system prompt, are ignored: such requests go to the idlest replica,
        # and soon all replicas have cached the prefix.
        longest = reversed(prefixes[ceil(len(prefixes) * KNOWN) - 1 :])
        holders = ([r for r in replicas if r in self._holders.get(prefix, ())] for prefix in longest)
        free = [r for r in next(filter(None, holders), []) if self.running[r] <= least + self.slack]
        chosen = min(free or replicas, key=lambda r: (self.running[r], self._sent[r]))
        self._sent[chosen] += 1
        for prefix in reversed(prefixes):  # short ones last, to be evicted after longer ones
            self._holders[prefix] = {chosen, *(self._holders.pop(prefix, set()) & set(replicas))}
        while len(self._holders) > MAX_REMEMBERED:
            self._holders.popitem(last=False)
        return chosen
