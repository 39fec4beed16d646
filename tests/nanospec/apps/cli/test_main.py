"""The options of the command line, and its errors and exit statuses; `test_process.py` runs a process."""

import dataclasses
import io
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import nanospec
from nanospec import SamplingParams, SpecConfig
from nanospec.apps import options
from nanospec.apps.batch import lines
from nanospec.apps.cli import generate, parser
from nanospec.apps.cli.main import main
from tests.nanospec.apps.cli.conftest import Fail, Run


def test_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    monkeypatch.setattr(generate, "run", lambda args, *_: prompts.append(args.prompt))
    for given in (b"a:\n\xc3\xa9\n", b"\xef\xbb\xbfa:\n\xc3\xa9\r\n"):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(given)))
        assert run("--prompt", "-")[0] == 0
    assert prompts == ["a:\né", "a:\né"]
    for invalid, message in (
        (b"a\xff", "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
        (None, "standard input is closed."),
    ):
        monkeypatch.setattr("sys.stdin", invalid and SimpleNamespace(buffer=io.BytesIO(invalid)))
        status, _, errors = run("--prompt", "-")
        assert (status, len(prompts)) == (2, 2)
        assert errors.endswith(f": {message}\n")
    monkeypatch.setattr("sys.stdout", None)  # closed by the caller
    assert run("--prompt", "x")[0] == 0


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("top_k=3 is bad."), 2, "{}: --top-k 3 is bad.\n"),
        (lines.LineError("top_k=3.jsonl line 1 is bad."), 2, "{}: top_k=3.jsonl line 1 is bad.\n"),
        (OSError(2, "No such file", "top_k=3"), 2, "{}: top_k=3: No such file\n"),
        (OSError(28, "No space left", "results"), 2, "{}: results: No space left\n"),
        (OSError(28, "No space left"), 2, "Cannot write to standard output: No space left.\n"),
        (ImportError("needs gguf"), 2, "{}: needs gguf\n"),
        (BrokenPipeError(), 141, ""),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
        (KeyboardInterrupt("1 of 2 is done"), 130, "\nInterrupted: 1 of 2 is done.\n"),
        (ModuleNotFoundError("torch"), None, ""),
        (RuntimeError("a bug"), None, ""),
    ],
    ids=repr,
)
def test_errors_become_exit_statuses(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int | None, message: str
) -> None:
    """The message is one line; other errors are raised."""
    monkeypatch.setattr(generate, "run", Mock(side_effect=error))
    monkeypatch.setattr("nanospec.apps.cli.main._discard_output", lambda: None)
    if status is None:
        with pytest.raises(type(error)):
            run("--prompt", "x")
    else:
        assert run("--prompt", "x") == (status, "", message.format(nanospec.models.folders.program()))


def test_options_become_settings() -> None:
    given = "--spec ngram+dflash --draft-model FILE --tree-width 2 --num-speculative-tokens auto"
    given += ' --stop a --stop b --top-k 3 --ignore-eos --seed 7 --stop-token-ids 5,6 --logit-bias {"3":1}'
    given += " --no-enable-prefix-caching --device cpu --kv-cache-memory 4G --demo"
    args = parser.parse(given.split())
    spec = SpecConfig(method="ngram+dflash", draft_model="FILE", tree_width=2)
    assert SpecConfig(**options.fields_set(args, "SpecConfig")) == spec
    assert SamplingParams(**options.fields_set(args, "SamplingParams")) == SamplingParams(
        stop=("a", "b"), top_k=3, ignore_eos=True, seed=7, stop_token_ids=(5, 6), logit_bias={3: 1}
    )
    engine = {"enable_prefix_caching": False, "device": "cpu", "kv_cache_memory": 4 << 30}
    assert options.fields_set(args, "EngineConfig") == engine
    plain = parser.parse(["--demo", "--max-tokens", "none"])
    assert (options.fields_set(plain, "SpecConfig"), options.fields_set(plain, "EngineConfig")) == ({}, {})
    assert options.fields_set(plain, "SamplingParams") == {"max_tokens": None}


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        main(["--help-all"])
    text = capsys.readouterr().out
    assert "\n\ngeneral:\n  --output FILE " in text
    text = " ".join(text.split())
    for settings, _ in options.SETTINGS:
        for field in dataclasses.fields(settings):
            if field.name not in ("spec", "trace"):  # --trace is a different option
                assert options.flag_of(field.name) in text
    assert "none generates up to the context length. (default: 256)" in text


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--max-token 5", "unknown option --max-token; did you mean --max-tokens?"),
        ("--prompt why is", "unexpected argument 'is'; quote values that contain spaces."),
        ("--prompt", "--prompt expected one argument."),
        ("--num-speculative-tokens x", "--num-speculative-tokens 'x' must be an integer or 'auto'."),
        ("--kv-cache-memory 4X", "--kv-cache-memory '4X' must be a number of bytes"),
        ("chat", "unknown command 'chat'; did you mean --chat?"),
        ("why", "unknown command 'why'; use --prompt TEXT to answer a prompt."),
        ("--demo --output -", "--input and --output must be used together."),
        ("", "exactly one of --prompt, --chat, --input and --demo is required."),
        ("--input x --output - --json", "--output - and --json both write to standard output; use one."),
        ("--input x --output y --trace y", "--trace y is also a batch file."),
        ("--prompt x --raw --system y", "--raw cannot be used with --system."),
        ("--chat --n 2", "--n must be 1 with --chat."),
        ("--prompt x --replicas 2", "--replicas requires --input or the serve command."),
        ("--input x --output y --replicas 2 --trace z", "--trace cannot be used with --replicas;"),
        (f"--prompt x --response-format {'[' * 2000}", "must be a JSON object."),
    ],
    ids=lambda value: value[:60],
)
def test_invalid_command_line_is_reported_in_one_line(args: str, sentence: str, fail: Fail) -> None:
    line = fail(*args.split())
    assert sentence in line
    assert line.endswith(" See --help.\n")


def test_errors_name_flags_instead_of_fields() -> None:
    for message, words in (
        ("num_speculative_tokens=99 must be", "--num-speculative-tokens 99 must be"),
        ("method='x' needs SpecConfig(draft_model='y').", "--spec 'x' needs --draft-model 'y'."),
        ("lower max_num_seqs or block_size", "lower --max-num-seqs or --block-size"),
        ("a method to stop; n is my_seed=3, --seed=4", "a method to stop; n is my_seed=3, --seed=4"),
        ("/top_k/x top_k.json top_k/ top_k-3: top_k.", "/top_k/x top_k.json top_k/ top_k-3: --top-k."),
    ):
        assert options.in_flags(message) == words


def test_modules_do_not_import_torch() -> None:
    code = "import sys, nanospec, nanospec.apps.cli.main, nanospec.apps.batch.run, nanospec.apps.cli.fetch\n"
    code += "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
