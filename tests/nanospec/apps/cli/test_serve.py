"""The server's command line, up to the point where a model is loaded."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanospec.apps.cli import serve as command
from nanospec.apps.cli.main import main
from nanospec.apps.serve.server import listen
from nanospec.apps.serve.settings import ServeConfig


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
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of models that would have been loaded."""
    result: list[dict[str, Any]] = []

    def load(self: object, folder: Path, **options: Any) -> None:
        result.append(options)
        raise ValueError("max_num_seqs=1 and write_timeout=2 are enough")

    monkeypatch.setattr("nanospec.llm.LLM.__init__", load)
    return result


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "99999"], "--port 99999 must be an integer from 0 to 65535."),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen on no.such.host.invalid:0: "),
        (["--api-key", "short"], "--api-key must be at least 8 ASCII characters without spaces."),
        (["--max-queue", "-1"], "--max-queue -1 must be"),
        (["nobody/nothing-here"], "nothing-here"),
        (["--replicas", "0"], "--replicas '0' must be at least 1, or MIN:MAX such as 1:4."),
        (["--replicas", "3:2"], "--replicas '3:2' must be at least 1"),
        (["--replicas", "x:2"], "--replicas 'x:2' must be at least 1"),
        (["--replicas", "2", "--write-timeout", "5"], "--write-timeout is not supported with --replicas, as"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_reported_before_loading(
    folder: Path, options: list[str], sentence: str, loaded: list[Any], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        status = main(["serve", "--model", str(folder), *options])
    except SystemExit as error:
        status = int(str(error.code))
    assert (status, loaded) == (2, [])
    errors = capsys.readouterr().err
    assert sentence in errors
    assert len(errors.splitlines()) == 1


def test_port_is_taken_before_loading(folder: Path, loaded: list[dict[str, Any]], capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
        message = f"cannot listen on 127.0.0.1:{port}: Address already in use; change --host or --port."
        assert message in capsys.readouterr().err
    assert loaded == []
    options = ["--block-size", "32", "--spec", "none", "--log-level", "warning"]
    assert main(["serve", str(folder), "--port", "0", *options]) == 2
    assert "--max-num-seqs 1 and --write-timeout 2 are enough" in capsys.readouterr().err
    assert loaded[0].pop("spec").method == "none"
    assert loaded == [{"max_num_batched_tokens": 512, "block_size": 32}]
    assert logging.getLogger("nanospec.apps.serve").level == logging.WARNING


def test_replicas_need_ray(folder: Path, loaded: list[Any], capsys: Any, monkeypatch: Any) -> None:
    def missing(module: str) -> None:
        raise ValueError(f"needs {module}")

    monkeypatch.setattr("nanospec.apps.cluster.start.need_ray", missing)
    assert main(["serve", str(folder), "--replicas", "2"]) == 2
    assert capsys.readouterr().err.endswith(": needs ray.serve\n")
    assert loaded == []


def test_missing_dependency_is_named(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ModuleNotFoundError(name="starlette")

    monkeypatch.setattr(command, "_serve", fail)
    assert main(["serve", "--model", str(folder)]) == 2
    assert "serve requires starlette: pip install 'nanospec[serve]'" in capsys.readouterr().err


def test_api_keys_model_name_and_replicas(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given: list[tuple[Any, ServeConfig]] = []

    def serve(args: Any, config: ServeConfig, folder: Path) -> int:
        given.append((args, config))
        return 0

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setenv("NANOSPEC_API_KEY", "from-there-1,from-there-2")
    assert main(["serve", "--model", str(folder), "--api-key", "from-here-3"]) == 0
    assert given[0][1].api_key == ("from-here-3", "from-there-1", "from-there-2")
    monkeypatch.setattr(command, "resolve_model", lambda name: Path("snapshots/0123abcd"))  # of the hub
    assert main(["serve", "org/name", "--replicas", "2"]) == 0
    assert main(["serve", "org/name", "--served-model-name", "mine", "--replicas", "1:4"]) == 0
    assert [config.served_model_name for _, config in given] == [folder.name, "name", "mine"]
    assert [args.replicas for args, _ in given] == [None, (2, 2), (1, 4)]


def test_listen_on_ipv4_and_ipv6() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        try:
            with listen(ServeConfig(host=host, port=0)) as listener:
                assert listener.getsockname()[1] > 0
        except OSError:
            assert host == "::1"  # where there is no IPv6
