"""The command line, run as a subprocess the way a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from run import main as run_main

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("smollm2")


def command(*args: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), "--dtype", "float32", *map(str, args)]


def run(*args: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*args), input=text, capture_output=True, text=True, env=env, timeout=240)


def run_here(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    """The same within this process: (exit status, standard error)."""
    status = run_main(["--dtype", "float32", *map(str, args)])
    return status, capsys.readouterr().err


def requests_file(folder: Path, count: int, **fields: object) -> Path:
    path = folder / "requests.jsonl"
    lines = [{"prompt": f"Count: {i}, {i + 1}, {i + 2},", "max_tokens": 12, **fields} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[int, dict[str, object]]:
    return {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_prompt_gives_the_same_text_with_and_without_speculation() -> None:
    asked = ("--prompt", "Repeat: one two three one two three one two", "--max-tokens", "24", "--json")
    plain, spec = run(*asked, "--spec", "none"), run(*asked, "--num-speculative-tokens", "4")
    assert plain.returncode == spec.returncode == 0, plain.stderr + spec.stderr
    before, after = json.loads(plain.stdout), json.loads(spec.stdout)
    assert after["outputs"][0]["token_ids"] == before["outputs"][0]["token_ids"]
    assert after["metrics"]["num_drafted"] > 0
    assert before["metrics"]["num_drafted"] == 0


def test_output_without_a_terminal_has_no_escape_codes() -> None:
    done = run("--prompt", "Say hi.", "--max-tokens", "8", "--show-drafts")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "tokens per step" in done.stdout


def test_chat_keeps_the_conversation_and_ends_with_the_input() -> None:
    done = run("--chat", "--max-tokens", "8", text="Hello\n/reset\nAnd you?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens per step") == 2


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--prompt", "x", "--top-p", "0"), "must be above 0; for greedy"),
        (("--model", "no-such-model", "--prompt", "x"), "there is no model 'no-such-model'"),
        (("--prompt", "x", "--num-speculative-tokens", "99"), "num_speculative_tokens=99 must be"),
        (("--prompt", "", "--raw"), "The prompt is empty"),
        (("--prompt", "x " * 9000, "--raw"), "max_model_len=8192 must hold"),
        (("--prompt", "x", "--max-model-len", "9000"), "beyond the model's own window of 8192"),
        (("--prompt", "x", "--kv-cache-memory", "1000"), "raise it to"),
        (("--prompt", "x", "--dtype", "float16"), "not supported on a CPU"),
    ],
    ids=["top-p", "model", "K", "empty-prompt", "long-prompt", "window", "memory", "fp16"],
)
def test_bad_input_gets_one_sentence(
    args: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = run_here(capsys, *args, "--max-tokens", "2")
    assert status == 2
    assert sentence in errors
    assert len(errors.strip().splitlines()) == 1


def test_batch_writes_every_result_and_a_second_run_does_nothing_twice(tmp_path: Path) -> None:
    source, target = requests_file(tmp_path, 5), tmp_path / "results.jsonl"
    first = run("--input", source, "--output", target)
    assert first.returncode == 0, first.stderr
    whole = results(target)
    assert sorted(whole) == list(range(5))
    assert {"text", "token_ids", "finish_reason", "stats"} <= whole[0].keys()
    # Two results lost, one of them half written: the second run adds just these.
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:3]) + lines[3][:20])
    again = run("--input", source, "--output", target)
    assert again.returncode == 0, again.stderr
    assert target.read_text().startswith("".join(lines[:3]))
    for index, row in results(target).items():
        assert row["token_ids"] == whole[index]["token_ids"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x", "top_P": 1}', "unknown field 'top_P'"),
        ('{"text": "x"}', 'either "prompt" or "messages"'),
        ("{", "line 2"),
        ('{"prompt": [1, 999999]}', "token id 999999"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature='hot' must be a number"),
    ],
    ids=["unknown-field", "no-prompt", "no-json", "bad-id", "bad-type"],
)
def test_bad_request_line_is_named_and_nothing_runs(
    tmp_path: Path, line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = requests_file(tmp_path, 1), tmp_path / "results.jsonl"
    source.write_text(source.read_text() + line + "\n")
    status, errors = run_here(capsys, "--input", source, "--output", target)
    assert status == 2
    assert "line 2" in errors
    assert sentence in errors
    assert not target.exists()


def test_ctrl_c_leaves_whole_results_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    source, target = requests_file(tmp_path, 60, ignore_eos=True), tmp_path / "results.jsonl"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    args = command("--input", source, "--output", target, "--max-num-seqs", "2")
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=env) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (target.exists() and target.read_text().count("\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    before = results(target)
    assert 2 <= len(before) < 60
    resumed = run("--input", source, "--output", target)
    assert resumed.returncode == 0, resumed.stderr
    after = results(target)
    assert sorted(after) == list(range(60))
    assert all(after[i] == before[i] for i in before)


def test_full_disk_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there")
    (tmp_path / "out.jsonl").symlink_to(full)
    source = requests_file(tmp_path, 1)
    status, errors = run_here(capsys, "--input", source, "--output", tmp_path / "out.jsonl")
    assert status == 2
    assert "No space left" in errors
