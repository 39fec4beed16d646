"""The command line, run in this process; `tests/test_run.py` runs it in a subprocess."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nanospec
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps import options
from nanospec.apps.cli import generate, parser
from nanospec.apps.cli.main import COMMANDS, main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def loaded() -> Iterator[Callable[..., LLM]]:
    """`LLM`, cached by its settings."""
    llms: dict[str, LLM] = {}

    def load(model: str, **settings: Any) -> LLM:
        key = f"{model} {settings}"
        if key not in llms:
            llms[key] = LLM(model, **settings)
        return llms[key]

    yield load
    llms.clear()


@pytest.fixture
def run(
    smollm2: Path,
    loaded: Callable[..., LLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run a command line with SmolLM2: (exit status, standard output, standard error)."""
    monkeypatch.setattr(generate, "LLM", loaded)

    def run(*args: str | Path) -> tuple[int, str, str]:
        small = ["--model", str(smollm2), "--dtype", "float32", "--kv-cache-memory", str(400 << 20)]
        status = main([*small, *map(str, args)])
        return status, *capsys.readouterr()

    return run


def requests_file(folder: Path, count: int, **fields: object) -> Path:
    path = folder / "requests.jsonl"
    lines = [{"prompt": f"Count: {i}, {i + 1}, {i + 2},", "max_tokens": 12, **fields} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[int, dict[str, object]]:
    return {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_prompt_with_and_without_speculation(run: Run) -> None:
    prompt = ("--prompt", "Repeat: one two three one two three one two")
    arguments = (*prompt, "--max-tokens", "24", "--json")
    plain, spec = run(*arguments, "--spec", "none"), run(*arguments, "--num-speculative-tokens", "4")
    assert plain[0] == spec[0] == 0, plain[2] + spec[2]
    before, after = json.loads(plain[1]), json.loads(spec[1])
    assert after["outputs"][0]["token_ids"] == before["outputs"][0]["token_ids"]
    assert after["metrics"]["num_drafted"] > 0
    assert before["metrics"]["num_drafted"] == 0
    note = "typical acceptance: may differ from the output without speculation"
    assert note in run(*prompt, "--acceptance", "typical", "--num-speculative-tokens", "4")[1]
    assert note not in run(*prompt, "--acceptance", "typical", "--spec", "none")[1]


def test_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--max-tokens", "3", "--json", "--prompt")
    wanted = json.loads(run(*arguments, "Count:\n1, 2")[1])["outputs"][0]["token_ids"]
    given_status = ((b"Count:\n1, 2\n", 0), (b"\xef\xbb\xbfCount:\n1, 2\r\n", 0), (b"a\xff", 2))
    for given, status in given_status:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(given)))
        result = run(*arguments, "-")
        assert result[0] == status
        if status:
            assert "standard input is not valid UTF-8 at byte 1." in result[2]
        else:
            assert json.loads(result[1])["outputs"][0]["token_ids"] == wanted
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed." in run(*arguments, "-")[2]
    for closed in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(closed, None)
    assert run("--max-tokens", "1", "--prompt", "x")[0] == 0


def test_file_names_are_not_rewritten_as_flags(run: Run) -> None:
    assert "seed=1.jsonl: No such file" in run("--input", "seed=1.jsonl", "--output", "x")[2]


