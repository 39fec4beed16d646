"""`bench/before_after.py` computes ratios within a round and detects a single differing token."""

from typing import Any

from bench import before_after


def test_rounds_are_compared() -> None:
    names = [f"{way}, greedy, B=1" for way in ("plain", "n-gram")]

    def side(seconds: float, last: int = 2) -> dict[str, Any]:
        outputs = {names[0]: [[[1, 2]]] * 2, names[1]: [[[1, 2]], [[1, last]]]}
        times = {name: [seconds, 2 * seconds] for name in names}
        return {"start": {"plain": seconds}, "seconds": times, "outputs": outputs}

    rounds = [(side(1.0), side(2.0)), (side(10.0), side(10.0, last=3)), (side(4.0), side(2.0))]
    table = before_after.compare(rounds)
    assert table[names[0]]["ratio"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert table["start, plain"]["ratio"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert [table[name]["equal"] for name in names] == [True, False]
