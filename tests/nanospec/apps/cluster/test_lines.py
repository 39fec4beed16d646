"""A replica of a batch, without Ray: what becomes of lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps.cli.batch_lines import Task
from nanospec.apps.cli.batch_results import result_line
from nanospec.apps.cluster import lines
from nanospec.apps.cluster.lines import Line, LineEngine, Result
from nanospec.apps.cluster.replica import Settings, load
from tests.nanospec.test_llm import after, folder, make

__all__ = ["folder"]
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(str(folder), "alphabet", SpecConfig(num_speculative_tokens=5), OPTIONS, **more)


def line(llm: LLM, number: int, prompt: str, **params: Any) -> Line:
    asked = SamplingParams(**{"max_tokens": 40, "seed": number, **params})
    return Line(Task(number, asked, prompt, key=f"{number:016x}"), llm.tokenizer.encode(prompt), asked)


def answers(engine: LineEngine, *asked: Line) -> list[Result]:
    async def run() -> list[Result]:
        engine.loop.start()
        found = await asyncio.gather(*map(engine.answer, asked))
        await engine.loop.stop()
        return found

    return asyncio.run(run())


def test_results_are_those_of_one_engine(folder: Path) -> None:
    llm = make(folder)
    asked = [line(llm, i, after("abc"[: i % 4]), temperature=i % 2, n=1 + i % 3 // 2) for i in range(9)]
    found = answers(LineEngine(settings(folder)), *asked)
    for each, result in zip(asked, found, strict=True):
        [output] = llm.generate([each.prompt_ids], each.params)
        expected = result_line(each.task, output, "alphabet")
        assert result.line.split(b'"stats"')[0] == expected.split(b'"stats"')[0]
        assert result.tokens == sum(len(done.token_ids) for done in output.outputs) > 0
        assert not result.refused
        assert not result.failed


def test_a_line_that_does_not_fit_is_told_and_the_others_run(folder: Path) -> None:
    llm = make(folder)
    long, fine = line(llm, 0, "a" * 200), line(llm, 1, after("x"))
    first, second = answers(LineEngine(settings(folder)), long, fine)
    assert first.refused.startswith("The prompt has 200 tokens, but max_model_len=128")
    assert first.line == b""
    assert second.line


def test_settings_that_cannot_be_are_told_for_every_line(folder: Path) -> None:
    wrong = settings(folder)._replace(options={"max_model_len": 10**6})
    engine = LineEngine(wrong)
    [result] = [asyncio.run(engine.answer(line(make(folder), 3, "a")))]
    assert (result.number, result.line) == (3, b"")
    assert result.failed.startswith("max_model_len=1000000 is beyond the model's own window")


def test_neighbours_share_the_memory_of_a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanospec.device.memory.spare_memory", lambda device, sharing=1: (1 << 20) // sharing)
    alone, beside = (LineEngine(settings(folder, neighbours=n)).llm for n in (1, 2))
    assert alone.config.kv_cache_memory is None
    assert beside.config.kv_cache_memory == 1 << 19
    monkeypatch.setattr("nanospec.llm.LLM", lambda folder, **options: options)
    split: Any = load(settings(folder, neighbours=2)._replace(options={"tensor_parallel_size": 2}))
    assert split["kv_cache_memory"] == 1 << 18


def test_a_failed_step_ends_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Ray runs its lines again elsewhere, and nothing of them is written."""

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(lines.os, "_exit", end)
    engine = LineEngine(settings(folder))
    monkeypatch.setattr(engine.llm.engine, "step", fail)
    with pytest.raises(Ended):
        answers(engine, line(engine.llm, 0, "a"))
