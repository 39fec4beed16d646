"""Choosing the replica for a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.apps.cluster.routing import MAX_PREFIXES, PREFIX_STEP, Balancer, prefix_hashes

REPLICAS = ("a", "b", "c")


def chat(*texts: str, **more: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"messages": messages, **more}).encode()


def completion(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, **more}).encode()


def common(first: list[bytes], second: list[bytes]) -> int:
    return sum(a == b for a, b in zip(first, second))


@given(start=st.text(max_size=3 * PREFIX_STEP), ends=st.tuples(*[st.text(max_size=2 * PREFIX_STEP)] * 2))
def test_shared_hashes_match_common_prefix_length(start: str, ends: tuple[str, str]) -> None:
    texts = [start + end for end in ends]
    first, second = (prefix_hashes(completion(text)) for text in texts)
    alike = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
    assert [len(first), len(second)] == [len(text) // PREFIX_STEP for text in texts]
    assert common(first, second) == alike // PREFIX_STEP
    assert not set(first[alike // PREFIX_STEP :]) & set(second[alike // PREFIX_STEP :])


def test_longer_conversation_keeps_prefix_hashes() -> None:
    before, after = prefix_hashes(chat("x" * 500)), prefix_hashes(chat("x" * 500, "y" * 300, "z" * 300))
    assert len(before) >= 4
    assert len(after) > len(before) + 3
    assert common(before, after) >= len(before) - 1  # the last one held the end of the list


def test_hashes_differ_by_client_and_cache_salt() -> None:
    every = [
        prefix_hashes(completion("x" * 300), b"one"), prefix_hashes(completion("x" * 300), b"two"),
        prefix_hashes(completion("x" * 300)), prefix_hashes(completion("x" * 300, cache_salt="s")),
    ]  # fmt: skip
    assert len({name for names in every for name in names}) == 4 * 2


def test_invalid_body_has_no_prefix_hashes() -> None:
    bodies = (b"", b"{", b"[]", b"[" * 99999, b"{}", b'{"messages": null}', b'{"prompt": 5}', b"\xff", b"7")
    assert [prefix_hashes(body) for body in bodies] == [[]] * len(bodies)
    assert len(prefix_hashes(completion("x" * PREFIX_STEP * (MAX_PREFIXES + 9)))) == MAX_PREFIXES
    ids = list(range(100))
    assert len(prefix_hashes(completion(ids))) == len(json.dumps(ids)) // PREFIX_STEP


def names(text: str) -> list[bytes]:
    """Return one prefix name per letter."""
    return [text[: i + 1].encode() for i in range(len(text))]


def test_same_prefix_goes_to_same_replica() -> None:
    balancer = Balancer(slack=2)
    homes = {text: balancer.choose(names(text), REPLICAS) for text in ("xaaa", "ybbb", "zccc")}
    assert sorted(homes.values()) == ["a", "b", "c"]  # new prefixes are spread out
    for text in ("xaaa", "zccc", "ybbb", "xaaa"):
        assert balancer.choose(names(text + "more"), REPLICAS) == homes[text]
    assert balancer.choose(names("xaQQ"), REPLICAS) == homes["xaaa"]


def test_longest_prefix_decides() -> None:
    balancer = Balancer(slack=0)
    first = balancer.choose(names("s1"), REPLICAS)
    balancer.running[first] = 1
    second = balancer.choose(names("s2"), REPLICAS)  # same system prompt, but the first replica is busy
    balancer.running[first] = 0
    assert second != first
    assert [balancer.choose(names(text), REPLICAS) for text in ("s1x", "s2x", "s1y")] == [
        first,
        second,
        first,
    ]


@pytest.mark.parametrize(("own", "homes"), [(4, {"a"}), (5, set(REPLICAS))], ids=["a-third", "less"])
def test_short_shared_prefix_does_not_attract_requests(own: int, homes: set[str]) -> None:
    """Prompts have two shared prefixes of a system prompt and `own` unshared ones."""
    balancer = Balancer(slack=2)
    prompts = [names("ss" + str(number) * own) for number in range(6)]
    assert {balancer.choose(prompt, REPLICAS) for prompt in prompts} == homes
    balancer.running.update(["a", "b"])  # if all replicas hold it, the idlest gets the next
    assert balancer.choose(names("ss!"), REPLICAS) == ("c" if "c" in homes else "a")


@given(
    sent=st.lists(st.sampled_from(["p", "pq", "pqr", "r"]), min_size=1, max_size=60), slack=st.integers(0, 5)
)
def test_load_difference_is_bounded(sent: list[str], slack: int) -> None:
    """No request ever finishes here."""
    balancer, load = Balancer(slack), dict.fromkeys(REPLICAS, 0)
    for text in sent:
        chosen = balancer.choose(names(text), REPLICAS)
        balancer.running[chosen] += 1
        load[chosen] += 1
        assert max(load.values()) - min(load.values()) <= slack + 1


def test_removed_replica_is_not_chosen() -> None:
    balancer = Balancer(slack=2)
    home = balancer.choose(names("abc"), REPLICAS)
    left = [replica for replica in REPLICAS if replica != home]
    assert balancer.choose(names("abc"), left) in left
    assert balancer.choose(names("abc"), REPLICAS) in REPLICAS


def test_oldest_prefixes_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanospec.apps.cluster.routing.MAX_REMEMBERED", 6)
    balancer = Balancer(slack=1)
    home = balancer.choose(names("abc"), REPLICAS)
    balancer.choose(names("abcdefgh"), REPLICAS)  # eight prefixes: the last six sent are kept, "a" among them
    assert len(balancer._holders) == 6
    assert balancer.choose(names("a"), REPLICAS) == home
