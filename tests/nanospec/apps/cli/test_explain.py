"""`--explain`: byte and FLOP counts agree with the weights, and the report with the measurements."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec import LLM
from nanospec.apps.cli import explain, generate
from nanospec.apps.cli.explain import Machine, Part
from nanospec.drafters.estimates import StepCosts
from nanospec.models.config import DTYPES
from nanospec.models.families import read_config
from tests.nanospec.apps.cli.conftest import Run
from tests.nanospec.test_llm import ALPHABET, EOS
from tests.tiny import num_parameters


def test_step_reads_weights_and_cache_once(folder: Path) -> None:
    _, config = read_config(folder)
    for tie in (True, False):
        shape = replace(config, tie_word_embeddings=tie)
        read = 2 * (num_parameters(shape) - (0 if tie else config.vocab_size * config.hidden_size))
        cache = 1000 * config.kv_bytes_per_token(DTYPES[shape.dtype]) // DTYPES[shape.dtype].itemsize * 2
        for tokens in (1, 5):
            parts = explain.parts(shape, tokens, 1000, 2)
            assert sum(part.bytes for part in parts) == read + cache
            products = sum(part.flops for part in parts if part.name != "attention")
            assert products == 2 * tokens * read / 2
            scores = config.num_layers * config.num_heads * config.head_dim  # twice: with keys and values
            assert parts[1].flops == 2 * 2 * scores * 1000 * tokens
    windows = explain.parts(replace(config, windows=(10,) * config.num_layers), 3, 1000, 2)
    assert windows == explain.parts(config, 3, 10, 2)


def test_slower_of_memory_and_arithmetic_determines_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(bandwidth=1e9, flops=2e9)
    assert Part("a", 3_000_000, 20_000_000).cells(machine) == ("3.0", "0.02", "10.00")
    assert Part("a", 25_000_000, 20_000_000).ms(machine) == 25
    monkeypatch.setattr(explain.timeit, "repeat", lambda run, number, repeat: [number + repeat, number])
    assert explain._fastest(list, torch.device("cpu")) == 1
    runs: list[Any] = []

    def time(run: Any, device: object) -> float:
        runs.append(run())
        return 0.5

    monkeypatch.setattr(explain, "BLOCK", 1 << 20)
    monkeypatch.setattr(explain, "CPU_SIDE", 32)
    monkeypatch.setattr(explain, "_fastest", time)
    measured = explain.measure(torch.device("cpu"), torch.float32)
    assert measured == Machine(2 << 20, 4 * 32**3)
    assert float(runs[0]) == 1 << 18
    assert runs[1].shape == (32, 32)


def test_report_predicts_speedup_from_measured_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, costs, llms = Machine(1e6, 1e7), StepCosts(packed={1: 2.0, 3: 2.2, 5: 2.5, 9: 4.0}), []

    def load(*args: Any, **options: Any) -> LLM:
        llms.append(LLM(*args, **options))
        llms[-1].engine.policy.costs = costs
        return llms[-1]

    monkeypatch.setattr(generate, "LLM", load)
    monkeypatch.setattr(explain, "MAX_TOKENS", 12)
    monkeypatch.setattr(explain, "measure", lambda device, dtype: machine)
    monkeypatch.setattr(explain, "REQUESTS", {"code edit": ALPHABET + EOS + "a"})
    monkeypatch.setattr(explain, "decode_rate", lambda output: 3 + (output.stats.num_drafted > 0))
    status, text, errors = run("--explain", "--num-speculative-tokens", "4")
    assert status == 0, errors
    config = llms[0].engine.worker.model.config
    assert text.startswith("0 GB/s read, 0 GFLOP/s in torch.float32\n\nOne step of one request after 512 ")
    for one, five in zip(*(explain.parts(config, tokens, 512, 4) for tokens in (1, 5))):
        cells = " +".join((one.name, *one.cells(machine), *five.cells(machine)))
        assert re.search(f"^{cells}$", text, re.MULTILINE)
    for tokens, row in ((1, "2.00  +1.00x"), (5, "2.50  +1.25x"), (9, "4.00  +2.00x")):
        least = sum(part.ms(machine) for part in explain.parts(config, tokens, 1, 4))
        assert re.search(rf"^{tokens} +{least:.2f} +{row}$", text, re.MULTILINE)
    gains = "30%: 1.14x, 50%: 1.55x, 70%: 2.22x, 90%: 3.28x"
    assert f"\n4 drafts break even at 1.25 tokens per step; by acceptance rate: {gains}\n" in text
    answer = r"Code edit: (\S+) tokens per step with (\S+) drafts; speedup (\S+)x predicted, 1.33x measured"
    [figures] = re.findall(rf"^{answer}\n\Z", text, re.MULTILINE)
    per_step, drafts, speedup = map(float, figures)
    assert per_step > 2
    assert speedup == pytest.approx(per_step * 2 / costs.cost(1, 1 + drafts), abs=0.05)
    assert "Code edit" not in run("--explain", "--max-model-len", "511")[1]
    assert "drafts break even" not in run("--explain", "--spec", "none")[1]
