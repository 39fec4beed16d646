"""Tables of measurements in the documents match the committed JSON."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
AGAINST_VLLM = re.compile(
    r"^\| (?P<batch>\d+)(?P<sampled>, sampled)?(?P<long>, after 4,000 tokens)?"
    r"(?:, tokens per second|, no speculation)?(?P<ngram>, n-gram)?"
    r" \| (?P<ours>\d+) \| (?P<theirs>\d+)[^|]*"
    r" \| (?P<ratio>[^|]*) \|(?: (?P<zen4>[^|]*?) ?\|)?$",
    re.MULTILINE,
)
DRAFTERS = re.compile(
    r"^\| `([a-z+]+)`(?:, tree width (\d))?(?:, K = (\d))? \|((?: [\d.]+, [\d.]+x \|){7})", re.MULTILINE
)
GPU_STEPS = re.compile(r"^\| ([\w.-]+) \| (\d+) \| ([\d.]+) \((\d+)%\) \| ([\d.]+) \|$", re.MULTILINE)
GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag", "code edits")


@cache
def measured(*names: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of results of `bench/cpu.py`, by case, system and mode."""
    parts = [part for name in names for part in load(name).values()]
    rows = [row for part in parts for row in part.get("table", ())]
    return {(row["case"], row["system"], row["way"]): row for row in rows}


def load(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("document", "count"), [("README.md", 5), ("docs/speed.md", 14)])
def test_tokens_per_second_next_to_vllm(document: str, count: int) -> None:
    result = list(AGAINST_VLLM.finditer((ROOT / document).read_text(encoding="utf-8")))
    assert len(result) == count
    for row in result:
        case = f"B={row['batch']}, {'4000' if row['long'] else '200'}{row['sampled'] or ''}"
        mode = "n-gram" if row["ngram"] else "plain"
        table = measured("cpu", "cpu_64")
        ours, theirs = table[case, "nanospec", mode], table[case, "vllm", mode]
        rates = [f"{side['tokens_per_second']['median']:.0f}" for side in (ours, theirs)]
        assert [row["ours"], row["theirs"]] == rates, row[0]
        low, middle, high = (f"{theirs['nanospec_ratio'][key]:.2f}" for key in ("min", "median", "max"))
        assert row["ratio"] in (f"{middle}x ({low} to {high})", f"{middle}x"), row[0]
        if row["zen4"]:
            ratio = measured("cpu_zen4", "cpu_zen4_64")[case, "vllm", mode]["nanospec_ratio"]["median"]
            assert row["zen4"] == f"{ratio:.2f}x", row[0]


def test_drafters_table() -> None:
    results = load("drafters")["greedy"]
    rows = DRAFTERS.findall((ROOT / "docs" / "speed.md").read_text(encoding="utf-8"))
    assert len(rows) == 7
    for method, width, k, cells in rows:
        name = method + (f" tree W={width}" if width else "") + (f" K={k}" if k else "")
        own = [results[group][name] for group in GROUPS]
        shown = [f"{row['tokens_per_step']:.2f}, {row['speedup']['median']:.2f}x" for row in own]
        assert cells.strip(" |").split(" | ") == shown, name


def test_gpu_figures() -> None:
    def read(part: str) -> list[dict[str, Any]]:
        lines = (ROOT / f"bench/results/h100/{part}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    steps = [row for row in read("steps") if row.get("mode") == "graph" and row["context"] == 1024]
    times = {(row["shape"], str(row["batch"]), row["k"]): row for row in steps}
    rows = GPU_STEPS.findall(page)
    assert len(rows) == 4
    for shape, batch, ms, share, verified in rows:
        plain, k4 = (times[shape.lower(), batch, k] for k in (0, 4))
        assert (ms, share, verified) == (
            f"{plain['ms']:.2f}",
            f"{plain['share']:.0%}"[:-1],
            f"{k4['ms']:.2f}",
        )
    gpus = page.partition("## GPUs")[2]
    gains = {(row["case"], row["system"]): row["speedup"]["median"] for row in read("e2e") if "system" in row}
    for case, system in (
        *((f"{model} code edits B={B}", "auto") for B in (1, 64) for model in ("qwen3-0.6b", "qwen3-8b")),
        *((f"{model} prose B=1", "auto") for model in ("qwen3-0.6b", "qwen3-8b")),
        *(("qwen3-0.6b prose B=64", system) for system in ("auto", "K=4")),
    ):
        assert f" {gains[case, system]:.2f}x" in gpus.replace("\n", " "), (case, system)


def test_result_files_are_valid_and_referenced() -> None:
    """Every result file is valid JSON, and a page or script refers to it."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "bench").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    for path in (ROOT / "bench" / "results").glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
        assert path.name in text or f'"{path.stem}"' in text, path.name
