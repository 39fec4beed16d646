"""Choice of the replica for a request."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanospec.apps.cluster.routing import MAX_PREFIXES, PREFIX_STEP, Balancer, prefix_hashes

REPLICAS = ("a", "b", "c")


def hashes(prompt: Any, client: bytes = b"", **more: Any) -> list[bytes]:
    return prefix_hashes(json.dumps({"prompt": prompt, **more}).encode(), client)


@settings(max_examples=40)
@given(start=st.text(max_size=3 * PREFIX_STEP), ends=st.tuples(*[st.text(max_size=2 * PREFIX_STEP)] * 2))
@example(start="x" * (PREFIX_STEP - 1), ends=("", ""))
def test_shared_hashes_match_common_prefix_length(start: str, ends: tuple[str, str]) -> None:
    texts = [start + end for end in ends]
    first, second = map(hashes, texts)
    same = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts))) // PREFIX_STEP
    assert [len(first), len(second)] == [len(text) // PREFIX_STEP for text in texts]
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


def test_hashes_depend_on_client_and_cache_salt_but_not_on_later_messages() -> None:
    before, after = (hashes([{"role": "user", "content": "x" * 500}] * n) for n in (1, 3))
    assert after[: len(before) - 1] == before[:-1]  # the last one held the end of the list
    text = "x" * 300
    every = [hashes(text), hashes(text, b"one"), hashes(text, b"two"), hashes(text, cache_salt="s")]
    assert len({name for names in every for name in names}) == 4 * 2


def test_invalid_or_long_body() -> None:
    bodies = (b"", b"{", b"[]", b"[" * 99999, b"{}", b'{"messages": null}', b'{"prompt": 5}', b"\xff", b"7")
    assert [prefix_hashes(body) for body in bodies] == [[]] * len(bodies)
    assert len(hashes("x" * PREFIX_STEP * (MAX_PREFIXES + 9))) == MAX_PREFIXES
    assert len(hashes(["é" * (PREFIX_STEP - 1)])) == 1
    assert len(hashes([99] * 100)) == len(json.dumps([99] * 100)) // PREFIX_STEP


def names(text: str) -> list[bytes]:
    """Return one prefix name per letter."""
    return [text[: i + 1].encode() for i in range(len(text))]


def test_same_prefix_goes_to_same_replica_unless_it_has_left() -> None:
    balancer = Balancer(slack=2)
    homes = {text: balancer.choose(names(text), REPLICAS) for text in ("xaaa", "ybbb", "zccc")}
    assert sorted(homes.values()) == ["a", "b", "c"]  # new prefixes are spread out
    for text in ("xaaa", "zccc", "ybbb", "xaaa"):
        assert balancer.choose(names(text + "more"), REPLICAS) == homes[text]
    assert balancer.choose(names("xaQQ"), REPLICAS) == homes["xaaa"]
    for running, is_home in ((2, True), (3, False)):  # more than others run
        balancer.running[homes["xaaa"]] = running
        assert (balancer.choose(names("xaaa!"), REPLICAS) == homes["xaaa"]) == is_home
    left = [replica for replica in REPLICAS if replica != homes["xaaa"]]
    assert balancer.choose(names("xaaa"), left) in left


def test_longest_prefix_decides() -> None:
    balancer = Balancer(slack=0)
    first = balancer.choose(names("s1"), REPLICAS)
    balancer.running[first] = 1
    second = balancer.choose(names("s2"), REPLICAS)  # same system prompt, but the first replica is busy
    balancer.running[first] = 0
    assert second != first
    chosen = [balancer.choose(names(text), REPLICAS) for text in ("s1x", "s2x", "s1y")]
    assert chosen == [first, second, first]


@pytest.mark.parametrize(("own", "homes"), [(4, {"a"}), (5, set(REPLICAS))], ids=["a-third", "less"])
def test_short_shared_prefix_does_not_attract_requests(own: int, homes: set[str]) -> None:
    """Prompts have two shared prefixes of a system prompt and `own` unshared ones."""
    balancer = Balancer(slack=2)
    prompts = [names("ss" + str(number) * own) for number in range(6)]
    assert {balancer.choose(prompt, REPLICAS) for prompt in prompts} == homes
    balancer.running.update(["a", "b"])  # if all hold the prefix, the least loaded is chosen
    assert balancer.choose(names("ss!"), REPLICAS) == ("c" if "c" in homes else "a")


def test_new_replica_does_not_catch_up_with_others() -> None:
    balancer = Balancer(slack=2)
    for _ in range(200):
        balancer.choose([], ("a", "b"))
    assert Counter(balancer.choose([], REPLICAS) for _ in range(300)) == dict.fromkeys(REPLICAS, 100)


def test_replicas_that_have_left_are_forgotten() -> None:
    """A replica that has left stays counted until its requests end."""
    balancer = Balancer(slack=2)
    for replicas in (["a", "b"], ["c"], ["d"]):
        balancer.running[balancer.choose(names("prompt"), replicas)] += replicas == ["a", "b"]
    assert balancer.running.keys() == {"a", "d"}
    assert balancer._sent == {"d": 1}
    assert balancer._holders[b"p"] == {"d"}


def test_oldest_prefixes_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanospec.apps.cluster.routing.MAX_REMEMBERED", 6)
    balancer = Balancer(slack=1)
    home = balancer.choose(names("abc"), REPLICAS)
    balancer.choose(names("abcdefgh"), REPLICAS)  # eight prefixes: the last six sent are kept, "a" among them
    assert len(balancer._holders) == 6
    assert balancer.choose(names("a"), REPLICAS) == home