def test_chat_ends_with_its_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd you?\n"))
    status, output, errors = run("--chat", "--max-tokens", "8")
    assert status == 0, errors
    assert output.count("tokens per step") == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    status, output, errors = run("--chat", "--max-tokens", "8", "--json")
    assert json.loads(output)["metrics"]["num_finished"] > 0  # no prompt, no answer
    assert "> " in errors


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--prompt", "x", "--top-p", "0"), "must be greater than 0; use"),
        (("--model", "no-such-model", "--prompt", "x"), "unknown model 'no-such-model'"),
        (("--prompt", "x", "--num-speculative-tokens", "99"), "--num-speculative-tokens 99 must be"),
        (("--prompt", "", "--raw"), "The prompt is empty"),
        (("--prompt", "x " * 9000, "--raw"), "--max-model-len 8192 must hold"),
        (("--prompt", "x", "--max-model-len", "9000"), "exceeds the model's limit of 8192"),
        (("--prompt", "x", "--kv-cache-memory", "1000"), "increase --kv-cache-memory"),
        (("--prompt", "x", "--dtype", "float16"), "--dtype 'float16' is not supported on a CPU"),
        (("--prompt", "x", "--acceptance", "lax"), "--acceptance 'lax' is not supported; use one of exact,"),
        (("--prompt", "x", "--spec", "draft"), "--spec 'draft' needs a draft model"),
        (("--prompt", "x", "--spec", "draft", "--draft-model", "no"), "unknown model 'no'"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_invalid_input_is_reported_in_one_line(args: tuple[str, ...], sentence: str, run: Run) -> None:
    status, _, errors = run("--max-tokens", "2", *args)
    assert status == 2
    assert sentence in errors or re.search(sentence, errors)
    assert len(errors.strip().splitlines()) == 1


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
    tokens: Any = [row["token_ids"] for row in whole.values()]
    assert (figures["requests"], figures["tokens"]) == (5, sum(map(len, tokens)))
    # Two results lost, one of them half written: the second run adds just these.
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:3]) + lines[3][:20])
    status, _, errors = run("--input", source, "--output", target)
    assert status == 0, errors
    assert target.read_text().startswith("".join(lines[:3]))
    for index, row in results(target).items():
        assert row["token_ids"] == whole[index]["token_ids"]
    before = target.read_text()
    for change in ("--raw", "--system=Be brief.", "--top-k=3", "--acceptance=typical"):
        status, _, errors = run("--input", source, "--output", target, change)
        assert status == 2
        assert "line 1 is not a result of this input, model and options" in errors
    assert target.read_text() == before


def test_batch_on_stdin_and_stdout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}
    requests = [
        {"prompt": "Say hi.", "max_tokens": 4},
        {"messages": body["messages"], "max_tokens": 4},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    typed = "".join(json.dumps(line) + "\n" for line in requests)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(typed.encode())))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(written))
        status, _, errors = run("--input", "-", "--output", "-")
        assert status == 0, errors
        lines = [json.loads(line) for line in written.getvalue().splitlines()]
    texts = [line["text"] for line in lines if "text" in line]
    [answer] = [line["response"]["body"] for line in lines if "response" in line]
    assert {*texts, answer["choices"][0]["message"]["content"]} == {texts[0]}
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": [1, 999999]}', "token id 999999"),
        ('{"prompt": "\\ud800"}', "unpaired surrogate"),
        (json.dumps({"prompt": "x " * 9000}), "but --max-model-len 8192 must hold"),
        ('{"prompt": "x", "acceptance": "typical"}', "='typical' requires .* --acceptance 'typical'"),
    ],
    ids=["bad-id", "surrogate", "long", "acceptance"],
)
def test_invalid_request_line_is_reported_before_running(
    tmp_path: Path, line: str, sentence: str, run: Run
) -> None:
    source, target = requests_file(tmp_path, 1), tmp_path / "results.jsonl"
    source.write_text(source.read_text() + line + "\n")
    status, _, errors = run("--input", source, "--output", target)
    assert status == 2
    assert f"{source} line 2" in errors
    assert re.search(sentence, errors)
    assert not target.exists() or not target.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_receive_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function = COMMANDS[command]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: len}))
    assert main([command, "name", "--force", "--dir=x"]) == 3


def test_options_become_settings() -> None:
    given = "--spec ngram+medusa --heads FILE --tree-width 2 --acceptance typical"
    given += " --num-speculative-tokens auto --prompt-lookup-min 2 --prompt-lookup-max 3 --stop a --stop b"
    given += " --top-k 3 --ignore-eos --seed 7 --stop-token-ids 5,6 --logit-bias"
    engine = "--no-enable-prefix-caching --device cpu --kv-cache-memory 4G"
    args = parser.parse([*given.split(), '{"3": 1}', "--demo", *engine.split()])
    assert SpecConfig(**options.fields_set(args, "SpecConfig")) == SpecConfig(
        method="ngram+medusa", heads="FILE", tree_width=2, acceptance="typical", prompt_lookup_min=2,
        prompt_lookup_max=3,
    )  # fmt: skip
    assert SamplingParams(**options.fields_set(args, "SamplingParams")) == SamplingParams(
        stop=("a", "b"), top_k=3, ignore_eos=True, seed=7, stop_token_ids=(5, 6), logit_bias={3: 1}
    )
    expected = {"enable_prefix_caching": False, "device": "cpu", "kv_cache_memory": 4 << 30}
    assert options.fields_set(args, "EngineConfig") == expected
    plain = parser.parse(["--demo", "--max-tokens", "none"])
    assert (options.fields_set(plain, "SpecConfig"), options.fields_set(plain, "EngineConfig")) == ({}, {})
    assert options.fields_set(plain, "SamplingParams") == {"max_tokens": None}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--version"], ["--demo", "--version"]):
        with pytest.raises(SystemExit, match="^0$"):
            main(args)
    assert capsys.readouterr().out == f"nanospec {nanospec.__version__}\n" * 2


