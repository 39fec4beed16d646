"""The modes of the command line: prompt, chat, batch and demo, with `--json` and `--trace`."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec import SamplingParams
from nanospec.apps.cli import chat, demo, generate
from nanospec.outputs import Completion, RequestOutput, SpecStats
from tests.alphabet import ALPHABET, EOS
from tests.nanospec.apps.cli.conftest import Fail, Run

PROMPT = ALPHABET + EOS + "abcd"  # continued by the rest of the alphabet


def lanes_in(file: Path) -> list[dict[str, Any]]:
    """Return the outputs in a trace."""
    [data] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', file.read_text(), re.S)
    return list(json.loads(data)["lanes"])


def results(path: Path) -> dict[int, dict[str, Any]]:
    return {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}


def output(count: int, seconds: float = 1.5, error: str | None = None, **stats: Any) -> RequestOutput:
    own, spec = [7] * count, SpecStats(**stats)
    done = Completion("", own, "length", None, error, None, [], spec, seconds, 0.5, 0, 0, 1)
    return RequestOutput("r", None, [1], [done])


def test_prompt_is_answered_with_statistics(run: Run) -> None:
    arguments = ("--prompt", PROMPT, "--show-drafts")
    status, text, errors = run(*arguments)
    line = r"\[27 tokens, [\d.]+ tok/s, [\d.]+ tokens per step, \d+% of \d+ drafts accepted, finished: stop\]"
    assert status == 0, errors
    assert re.fullmatch(rf"{ALPHABET[4:]}\n{line}\n\[float32 on cpu by .*, \d+ threads\]\n", text)
    several = run("--prompt", "ab", "--n", "2", "--max-tokens", "2")[1]
    assert re.fullmatch(r"\[1\] cd\n\[2\] cd\n\[float32 on cpu .*\]\n", several)
    answers = []
    for options in (["--spec", "none"], ["--num-speculative-tokens", "4"]):
        _, text, errors = run(*arguments, *options, "--json")
        assert errors == ALPHABET[4:] + "\n"
        answers.append(json.loads(text))
    plain, spec = answers
    assert plain["outputs"][0]["token_ids"] == spec["outputs"][0]["token_ids"]
    assert plain["metrics"]["num_drafted"] == 0 < spec["metrics"]["num_accepted"]


def test_summary_names_error_and_lossy_rule() -> None:
    stats: dict[str, Any] = {"num_steps": 2, "num_tokens": 3, "num_drafted": 4, "num_accepted": 1}
    assert generate.summary(output(3, error="NaN", acceptance="typical", **stats)) == (
        "[3 tokens, 2.0 tok/s, 1.50 tokens per step, 25% of 4 drafts accepted "
        "(typical acceptance: may differ from the output without speculation); NaN, finished: length]"
    )


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--model", "no-such-model", "--prompt", "x"), "unknown model 'no-such-model'"),
        (("--prompt", "", "--raw"), "The prompt is empty"),
        (("--prompt", "x " * 300, "--raw"), "--max-model-len 512 must hold"),
        (("--prompt", "x", "--dtype", "float16"), "--dtype 'float16' is not supported on a CPU"),
        (("--prompt", "x", "--spec", "draft", "--draft-model", "no"), "unknown model 'no'"),
        (("--input", "seed=1.jsonl", "--output", "x"), "seed=1.jsonl: No such file"),  # not a flag
        (("--prompt", "x", "--trace", "/no/trace.html"), "/no/trace.html: No such file or directory"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_invalid_input_is_reported_in_one_line(args: Any, sentence: str, fail: Fail, folder: Path) -> None:
    assert sentence in fail("--model", folder, "--dtype", "float32", "--kv-cache-memory", "1M", *args)


def test_chat_ends_with_its_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.html"
    for options in ([], ["--json"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("ab\nbc\n"))
        status, text, errors = run("--chat", "--max-tokens", "3", "--system", "x", "--trace", trace, *options)
        assert status == 0, errors
        assert errors.endswith(f"Trace: {trace}\n")
        first, second = lanes_in(trace)
        assert ["".join(lane["prompt"]) for lane in (first, second)] == ["xab", "xabcdebc"]
        if options:
            assert json.loads(text)["metrics"]["num_finished"] == 2  # no prompt, no answer
            assert "> cde\n" in errors
        else:
            assert text.startswith(f"{chat.WELCOME}\n> cde\n[3 tokens, ")
            assert text.count("tokens per step") == 2


def test_batch_writes_all_results_and_resumes(tmp_path: Path, run: Run) -> None:
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    sampling = {"temperature": 3, "max_tokens": 12, "ignore_eos": True, "custom_id": "mine"}
    source.write_text("".join(json.dumps({"prompt": ALPHABET[: i + 1], **sampling}) + "\n" for i in range(5)))
    status, output, errors = run("--input", source, "--output", target, "--json")
    assert status == 0, errors
    figures, whole = json.loads(output)["batch"], results(target)
    assert {"text", "token_ids", "finish_reason", "stats"} <= whole[0].keys()
    assert whole[0]["custom_id"] == "mine"
    assert len({str(row["token_ids"]) for row in whole.values()}) == 5 == figures["requests"]
    assert figures["tokens"] == sum(len(row["token_ids"]) for row in whole.values())
    # Two results are missing, one of them half written. The second run adds only these.
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:3]) + lines[3][:20])
    assert run("--input", source, "--output", target)[0] == 0
    before, after = target.read_text(), results(target)
    assert before.startswith("".join(lines[:3]))
    assert {i: row["token_ids"] for i, row in after.items()} == {i: whole[i]["token_ids"] for i in whole}
    status, _, errors = run("--input", source, "--output", target, "--top-k=3")
    assert (status, "line 1 is not a result of this input, model and options" in errors) == (2, True)
    done = "All requests already have results"
    assert run("--input", source, "--output", target)[1:] == ("", f"{done}; nothing to do.\n")
    status, output, _ = run("--input", source, "--output", target, "--json")
    assert (status, json.loads(output)["batch"]["done_before"]) == (0, 5)
    assert target.read_text() == before


def test_batch_on_stdin_and_stdout(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}
    requests = [
        {"prompt": "abc", "max_tokens": 4, "n": 2},
        {"messages": body["messages"], "max_tokens": 4},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    typed = "".join(json.dumps(line) + "\n" for line in requests)
    written, trace = io.BytesIO(), tmp_path / "trace.html"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(typed.encode())))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(written))
        status, _, errors = run("--input", "-", "--output", "-", "--trace", trace)
        assert status == 0, errors
        lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["text"] for line in lines if "text" in line] == ["defg", "defg"]
    [answer] = [line["response"]["body"] for line in lines if "response" in line]
    assert answer["choices"][0]["message"]["content"] == "defg"
    assert answer["usage"]["completion_tokens"] == 4
    assert ["".join(lane["prompt"]) for lane in lanes_in(trace)] == ["abc"] * 4


def as_in_a_terminal(console: generate.Console, stream: Any = None, show_drafts: bool = False) -> None:
    console.stream, console.color, console.show_drafts = sys.stdout, True, False


def test_demo_compares_with_measured_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REQUESTS", {"quotation": PROMPT, "other": "z"})
    monkeypatch.setattr(demo, "SamplingParams", lambda **given: SamplingParams(**{**given, "max_tokens": 8}))
    monkeypatch.setattr(generate.Console, "__init__", as_in_a_terminal)
    status, colored, errors = run("--demo")
    assert status == 0, errors
    text = re.sub(r"\x1b\[\d+m", "", colored)
    assert f"--- quotation: {PROMPT}\nefghijkl\n\n--- other: z\n .!é\n" in text
    numbers = r"[\d.]+ +[\d.]+ +[\d.]+x +[\d.]+ +(?:\d+%|-) +yes\n"
    assert re.search(rf"accepted  equal\nquotation +8 +{numbers}other +5 +{numbers}$", text)
    assert "\x1b[32mj\x1b[0m" in colored


def test_demo_row() -> None:
    plain, spec = output(9, 4.5), output(8, 2.25, num_steps=4, num_tokens=9, num_drafted=8, num_accepted=6)
    assert demo._row("a", plain, spec) == ("a", "8", "2.0", "4.0", "2.00x", "2.25", "75%", "NO")


def test_interrupted_run_still_writes_trace(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    trace = tmp_path / "trace.html"
    monkeypatch.setattr(generate.Console, "pieces", Mock(side_effect=[None, None, KeyboardInterrupt]))
    status, _, errors = run("--prompt", PROMPT, "--spec", "none", "--trace", trace)
    assert (status, errors) == (130, f"\nTrace: {trace}\n\nInterrupted.\n")
    [lane] = lanes_in(trace)
    assert lane["finish_reason"] == "abort"
    assert 0 < len(lane["token_ids"]) < len(ALPHABET)
    assert lane["plain_seconds"] > 0
