"""`--trace FILE.html` in every mode of the command line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM, SamplingParams
from nanospec.apps.cli import demo, generate
from nanospec.apps.cli.main import main
from nanospec.extras.tracing.recorder import find_recorder

Run = Callable[..., tuple[int, str]]
QUOTE = "Repeat: one two three one two three one two"


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Iterator[Callable[..., LLM]]:
    """`LLM`, cached by whether it traces; other settings do not matter here."""
    llms: dict[bool, LLM] = {}

    def load(model: str, **settings: Any) -> LLM:
        settings.pop("enable_prefix_caching", None)
        traced = settings["trace"]
        if traced not in llms:
            llms[traced] = LLM(smollm2, **{**settings, "kv_cache_memory": 100 << 20, "max_model_len": 256})
        if traced:
            recorder = find_recorder(llms[traced].engine.extensions)
            recorder.requests.clear()
            recorder.num_requests = 0
        return llms[traced]

    yield load
    llms.clear()


@pytest.fixture
def run(
    loaded: Callable[..., LLM],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run a command line with `--trace`: (exit status, standard error)."""
    monkeypatch.setattr(generate, "LLM", loaded)

    def run(*args: str | Path) -> tuple[int, str]:
        status = main([*map(str, args), "--trace", str(tmp_path / "trace.html")])
        return status, capsys.readouterr().err

    return run


def lanes_in(folder: Path) -> list[dict[str, Any]]:
    html = (folder / "trace.html").read_text()
    [data] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)
    return list(json.loads(data)["lanes"])


def test_trace_of_prompt(run: Run, tmp_path: Path) -> None:
    status, errors = run("--prompt", QUOTE, "--max-tokens", "12")
    assert status == 0
    assert errors.endswith(f"Trace: {tmp_path / 'trace.html'}\n")
    [lane] = lanes_in(tmp_path)
    assert QUOTE in "".join(lane["prompt"])
    assert sum(len(step["tokens"]) for step in lane["steps"]) == len(lane["token_ids"]) <= 12
    assert lane["plain_seconds"] > 0
    assert not lane["plain_is_measured"]


def test_trace_of_chat(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd you?\n"))
    assert run("--chat", "--max-tokens", "3")[0] == 0
    assert len(lanes_in(tmp_path)) == 2


def test_trace_of_batch(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Count: 1, 2,", "n": 2}\n{"prompt": "One"}\n')
    assert run("--input", source, "--output", tmp_path / "out.jsonl", "--max-tokens", "4")[0] == 0
    prompts = ["".join(lane["prompt"]) for lane in lanes_in(tmp_path)]
    assert ["Count: 1, 2," in prompt for prompt in prompts] == [True, True, False]


def test_demo_compares_with_measured_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REQUESTS", {"quotation": QUOTE})
    monkeypatch.setattr(demo, "SamplingParams", lambda **given: SamplingParams(**{**given, "max_tokens": 8}))
    assert run("--demo")[0] == 0
    [lane] = lanes_in(tmp_path)
    assert lane["name"] == "quotation"
    assert lane["plain_is_measured"]


def test_interrupted_run_still_writes_trace(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupt(console: object, pieces: object) -> None:
        seen.append(pieces)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate.Console, "pieces", interrupt)
    status, errors = run("--prompt", QUOTE)
    assert status == 130
    assert "Trace: " in errors
    [lane] = lanes_in(tmp_path)
    assert lane["finish_reason"] == "abort"
    assert 0 < sum(len(step["tokens"]) for step in lane["steps"]) == len(lane["token_ids"])


def test_unwritable_trace_is_reported_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LLM", None)  # would fail when called
    assert main(["--prompt", "x", "--trace", str(tmp_path / "no" / "trace.html")]) == 2
    assert f"The directory {tmp_path / 'no'} does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--explain", "--trace", "x.html"])
    assert "--trace cannot be used with --explain" in capsys.readouterr().err
