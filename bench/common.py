"""What every benchmark shares: the machine it ran on, evaluation prompts, medians, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nanospec.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
# Evaluation text, not part of the repository: beside it, or inside as an untracked folder.
_DATA = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
DATA = next((path for path in _DATA if path.is_dir()), ROOT)
RESULTS = ROOT / "bench" / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring and has --out, the folder of results."""
    plain = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=plain)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return made


def environment() -> dict[str, Any]:
    """Machine, versions and commit."""
    versions = {}
    for package in ("torch", "triton", "transformers", "tokenizers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    flags = ""
    name = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
            elif line.startswith("flags"):
                flags = ", ".join(f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in line)
                break
    except OSError:
        pass
    return f"{name} ({flags})" if flags else name


def commit(folder: Path = ROOT) -> str:
    """Return the commit that is measured, "unknown" in a copy without git."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def save(name: str, result: dict[str, Any], out: Path = RESULTS) -> None:
    """Write `out/name.json` and print the result as the last line."""
    write(name, result, out)
    print(json.dumps(result))


def write(name: str, result: dict[str, Any], out: Path = RESULTS) -> None:
    """Write `out/name.json`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the smallest and largest value."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def is_looping(tokens: Sequence[int], period: int = 32, repeats: int = 4) -> bool:
    """Whether the output ends in a stretch of at most `period` tokens said `repeats` times over.

    Such text makes any speculation look good; benchmarks count and name it.
    """
    return any(
        len(tokens) >= p * repeats
        and all(tokens[-i] == tokens[-i - p] for i in range(1, p * (repeats - 1) + 1))
        for p in range(1, period + 1)
    )


def distinct_ratio(tokens: Sequence[int]) -> float:
    """Distinct 4-grams / 4-grams: 1 for text that never repeats itself."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / max(len(grams), 1)


# ---- prompts, as user messages -----------------------------------------------------------------


def _lines(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; this benchmark reads its prompts from it.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chat_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a chat of this one message."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(chat, add_special_tokens=False)


def code_edits(count: int) -> list[str]:
    """Instruction and code; the answer repeats most of the code. The longest inputs of the set."""
    return [message for message, _ in code_edit_pairs(count)]


def code_edit_pairs(count: int) -> list[tuple[str, str]]:
    """`code_edits` with the edited code as the answer."""
    rows = sorted(_lines("code_edits.jsonl"), key=lambda row: -len(row["input"]))[:count]
    return [
        (
            f"{r['instruction']}\nReturn the whole code.\n\n```python\n{r['input']}\n```",
            f"```python\n{r['output']}\n```",
        )
        for r in rows
    ]


def shakespeare() -> str:
    """1.1 MB of it."""
    path = DATA / "shakespeare.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; this benchmark reads its prompts from it.")
    return path.read_text(encoding="utf-8")


def quotations(count: int) -> list[str]:
    """The first sentences of a news article to repeat."""
    found = []
    for article in spec_bench(count, "summarization"):
        text = ""
        for sentence in re.split(r"(?<=[.!?])\s+", article.removeprefix("Summarize:").strip()):
            if len(text) + len(sentence) > 420:
                break
            text += f" {sentence}" if text else sentence
        found.append(f"Repeat this text word for word:\n\n{text}")
    return found


def spec_bench(count: int, group: str) -> list[str]:
    """First turns of one group: chat, translation, summarization, qa, math_reasoning or rag."""
    chat = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
    rows = [
        r
        for r in _lines("spec_bench.jsonl")
        if r["category"] == group or (group == "chat" and r["category"] in chat)
    ]
    random.Random(0).shuffle(rows)
    return [row["turns"][0] for row in rows[:count]]
