"""Helpers shared by all benchmarks: machine information, evaluation prompts, medians, JSON results."""

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.peers.worker import MARK
from nanospec.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
# Evaluation data is not part of the repository: an untracked folder in it, or next to it.
_DATA = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
DATA = next((path for path in _DATA if path.is_dir()), ROOT)
RESULTS = ROOT / "bench" / "results"
MODEL = "smollm2-135m-instruct"


def parser(doc: str | None, **options: str | float) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as its description, the option --out, and an option for each
    of `options`, which has the type of its default."""
    formatter = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    result.add_argument("--out", type=Path, default=RESULTS, help="output folder (default: %(default)s)")
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        result.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
    return result


def environment() -> dict[str, Any]:
    """Return the machine, package versions, commit and date."""
    versions = {}
    for package in ("torch", "triton", "transformers", "tokenizers", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    found: dict[str, Any] = {
        "cpu": _cpu_name(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(), "versions": versions, "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE) or [platform.processor()]
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{f}\b", text)]
    return f"{names[0]} ({', '.join(flags)})" if flags else names[0]


def commit(folder: Path = ROOT) -> str:
    """Return the commit of a checkout, or "unknown" without git."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def save(name: str, result: dict[str, Any], out: Path = RESULTS) -> None:
    """Write `out/name.json` and print the result as the last line."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


class Child:
    """A process that answers a line of JSON with one that follows `MARK`; its other output is ignored."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.name, self._log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=folder,
            env={**os.environ, **environment},
        )  # fmt: skip

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Send a line and return the answer. Exits with the end of the error output if the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith(MARK):
                found: dict[str, Any] = json.loads(answer.removeprefix(MARK))
                return found
        self._log.seek(0)
        raise SystemExit(f"The process of {self.name} exited:\n{self._log.read()[-4000:]}")

    def close(self) -> None:
        self._process.communicate()
        self._log.close()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def is_looping(tokens: Sequence[int], period: int = 32, repeats: int = 4) -> bool:
    """Return whether the output ends with `repeats` repetitions of a sequence of at most `period` tokens.

    Speculation looks too good on such outputs, so benchmarks report their number.
    """
    return any(
        len(tokens) >= p * repeats
        and all(tokens[-i] == tokens[-i - p] for i in range(1, p * (repeats - 1) + 1))
        for p in range(1, period + 1)
    )


def _read(name: str) -> str:
    path = DATA / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; this benchmark reads its prompts from it.")
    return path.read_text(encoding="utf-8")


def _lines(name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, _read(name).splitlines()))


def chat_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a chat with a single user message."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(chat, add_special_tokens=False)


def code_edits(count: int) -> list[str]:
    """Return the `count` longest code-editing prompts. Answers repeat most of the code."""
    return [message for message, _ in code_edit_pairs(count)]


def code_edit_pairs(count: int) -> list[tuple[str, str]]:
    """Return pairs of (prompt, reference answer) of `code_edits`."""
    prompt = "{instruction}\nReturn the whole code.\n\n```python\n{input}\n```"
    rows = sorted(_lines("code_edits.jsonl"), key=lambda row: -len(row["input"]))[:count]
    return [(prompt.format(**row), f"```python\n{row['output']}\n```") for row in rows]


def shakespeare() -> str:
    """Return 1.1 MB of Shakespeare."""
    return _read("shakespeare.txt")


def quotations(count: int) -> list[str]:
    """Return prompts that ask to repeat the first sentences of a news article."""
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
    """Return first turns of a Spec-Bench group: chat, translation, summarization, qa, math_reasoning, rag."""
    chat = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
    categories = chat if group == "chat" else {group}
    rows = [row for row in _lines("spec_bench.jsonl") if row["category"] in categories]
    random.Random(0).shuffle(rows)
    return [row["turns"][0] for row in rows[:count]]