def test_every_field_has_a_documented_option() -> None:
    shown = " ".join(parser.build_parser(full=True).format_help().split())
    for settings, _ in options.SETTINGS:
        for field in dataclasses.fields(settings):
            if field.name != "spec":
                assert options.flag_of(field.name) in shown
                assert options.descriptions(settings)[field.name]


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, full = (parser.build_parser(full).format_help() for full in (False, True))
    assert max(map(len, (*short.splitlines(), *full.splitlines()))) <= 80
    assert len(short.splitlines()) < 72
    assert "--top-k" in full
    assert "--top-k" not in short


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--max-token", "5"], "unknown option --max-token; did you mean --max-tokens?"),
        (["--prompt", "why", "is"], "unexpected argument 'is'"),
        (["--prompt"], "--prompt expected one argument"),
        (["--top-p", "hot"], "--top-p 'hot' must be a number"),
        (["--max-tokens", "many"], "--max-tokens 'many' must be an integer"),
        (["--num-speculative-tokens", "x"], "--num-speculative-tokens 'x' must be an integer or 'auto'"),
        (["--json=1"], "--json ignored explicit argument '1'"),
        (["--kv-cache-memory", "4X"], "--kv-cache-memory '4X' must be a number of bytes"),
        (["--temp", "1"], "unknown option --temp; did you mean --temperature?"),
        (["--prompt", "x", "-tp", "two"], "-tp 'two' must be an integer"),
        (["--"], "unknown option --. See"),
        (["chat"], "unknown command 'chat'; did you mean --chat?"),
        (["--demo", "--output", "-"], "--input and --output must be used together"),
        ([], "exactly one of --prompt, --chat,"),
        (["--prompt", "x", "--chat"], "exactly one of --prompt, --chat,"),
        (["server"], "unknown command 'server'; did you mean serve?"),
        (["--input", "x", "--output", "-", "--json"], "--output - and --json both write"),
        (["--input", "x", "--output", "y", "--trace", "y"], "--trace y is also a batch file"),
        (["--prompt", "x", "--raw", "--system", "y"], "--raw cannot be used with --system"),
        (["--chat", "--n", "2"], "--n must be 1 with --chat"),
        (["--prompt", "x", "--logit-bias", '{"1": 1, "1": 2}'], "must be a JSON object"),
        (["--prompt", "x", "--response-format", "[" * 2000], "must be a JSON object"),
    ],
    ids=lambda value: "_".join(value)[:80] if isinstance(value, list) else "",
)
def test_invalid_command_line_is_reported_in_one_line(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(args)
    errors = capsys.readouterr().err
    assert sentence in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("num_speculative_tokens=99 must be", "--num-speculative-tokens 99 must be"),
        ("method='x' needs SpecConfig(draft_model='y').", "--spec 'x' needs --draft-model 'y'."),
        ("lower max_num_seqs or block_size", "lower --max-num-seqs or --block-size"),
        ("a method to stop; n is my_seed=3, --seed=4", "a method to stop; n is my_seed=3, --seed=4"),
        ("/top_k/x top_k.json top_k/ top_k-3: top_k.", "/top_k/x top_k.json top_k/ top_k-3: --top-k."),
    ],
)
def test_errors_name_flags_instead_of_fields(message: str, words: str) -> None:
    assert options.in_flags(message) == words


@pytest.mark.parametrize("module", ["", ".apps.cli.main", ".apps.batch.run", ".apps.cli.fetch"])
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, nanospec{module}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
