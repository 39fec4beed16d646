"""The tables of docs/scaling.md are those of bench/results/fleet.json, and its answers are what they say.

python tests/test_scaling.py    prints the tables
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B", "llama-3.3-70b": "70B"}
TEXTS = ("prose", "code edits")
ROUTERS = ("random", "least loaded", "hash", "prefix")


@cache
def found() -> dict[str, Any]:
    return json.loads((ROOT / "bench/results/fleet.json").read_text(encoding="utf-8"))


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def point(p: dict[str, Any] | None) -> str:
    """GPUs x rows, K if any, dollars."""
    if p is None:
        return "–"
    guesses = f", K = {p['k']}" if p["k"] else ""
    return f"{p['gpus']} x {p['rows']}{guesses}, {money(p['dollars'])}"


def money(dollars: float) -> str:
    return f"${dollars:.3f}" if dollars < 0.1 else f"${dollars:.2f}"


def size(parameters: float | None) -> str:
    return f"{parameters / 1e9:.1f}" if parameters else "–"


def replicas() -> list[str]:
    return [
        cells(name, f"{bound} ms", *(point(by_bound[bound][text]) for text in ("none", *TEXTS)))
        for model, name in MODELS.items()
        for by_bound in [found()["replicas"][model]]
        for bound in by_bound
        if name != "0.6B" or bound in ("5", "20")
    ]


def drafts() -> list[str]:
    by_text = [found()["drafts"]["qwen3-8b"][text]["rows"] for text in TEXTS]
    return [
        cells(
            rows, *(f"K = {row['k']}, {row['gain']:.2f}x" for row in (by_rows[rows] for by_rows in by_text))
        )
        for rows in ("1", "64", "128", "512")
    ]


def sums() -> list[str]:
    """ms gathered and in slices."""
    cases = ("B=1", "B=64", "prompt")
    return [
        cells(name, gpus, *(f"{row[case][0]:.1f}, {row[case][1]:.1f}" for case in cases), row["slices_from"])
        for model, name in MODELS.items()
        for gpus, row in found()["sums"][model].items()
        if gpus in ("4", "8") and model != "qwen3-0.6b"
    ]


def draft_models() -> list[str]:
    sizes = {
        (r["layers"], r["gpus"], r["rows"]): r["parameters"]
        for r in found()["draft_models"]["crossovers"]
        if r["exchange_us"] == 10
    }
    return [
        cells(layers, *(size(sizes[layers, gpus, rows]) for rows in (1, 64) for gpus in (2, 4, 8)))
        for layers in (8, 16, 28, 36)
    ]


def rate(row: dict[str, Any]) -> str:
    return f"{row['requests_per_s_and_gpu']:.1f}"


def shares() -> list[str]:
    by_share = found()["routing"]["by_share"]
    return [
        cells(f"{float(share):.0%}", *(rate(routers[router]) for router in ("least loaded", "prefix")))
        for share, routers in by_share.items()
    ]


def skew() -> list[str]:
    by_skew = found()["routing"]["by_skew"]
    return [
        cells(skew, *(f"{routers[r]['ttft_ms']['p99']:,.0f}" for r in ROUTERS))
        for skew, routers in by_skew.items()
        if skew != "0.0"
    ]


def disaggregation() -> list[str]:
    rows = found()["disaggregation"]["rows"]
    by_lengths: dict[str, list[str]] = {}
    for r in rows:
        said = f"{r['together']:.1f}, {r['apart']:.1f} ({r['prefillers']}): {r['gain']:.2f}x"
        by_lengths.setdefault(f"{r['prompt']:,} : {r['output']}", []).append(said)
    return [cells(lengths, *said) for lengths, said in by_lengths.items()]


def cost() -> list[str]:
    """Ten cells of 1,000 GPUs, between which requests are drawn, are ten fleets of 1,000."""
    columns = [found()["cost"][text][policy] for text in TEXTS for policy in ("none", "K=4", "auto")]
    sizes = {f"{int(n):,}": n for n in columns[0]} | {"10,000": "1000"}
    return [
        cells(name, *(f"${rows[n]['dollars']:.3f}" if n in rows else "–" for rows in columns))
        for name, n in sizes.items()
    ]


def sensitivity() -> list[str]:
    columns = [(model, text) for model in ("qwen3-8b", "llama-3.3-70b") for text in ("none", "code edits")]
    return [
        cells(what, *(point(by_model[model]["20"][text]) for model, text in columns))
        for what, by_model in {"as assumed": found()["replicas"], **found()["sensitivity"]}.items()
        if what != "sums gathered"
    ]


TABLES: tuple[Callable[[], list[str]], ...] = (
    replicas, drafts, sums, draft_models, shares, skew, disaggregation, cost, sensitivity,
)  # fmt: skip


def of_paper() -> dict[str, str]:
    """What is said of figures in between, of steps alone."""
    ms = found()["draft_models"]["passes"]["qwen3-0.6b"]["1"]["8"]
    made = [f"{row['gb_per_s_and_gpu']:.1f}" for row in found()["moving"].values()]
    ours, gathered = (
        money(by_model["llama-3.3-70b"]["20"]["none"]["dollars"])
        for by_model in (found()["replicas"], found()["sensitivity"]["sums gathered"])
    )
    tokens = found()["tokens_per_step"]
    brought = [
        "{:.2f}, {:.2f} and {:.2f}".format(*(tokens[text][k] for k in ("1", "4", "16"))) for text in TEXTS
    ]
    return {
        "brought": f"{brought[0]} tokens in prose, {brought[1]} in code edits",
        "draft_pass": f"{ms['whole']:.2f} ms a pass, split over eight {ms['split']:.2f}",
        "moving": f"{made[0]} GB/s of K/V with a 0.6B model, {made[1]} with 8B, {made[2]} with 70B on four",
        "gathered": f"a 70B model's tokens at 20 ms would cost {gathered} for {ours}",
    }


def of_runs() -> dict[str, str]:
    """What is said of the simulator's figures."""
    delays = {n: row["tpot_ms"]["median"] for n, row in found()["disaggregation"]["bandwidths"].items()}
    full = [[f"{row[how]:,.0f}" for row in found()["saturated"]] for how in ("simulated", "roofline")]
    said = ["{}, {} and {}".format(*rates) for rates in full]
    reached = [row["reached"] for row in found()["auto_policy"]]
    by_size = found()["routing"]["by_size"]
    cached = [
        ", ".join(f"{by_size[n][router]['prompt_tokens_cached']:.0%}" for n in ("8", "16", "64"))
        for router in ("least loaded", "prefix")
    ]
    wait = {name: row["ttft_ms"]["p99"] for name, row in found()["bursts"]["bursts"].items()}
    return {
        "bursts": f"{wait['least loaded']:.0f} ms for a first token, {wait['random']:.0f} routed at random",
        "cached": f"finds {cached[0]} of all prompt tokens in caches on 8, 16 and 64 GPUs, where routing by "
        f"prefix finds {cached[1]}",
        "bandwidths": f"{delays['50']:.1f} ms at 50 GB/s per GPU, {delays['10']:.1f} at 10, "
        f"{delays['5']:.0f} at 5 and {delays['1']:,.0f} at 1",
        "saturated": f"Full replicas of 8, 64 and 256 rows write {said[0]} tokens per second; by the formula "
        f"above {said[1]}",
        "auto_policy": f"{min(reached):.1%} to {max(reached):.1%}",
    }


@cache
def document() -> str:
    return (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_a_table_is_what_was_computed(table: Callable[[], list[str]]) -> None:
    assert "\n".join(table()) in document(), "python tests/test_scaling.py prints the tables"


@pytest.mark.parametrize("sentences", [of_paper, of_runs], ids=lambda sentences: sentences.__name__)
def test_sentences_are_what_was_computed(sentences: Callable[[], dict[str, str]]) -> None:
    text = " ".join(document().split())
    assert [said for said in sentences().values() if said not in text] == []


def test_the_page_can_be_read_in_ten_minutes() -> None:
    assert len(document().splitlines()) < 200


if __name__ == "__main__":
    for table in TABLES:
        print(f"\n{table.__name__}", *table(), sep="\n")
    print("", *of_paper().values(), *of_runs().values(), sep="\n")
