"""The modes of the command line: prompt, chat, batch, demo and explain, with `--json` and `--trace`."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec import LLM, SamplingParams
from nanospec.apps.cli import chat, demo, explain, generate
from nanospec.drafters.estimates import StepCosts
from nanospec.models.config import DTYPES
from nanospec.models.families import read_config
from nanospec.outputs import Completion, RequestOutput, SpecStats
from tests.alphabet import ALPHABET, EOS
from tests.nanospec.apps.cli.conftest import Fail, Run
from tests.tiny import num_parameters

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
    assert "Applying the chat template to prompts" in errors
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


def as_in_a_terminal(console: generate.Console, stream: Any = None, show_drafts: bool = False) -> None:
    console.stream, console.color, console.show_drafts = sys.stdout, True, False


def test_demo_compares_with_measured_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.html"
    monkeypatch.setattr(demo, "REQUESTS", {"quotation": PROMPT, "other": "z"})
    monkeypatch.setattr(demo, "SamplingParams", lambda **given: SamplingParams(**{**given, "max_tokens": 8}))
    monkeypatch.setattr(generate.Console, "__init__", as_in_a_terminal)
    status, colored, errors = run("--demo", "--trace", trace)
    assert status == 0, errors
    text = re.sub(r"\x1b\[\d+m", "", colored)
    assert f"--- quotation: {PROMPT}\nefghijkl\n\n--- other: z\n .!é\n" in text
    numbers = r"[\d.]+ +[\d.]+ +[\d.]+x +[\d.]+ +(?:\d+%|-) +yes\n"
    assert re.search(rf"accepted  equal\nquotation +8 +{numbers}other +5 +{numbers}$", text)
    lanes = lanes_in(trace)
    assert [lane["name"] for lane in lanes] == ["quotation", "other"]
    assert all(lane["plain_seconds"] > 0 for lane in lanes)
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
    assert lane["plain_seconds"] is None


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
    memory, arithmetic = explain.Part("a", 25_000_000, 20_000_000), explain.Part("a", 5_000_000, 20_000_000)
    assert [part.ms(explain.Machine(1e9, 2e9)) for part in (memory, arithmetic)] == [25, 10]
    windows = explain.parts(replace(config, windows=(10,) * config.num_layers), 3, 1000, 2)
    assert windows == explain.parts(config, 3, 10, 2)


def test_report_predicts_speedup_from_measured_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, costs = explain.Machine(1e6, 1e7), StepCosts(packed={1: 2.0, 3: 2.2, 5: 2.5, 9: 4.0})

    def load(*args: Any, **options: Any) -> LLM:
        llm = LLM(*args, **options)
        llm.engine.policy.costs = costs
        return llm

    monkeypatch.setattr(generate, "LLM", load)
    monkeypatch.setattr(explain, "MAX_TOKENS", 12)
    monkeypatch.setattr(explain, "measure", lambda device, dtype: machine)
    monkeypatch.setattr(explain, "REQUESTS", {"code edit": ALPHABET + EOS + "a"})
    monkeypatch.setattr(explain, "decode_rate", lambda output: 3 + (output.stats.num_drafted > 0))
    status, text, errors = run("--explain", "--num-speculative-tokens", "4")
    assert status == 0, errors
    assert re.search(r"^5 +[\d.]+ +2.50 +1.25x$", text, re.MULTILINE)
    gains = "30%: 1.14x, 50%: 1.55x, 70%: 2.22x, 90%: 3.28x"
    assert f"\n4 drafts break even at 1.25 tokens per step; by acceptance rate: {gains}\n" in text
    answer = r"Code edit: (\S+) tokens per step with (\S+) drafts; speedup (\S+)x predicted, 1.33x measured"
    [figures] = re.findall(answer, text)
    per_step, drafts, speedup = map(float, figures)
    assert per_step > 2
    assert speedup == pytest.approx(per_step * 2 / costs.cost(1, 1 + drafts), abs=0.05)
    assert "drafts break even" not in run("--explain", "--spec", "none")[1]
