"""The server's command line, up to the point where a model is loaded."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanospec.apps.cli import serve as command
from nanospec.apps.cli.main import main
from nanospec.apps.serve.server import listen
from nanospec.apps.serve.settings import ServeConfig
from tests.nanospec.test_llm import folder

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def restore_loggers() -> Iterator[None]:
    """Restore the loggers the command configured, since their stream is closed after the test."""
    loggers = [logging.getLogger(name) for name in ("nanospec.apps.serve", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model is loaded: errors must be reported before that."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is being loaded")

    monkeypatch.setattr("nanospec.llm.LLM.__init__", load)


def test_port_in_use_and_unknown_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
        message = f"cannot listen on 127.0.0.1:{port}: Address already in use; change --host or --port."
        assert message in capsys.readouterr().err
    assert main(["serve", "--model", str(folder), "--host", "no.such.host.invalid", "--port", "0"]) == 2
    assert "cannot listen on no.such.host.invalid:0: " in capsys.readouterr().err


def test_replicas_reject_options_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--replicas", "2", "--write-timeout", "5"])
    assert "--write-timeout is not supported with --replicas, as Ray owns the connections." in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "99999"], "--port 99999 must be an integer from 0 to 65535."),
        (["--api-key", "short"], "--api-key must be at least 8 ASCII characters without spaces."),
        (["--max-queue", "-1"], "--max-queue -1 must be"),
        (["--model", "nobody/nothing-here"], "nothing-here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_invalid_settings_are_reported_in_one_line(
    folder: Path,
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", "--model", str(folder), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_missing_dependency_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanospec.apps.serve.app", None)
    missing = ModuleNotFoundError("No module named 'starlette'", name="starlette")

    def serve(*_: object) -> int:
        raise missing

    monkeypatch.setattr(command, "_serve", serve)
    assert main(["serve", "--model", str(folder)]) == 2
    assert "serve requires starlette: pip install 'nanospec[serve]'" in capsys.readouterr().err


def test_api_keys_and_model_name(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    result: list[ServeConfig] = []

    def serve(args: object, config: ServeConfig, folder: Path) -> int:
        result.append(config)
        return 0

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setenv("NANOSPEC_API_KEY", "from-there-1,from-there-2")
    assert main(["serve", "--model", str(folder), "--api-key", "from-here-3"]) == 0
    assert result[0].api_key == ("from-here-3", "from-there-1", "from-there-2")
    assert result[0].served_model_name == folder.name
    monkeypatch.setattr(command, "resolve_model", lambda name: Path("snapshots/0123abcd"))  # of the hub
    assert main(["serve", "org/name"]) == main(["serve", "org/name", "--served-model-name", "mine"]) == 0
    assert [config.served_model_name for config in result[1:]] == ["name", "mine"]


def test_listen_on_ipv4_and_ipv6() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        try:
            with listen(ServeConfig(host=host, port=0)) as listener:
                assert listener.getsockname()[1] > 0
        except OSError:
            assert host == "::1"  # where there is no IPv6
