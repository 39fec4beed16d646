"""The modes of the command line: prompt, chat, batch and demo, with `--json` and `--trace`."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec import SamplingParams
from nanospec.apps.cli import chat, demo, generate
from nanospec.outputs import Completion, RequestOutput, SpecStats
from tests.nanospec.apps.cli.conftest import Run
from tests.nanospec.test_llm import ALPHABET, EOS

PROMPT = ALPHABET + EOS + "abcd"  # continued by the rest of the alphabet


def lanes_in(file: Path) -> list[dict[str, Any]]:
    """Return the outputs in a trace."""
    [data] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', file.read_text(), re.S)
    return list(json.loads(data)["lanes"])


def requests_file(folder: Path, count: int, **fields: Any) -> Path:
    """Write requests whose random outputs depend on their seeds."""
    path = folder / "requests.jsonl"
    sampling = {"temperature": 3, "max_tokens": 12, "ignore_eos": True}
    lines = [{"prompt": ALPHABET[: i + 1], **sampling, **fields} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[int, dict[str, Any]]:
    return {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}


def output(count: int, seconds: float = 1.5, error: str | None = None, **stats: Any) -> RequestOutput:
    done = Completion(
        "", [7] * count, "length", None, error, None, [], SpecStats(**stats), seconds, 0.5, 0, 0, 1
    )
    return RequestOutput("r", None, [1], [done])


def test_prompt_is_answered_with_statistics(run: Run) -> None:
    arguments = ("--prompt", PROMPT, "--show-drafts")
    status, text, errors = run(*arguments)
    line = r"\[27 tokens, [\d.]+ tok/s, [\d.]+ tokens per step, \d+% of \d+ drafts accepted, finished: stop\]"
    assert status == 0, errors
    assert re.fullmatch(rf"{ALPHABET[4:]}\n{line}\n\[float32 on cpu by .*, \d+ threads\]\n", text)
    answers = []
    for options in (["--spec", "none"], ["--num-speculative-tokens", "4"]):
        _, text, errors = run(*arguments, *options, "--json")
        assert errors == ALPHABET[4:] + "\n"
        answers.append(json.loads(text))
    plain, spec = answers
    assert plain["outputs"][0]["token_ids"] == spec["outputs"][0]["token_ids"]
    assert plain["metrics"]["num_drafted"] == 0 < spec["metrics"]["num_accepted"]


def test_several_outputs_without_chat_template(folder: Path, tmp_path: Path, run: Run) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    arguments = ("--model", model, "--prompt", "ab", "--n", "2", "--max-tokens", "2")
    status, text, errors = run(*arguments)
    assert (status, errors) == (0, "The model has no chat template; continuing the prompt as plain text.\n")
    assert re.fullmatch(r"\[1\] cd\n\[2\] cd\n\[float32 on cpu .*\]\n", text)
    _, text, errors = run(*arguments, "--raw", "--json")
    assert errors == "[1] cd\n[2] cd\n"
    assert [done["token_ids"] for done in json.loads(text)["outputs"]] == [[2, 3], [2, 3]]


def test_summary() -> None:
    typical: dict[str, Any] = {"acceptance": "typical", "num_steps": 2, "num_tokens": 3, "num_drafted": 4}
    texts = [
        generate.summary(done)
        for done in (
            output(1),
            output(3, 0, "NaN"),
            output(3, **typical),
            output(3, **typical, num_accepted=1),
        )
    ]
    lossy = "(typical acceptance: may differ from the output without speculation)"
    assert texts == [
        "[1 token, 0.7 tok/s, 0.00 tokens per step, finished: length]",
        "[3 tokens, 3000000000.0 tok/s, 0.00 tokens per step; NaN, finished: length]",
        "[3 tokens, 2.0 tok/s, 1.50 tokens per step, 0% of 4 drafts accepted, finished: length]",
        f"[3 tokens, 2.0 tok/s, 1.50 tokens per step, 25% of 4 drafts accepted {lossy}, finished: length]",
    ]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--prompt", "x", "--top-p", "0"), "--top-p 0 must be greater than 0; use"),
        (("--model", "no-such-model", "--prompt", "x"), "unknown model 'no-such-model'"),
        (("--prompt", "x", "--num-speculative-tokens", "99"), "--num-speculative-tokens 99 must be"),
        (("--prompt", "", "--raw"), "The prompt is empty"),
        (("--prompt", "x " * 300, "--raw"), "--max-model-len 512 must hold"),
        (("--prompt", "x", "--max-model-len", "9000"), "exceeds the model's limit of 512"),
        (("--prompt", "x", "--kv-cache-memory", "1000"), "increase --kv-cache-memory"),
        (("--prompt", "x", "--dtype", "float16"), "--dtype 'float16' is not supported on a CPU"),
        (("--prompt", "x", "--acceptance", "lax"), "--acceptance 'lax' is not supported; use one of exact,"),
        (("--prompt", "x", "--spec", "draft"), "--spec 'draft' needs a draft model"),
        (("--prompt", "x", "--spec", "draft", "--draft-model", "no"), "unknown model 'no'"),
        (("--input", "seed=1.jsonl", "--output", "x"), "seed=1.jsonl: No such file"),  # not a flag
        (("--prompt", "x", "--trace", "/no/trace.html"), "The directory /no does not exist"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_invalid_input_is_reported_in_one_line(args: tuple[str, ...], sentence: str, run: Run) -> None:
    status, _, errors = run(*args)
    assert status == 2
    assert sentence in errors
    assert len(errors.strip().splitlines()) == 1


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
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert f"No requests were run; {trace} was not written." in run("--chat", "--trace", trace)[2]
    assert len(lanes_in(trace)) == 2


def test_batch_writes_all_results_and_resumes(tmp_path: Path, run: Run) -> None:
    source, target = requests_file(tmp_path, 5, custom_id="mine"), tmp_path / "results.jsonl"
    status, output, errors = run("--input", source, "--output", target, "--json")
    assert status == 0, errors
    assert "Applying the chat template to prompts" in errors
    assert "5 requests in " in errors
    figures = json.loads(output)["batch"]
    whole = results(target)
    assert sorted(whole) == list(range(5))
    assert {"text", "token_ids", "finish_reason", "stats"} <= whole[0].keys()
    assert whole[0]["custom_id"] == "mine"
    assert len({str(row["token_ids"]) for row in whole.values()}) == 5
    assert (figures["requests"], figures["tokens"]) == (
        5,
        sum(len(row["token_ids"]) for row in whole.values()),
    )
    # Two results lost, one of them half written: the second run adds just these.
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:3]) + lines[3][:20])
    status, _, errors = run("--input", source, "--output", target)
    assert status == 0, errors
    assert target.read_text().startswith("".join(lines[:3]))
    after = results(target)
    assert {i: row["token_ids"] for i, row in after.items()} == {i: whole[i]["token_ids"] for i in whole}
    before = target.read_text()
    for change in ("--raw", "--system=Be brief.", "--top-k=3", "--acceptance=typical"):
        status, _, errors = run("--input", source, "--output", target, change)
        assert status == 2
        assert "line 1 is not a result of this input, model and options" in errors
    done = "All requests already have results"
    assert run("--input", source, "--output", target)[1:] == ("", f"{done}; nothing to do.\n")
    assert f"{done}.\n" in run("--input", source, "--output", target, "--json")[2]
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


def test_invalid_request_line_is_reported_before_running(tmp_path: Path, run: Run) -> None:
    source, target = requests_file(tmp_path, 1), tmp_path / "results.jsonl"
    first = source.read_text()
    for line, sentence in (
        ({"prompt": [1, 999999]}, "token id 999999"),
        ({"prompt": "x " * 300}, "but --max-model-len 512 must hold"),
        ({"prompt": "x", "acceptance": "typical"}, "='typical' requires .* --acceptance 'typical'"),
    ):
        source.write_text(first + json.dumps(line) + "\n")
        status, _, errors = run("--input", source, "--output", target)
        assert status == 2
        assert re.search(rf"{source} line 2.*{sentence}", errors)
        assert not target.exists()


def as_in_a_terminal(console: generate.Console, stream: Any = None, show_drafts: bool = False) -> None:
    console.stream, console.color, console.show_drafts = sys.stdout, True, False


def test_demo_compares_with_measured_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.html"
    monkeypatch.setattr(demo, "REQUESTS", {"quotation": PROMPT, "other": "z"})
    monkeypatch.setattr(demo, "SamplingParams", lambda **given: SamplingParams(**{**given, "max_tokens": 8}))
    status, text, errors = run("--demo", "--trace", trace)
    assert status == 0, errors
    answers = f"\n--- quotation: {PROMPT}\nefghijkl\n\n--- other: z\n .!é\n\nrequest  "
    assert text.startswith(answers)
    numbers = r"[\d.]+ +[\d.]+ +[\d.]+x +[\d.]+ +(?:\d+%|-) +yes\n"
    assert re.search(
        rf"speedup  tokens/step  accepted  equal\nquotation +8 +{numbers}other +5 +{numbers}$", text
    )
    lanes = lanes_in(trace)
    assert [lane["name"] for lane in lanes] == ["quotation", "other"]
    assert all(lane["plain_is_measured"] for lane in lanes)
    monkeypatch.setattr(generate.Console, "__init__", as_in_a_terminal)
    text = run("--demo")[1]
    assert "\x1b[2mGreen: accepted drafts.\x1b[0m\n" in text
    assert "\x1b[32mj\x1b[0m" in text


def test_row_of_the_demo() -> None:
    stats: dict[str, Any] = {"num_steps": 4, "num_tokens": 9, "num_drafted": 8, "num_accepted": 6}
    plain, spec = output(9, 4.5), output(9, 2.5, **stats)
    assert demo._row("a", plain, spec) == ("a", "9", "2.0", "4.0", "2.00x", "2.25", "75%", "yes")
    assert demo._row("a", plain, output(8, 2.5))[5:] == ("0.00", "-", "NO")


def test_interrupted_run_still_writes_trace(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, trace = [], tmp_path / "trace.html"

    def interrupt(console: object, pieces: object) -> None:
        seen.append(pieces)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate.Console, "pieces", interrupt)
    status, _, errors = run("--prompt", PROMPT, "--spec", "none", "--trace", trace)
    assert (status, errors) == (130, f"\nTrace: {trace}\n\nInterrupted.\n")
    [lane] = lanes_in(trace)
    assert lane["finish_reason"] == "abort"
    assert 0 < sum(len(step["tokens"]) for step in lane["steps"]) == len(lane["token_ids"])
    assert lane["plain_seconds"] > 0
    assert not lane["plain_is_measured"]


def test_options_reach_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request gets few rows, and the demo no prefix caching; a trace is checked before loading."""
    created: list[dict[str, Any]] = []

    def create(model: Path, **options: Any) -> Any:
        created.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(generate, "LLM", create)
    invalid = ["--prompt", "x", "--trace", "/no/trace.html"]
    for arguments in (["--prompt", "x", "--n", "3"], ["--chat", "--max-num-seqs", "5"], ["--demo"], invalid):
        assert run(*arguments)[0] == 2
    assert [options.get("max_num_seqs") for options in created] == [3, 5, None]
    assert [options.get("enable_prefix_caching", True) for options in created] == [True, True, False]
