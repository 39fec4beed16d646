"""Tables of measurements in the documents match the committed JSON."""

import json
import re
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
AGAINST_VLLM = re.compile(
    r"^\| (?P<batch>\d+)(?P<sampled>, sampled)?(?P<long>, after 4,000 tokens)?"
    r"(?:, tokens per second|, no speculation)?(?P<ngram>, n-gram)?"
    r" \| (?P<ours>\d+) \| (?P<theirs>\d+)[^|]*"
    r" \| (?P<ratio>[^|]*) \|(?: (?P<zen4>[^|]*?) ?\|)?$",
    re.MULTILINE,
)
DRAFTERS = re.compile(
    r"^\| `([a-z0-9+]+)`(?:, tree width (\d))?(?:, K = (\d))? \|((?: [\d.]+, [\d.]+x \|){7})"
    r"((?: [\d.]+x \|){2})$",
    re.MULTILINE,
)
GPU_STEPS = re.compile(r"^\| ([\w.-]+) \| (\d+) \| ([\d.]+) \((\d+)%\) \| ([\d.]+) \|$", re.MULTILINE)
GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag", "code edits")


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured(*names: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of results of `bench/cpu.py`, by case, system and mode."""
    rows = [row for name in names for part in load(name).values() for row in part.get("table", ())]
    return {(row["case"], row["system"], row["way"]): row for row in rows}


@pytest.mark.parametrize(("document", "count"), [("README.md", 5), ("docs/speed.md", 14)])
def test_tokens_per_second_next_to_vllm(document: str, count: int) -> None:
    result = list(AGAINST_VLLM.finditer((ROOT / document).read_text(encoding="utf-8")))
    assert len(result) == count
    intel, zen4 = measured("cpu", "cpu_64"), measured("cpu_zen4", "cpu_zen4_64")
    for row in result:
        case = f"B={row['batch']}, {'4000' if row['long'] else '200'}{row['sampled'] or ''}"
        mode = "n-gram" if row["ngram"] else "plain"
        ours, theirs = intel[case, "nanospec", mode], intel[case, "vllm", mode]
        rates = [f"{side['tokens_per_second']['median']:.0f}" for side in (ours, theirs)]
        assert [row["ours"], row["theirs"]] == rates, row[0]
        low, middle, high = (f"{theirs['nanospec_ratio'][key]:.2f}" for key in ("min", "median", "max"))
        assert row["ratio"] in (f"{middle}x ({low} to {high})", f"{middle}x"), row[0]
        if row["zen4"]:
            ratio = zen4[case, "vllm", mode]["nanospec_ratio"]["median"]
            assert row["zen4"] == f"{ratio:.2f}x", row[0]


SMOLLM2, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"
Q4_1, Q4_K = "smollm2-135m-q4_1.gguf", f"{QWEN}-q4_k_m.gguf"
FORMATS = {  # by label in the table: the names of the results, and the model or file with its system
    "bf16": ("smollm2", "smollm2", SMOLLM2, f"nanospec {SMOLLM2}"),
    "`--quantization int8`": ("smollm2", "smollm2", f"{SMOLLM2}:int8", f"nanospec {SMOLLM2}:int8"),
    "`--quantization int4`": ("smollm2", "smollm2", f"{SMOLLM2}:int4", f"nanospec {SMOLLM2}:int4"),
    "GGUF file, Q4_1": ("smollm2", "smollm2", Q4_1, "nanospec"),
    "the same file in llama.cpp": ("smollm2", "smollm2", f"llama.cpp {Q4_1}", "llama.cpp"),
    "Qwen2.5-Coder-1.5B, bf16": ("qwen", "qwen_quantized", QWEN, "nanospec"),
    "the same, int8": ("qwen", "qwen_quantized", f"{QWEN}:int8", f"nanospec {QWEN}:int8"),
    "the same, int4": ("qwen", "qwen_quantized", f"{QWEN}:int4", f"nanospec {QWEN}:int4"),
    "its GGUF file, Q4_K_M": ("qwen", "qwen", Q4_K, "nanospec"),
    "this file in llama.cpp": ("qwen", "qwen", f"llama.cpp {Q4_K}", "llama.cpp"),
}


@pytest.mark.parametrize("label", FORMATS)
def test_formats_table_matches_results(label: str) -> None:
    quality, speed, model, system = FORMATS[label]
    [line] = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", SPEED, re.MULTILINE)
    megabytes, perplexity, *rates = map(str.strip, line.split("|"))
    [own] = [row for row in load(f"perplexity_{quality}")["rows"] if row["model"] == model]
    assert (megabytes, perplexity) == (f"{own['weight_bytes'] / 1e6:.0f}", f"{own['perplexity']:.2f}")
    ways = [("B=1, 200", "plain"), ("B=1, 200", "n-gram"), ("B=1, 24", "plain")]
    rows = measured(f"formats_{speed}")
    found = [
        rows.get((case, system, way)) for case, way in [*ways, *(("B=16, 200", way) for _, way in ways[:2])]
    ]
    digits = 1 if quality == "qwen" else 0
    assert rates == [f"{row['tokens_per_second']['median']:.{digits}f}" if row else "" for row in found]


def test_drafters_table_matches_results() -> None:
    rows = DRAFTERS.findall(SPEED)
    results, zen4 = (load(name)["greedy"] for name in ("drafters", "drafters_zen4"))
    assert len(rows) == 4
    for method, width, k, cells, means in rows:
        name = method + (f" tree W={width}" if width else "") + (f" K={k}" if k else "")
        own = [results[group][name] for group in GROUPS]
        shown = [f"{row['tokens_per_step']:.2f}, {row['speedup']['median']:.2f}x" for row in own]
        assert cells.strip(" |").split(" | ") == shown, name
        both = (mean(side[group][name]["speedup"]["median"] for group in GROUPS) for side in (results, zen4))
        assert means.strip(" |").split(" | ") == [f"{speedup:.2f}x" for speedup in both], name


def test_gpu_figures_match_results() -> None:
    def read(part: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (RESULTS / f"h100/{part}.jsonl").read_text().splitlines()]

    steps = [row for row in read("steps") if row.get("mode") == "graph" and row["context"] == 1024]
    times = {(row["shape"], str(row["batch"]), row["k"]): row for row in steps}
    rows = GPU_STEPS.findall(SPEED)
    assert len(rows) == 4
    for shape, batch, *shown in rows:
        plain, k4 = (times[shape.lower(), batch, k] for k in (0, 4))
        assert shown == [f"{plain['ms']:.2f}", f"{100 * plain['share']:.0f}", f"{k4['ms']:.2f}"]
    gpus = SPEED.partition("## GPUs")[2].replace("\n", " ")
    gains = {(row["case"], row["system"]): row["speedup"]["median"] for row in read("e2e") if "system" in row}
    models, kinds = ("qwen3-0.6b", "qwen3-8b"), ("code edits B=1", "code edits B=64", "prose B=1")
    cases = [(f"{model} {kind}", "auto") for model in models for kind in kinds]
    for case, system in [*cases, *(("qwen3-0.6b prose B=64", k) for k in ("auto", "K=4"))]:
        assert f" {gains[case, system]:.2f}x" in gpus, (case, system)


def test_h200_figures_match_results() -> None:
    lines = (RESULTS / "h200/drafters.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("group") == "SmolLM2-135M"]
    assert sum(row["outputs_differing"] for row in rows) == 0
    for system, temperature in (("ngram", 0), ("ngram", 1), ("ngram+eagle3", 0)):
        runs = [row for row in rows if (row["system"], row["temperature"]) == (system, temperature)]
        assert f"{mean(row['speedup']['median'] for row in runs):.2f}x" in SPEED.partition("On an H200")[2]


def test_figures_of_automatic_k_match_results() -> None:
    text = " ".join((ROOT / "docs" / "6-choosing-k.md").read_text(encoding="utf-8").split())
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for row in load("over_k")["rows"]:
        speeds.setdefault((row["kind"], row["batch"]), {})[row["k"]] = row["speedup"]["median"]
    shares = [by_k["auto"] / max(s for k, s in by_k.items() if k != "auto") for by_k in speeds.values()]
    assert f"it had {min(shares):.0%} to {max(shares):.0%} of the speed of the best fixed K" in text
    cpu, gpu, least = list[float](), list[float](), 1.0
    for system, by_text in load("simulate")["systems"].items():
        for name, by_batch in by_text.items():
            runs = by_batch.values()
            least = min(least, *(s for r in runs for s in (r["speedup"]["auto"], r.get("last_done", 1))))
            if name != "never right":
                (cpu if system.startswith("CPU") else gpu).extend(r["auto_to_best_fixed"] for r in runs)
    assert f"reaches {geometric_mean(cpu):.0%} of the speed of the best fixed K" in text
    assert f"with costs of a GPU {geometric_mean(gpu):.0%}, at worst {min(gpu):.0%}" in text
    assert f"keeps at least {least:.1%} of the speed of K = 0" in text


def test_result_files_are_referenced() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    stems = [path.stem for path in RESULTS.glob("*.json")]
    assert [stem for stem in stems if not re.search(rf"\b{stem}(\.json|\")", text)] == []
