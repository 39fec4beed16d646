"""Which replica gets a request."""

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
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"messages": said, **more}).encode()


def completion(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, **more}).encode()


def common(first: list[bytes], second: list[bytes]) -> int:
    return sum(a == b for a, b in zip(first, second))


@given(start=st.text(max_size=3 * PREFIX_STEP), ends=st.tuples(*[st.text(max_size=2 * PREFIX_STEP)] * 2))
def test_prompts_have_as_many_names_in_common_as_they_begin_alike(start: str, ends: tuple[str, str]) -> None:
    texts = [start + end for end in ends]
    first, second = (prefix_hashes(completion(text)) for text in texts)
    alike = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
    assert [len(first), len(second)] == [len(text) // PREFIX_STEP for text in texts]
    assert common(first, second) == alike // PREFIX_STEP
    assert not set(first[alike // PREFIX_STEP :]) & set(second[alike // PREFIX_STEP :])


def test_a_conversation_that_goes_on_begins_as_it_did() -> None:
    before, after = prefix_hashes(chat("x" * 500)), prefix_hashes(chat("x" * 500, "y" * 300, "z" * 300))
    assert len(before) >= 4
    assert len(after) > len(before) + 3
    assert common(before, after) >= len(before) - 1  # the last one held the end of the list


def test_clients_that_share_no_cache_share_no_names() -> None:
    every = [
        prefix_hashes(completion("x" * 300), b"one"), prefix_hashes(completion("x" * 300), b"two"),
        prefix_hashes(completion("x" * 300)), prefix_hashes(completion("x" * 300, cache_salt="s")),
    ]  # fmt: skip
    assert len({name for names in every for name in names}) == 4 * 2


def test_what_is_no_request_has_no_pieces() -> None:
    bodies = (b"", b"{", b"[]", b"[" * 99999, b"{}", b'{"messages": null}', b'{"prompt": 5}', b"\xff", b"7")
    assert [prefix_hashes(body) for body in bodies] == [[]] * len(bodies)
    assert len(prefix_hashes(completion("x" * PREFIX_STEP * (MAX_PREFIXES + 9)))) == MAX_PREFIXES
    ids = list(range(100))
    assert len(prefix_hashes(completion(ids))) == len(json.dumps(ids)) // PREFIX_STEP


def names(text: str) -> list[bytes]:
    """A piece for each letter."""
    return [text[: i + 1].encode() for i in range(len(text))]


def test_the_same_beginning_goes_to_the_same_replica() -> None:
    balancer = Balancer(slack=2)
    homes = {text: balancer.choose(names(text), REPLICAS) for text in ("xaaa", "ybbb", "zccc")}
    assert sorted(homes.values()) == ["a", "b", "c"]  # new ones are dealt out
    for text in ("xaaa", "zccc", "ybbb", "xaaa"):
        assert balancer.choose(names(text + "more"), REPLICAS) == homes[text]
    assert balancer.choose(names("xaQQ"), REPLICAS) == homes["xaaa"]


def test_the_longest_beginning_counts() -> None:
    balancer = Balancer(slack=0)
    first = balancer.choose(names("s1"), REPLICAS)
    balancer.running[first] = 1
    second = balancer.choose(names("s2"), REPLICAS)  # of the same system prompt, as the first is busy
    balancer.running[first] = 0
    assert second != first
    assert [balancer.choose(names(text), REPLICAS) for text in ("s1x", "s2x", "s1y")] == [
        first,
        second,
        first,
    ]


@pytest.mark.parametrize(("own", "homes"), [(4, {"a"}), (5, set(REPLICAS))], ids=["a-third", "less"])
def test_a_small_beginning_that_all_share_does_not_gather_them(own: int, homes: set[str]) -> None:
    """Two prefixes of a system prompt, and so many of each request alone."""
    balancer = Balancer(slack=2)
    prompts = [names("ss" + str(number) * own) for number in range(6)]
    assert {balancer.choose(prompt, REPLICAS) for prompt in prompts} == homes
    balancer.running.update(["a", "b"])  # the idlest has it now, if all have
    assert balancer.choose(names("ss!"), REPLICAS) == ("c" if "c" in homes else "a")


@given(
    sent=st.lists(st.sampled_from(["p", "pq", "pqr", "r"]), min_size=1, max_size=60), slack=st.integers(0, 5)
)
def test_no_replica_is_left_far_behind(sent: list[str], slack: int) -> None:
    """None of what is sent ends."""
    balancer, load = Balancer(slack), dict.fromkeys(REPLICAS, 0)
    for text in sent:
        chosen = balancer.choose(names(text), REPLICAS)
        balancer.running[chosen] += 1
        load[chosen] += 1
        assert max(load.values()) - min(load.values()) <= slack + 1


def test_one_that_has_gone_is_not_chosen() -> None:
    balancer = Balancer(slack=2)
    home = balancer.choose(names("abc"), REPLICAS)
    left = [replica for replica in REPLICAS if replica != home]
    assert balancer.choose(names("abc"), left) in left
    assert balancer.choose(names("abc"), REPLICAS) in REPLICAS


def test_what_is_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanospec.apps.cluster.routing.MAX_REMEMBERED", 6)
    balancer = Balancer(slack=1)
    home = balancer.choose(names("abc"), REPLICAS)
    balancer.choose(names("abcdefgh"), REPLICAS)  # eight prefixes: the last six sent are kept, "a" among them
    assert len(balancer._holders) == 6
    assert balancer.choose(names("a"), REPLICAS) == home
