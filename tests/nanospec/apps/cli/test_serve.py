"""The server's command line, up to the point where a model is loaded."""

import importlib
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec.apps.cli import serve as command
from nanospec.apps.cli.main import main
from tests.nanospec.apps.cli.conftest import Fail


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of models that would have been loaded."""
    result: list[dict[str, Any]] = []

    def load(self: object, folder: Path, **options: Any) -> None:
        result.append(options)
        raise ValueError("max_num_seqs=1 and write_timeout=2 are enough")

    monkeypatch.setattr("nanospec.llm.LLM.__init__", load)
    monkeypatch.setattr("nanospec.apps.serve.logs.log_to_stderr", lambda level: print(f"{level=}"))
    return result


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "99999"], "--port 99999 must be an integer from 0 to 65535."),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen on no.such.host.invalid:0: "),
        (["--api-key", "short"], "--api-key must be at least 8 ASCII characters without spaces."),
        (["--max-queue", "-1"], "--max-queue -1 must be"),
        (["--replicas", "0"], "--replicas '0' must be at least 1, or MIN:MAX such as 1:4."),
        (["--replicas", "x"], "--replicas 'x' must be at least 1, or MIN:MAX such as 1:4."),
        (["--request-timeout", "10000001"], "--request-timeout 10000001.0 must be a number from 0.1 to 1000"),
        (["--replicas", "2", "--write-timeout", "5"], "--write-timeout is not supported with --replicas, as"),
        (["--replicas", "2", "--max-connections", "5"], "--max-connections is not supported with --replicas"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_reported_before_loading(
    folder: Path, options: list[str], sentence: str, loaded: list[Any], fail: Fail, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sentence in fail("serve", "--model", folder, *options)
    assert loaded == []


def test_port_is_taken_before_loading(folder: Path, loaded: list[Any], fail: Fail, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = f"cannot listen on 127.0.0.1:{port}: Address already in use; change --host or --port."
        assert message in fail("serve", folder, "--port", port)
    assert loaded == []
    options = ["--block-size", "32", "--spec", "none", "--log-level", "warning"]
    assert main(["serve", str(folder), "--port", "0", *options]) == 2
    text, errors = capsys.readouterr()
    assert "--max-num-seqs 1 and --write-timeout 2 are enough" in errors
    assert text.endswith("level='warning'\n")
    assert loaded[0].pop("spec").method == "none"
    assert loaded == [{"max_num_batched_tokens": 512, "block_size": 32}]


def test_missing_dependency_is_named(folder: Path, loaded: list[Any], fail: Fail, monkeypatch: Any) -> None:
    monkeypatch.setattr("nanospec.apps.cluster.start.need_ray", Mock(side_effect=ValueError("needs Ray.")))
    assert fail("serve", folder, "--replicas", "2").endswith(": needs Ray.\n")
    assert loaded == []
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr(command, "_serve", lambda *_: importlib.import_module("starlette"))
    assert "serve requires starlette: pip install 'nanospec[serve]'" in fail("serve", "--model", folder)


def test_api_keys_model_name_and_replicas(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    serve = Mock(return_value=0)
    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setenv("NANOSPEC_API_KEY", "from-there-1,from-there-2")
    assert main(["serve", "--model", str(folder), "--api-key", "from-here-3"]) == 0
    assert serve.call_args.args[1].api_key == ("from-here-3", "from-there-1", "from-there-2")
    monkeypatch.setattr(command, "resolve_model", lambda name: Path("snapshots/0123abcd"))  # of the hub
    assert main(["serve", "org/name.gguf", "--replicas", "2"]) == 0
    assert main(["serve", "org/name", "--served-model-name", "mine", "--replicas", "1:4"]) == 0
    given = [(config.served_model_name, args.replicas) for (args, config, _), _ in serve.call_args_list]
    assert given == [(folder.name, None), ("name", (2, 2)), ("mine", (1, 4))]
