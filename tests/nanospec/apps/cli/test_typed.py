"""What a person types, in a terminal: a paste is one message, nothing is cut, history is private."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

CODE = """\
import json, sys
{}
from nanospec.apps.cli.console import Console
from nanospec.apps.cli.typed import typed_messages
for message in typed_messages(Console({})):
    print("GOT" + json.dumps(message) + "TOG", flush=True)
print("ENDED", flush=True)
"""
WITHOUT = "sys.modules['prompt_toolkit'] = None"
PASTE = "def f():\n    return '日本語'\n" + "x" * 6000
with_toolkit = pytest.mark.skipif(not find_spec("prompt_toolkit"), reason="needs the extra [chat]")


class Terminal:
    """A process at a terminal. `json`: its prompts go to standard error."""

    def __init__(self, cache: Path | str, imports: str = "", stream: str = "") -> None:
        code = CODE.format(imports, stream)
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_CACHE_HOME": str(cache)}
        out = subprocess.PIPE if stream else slave
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=out, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.seen = self.wait(">")  # the prompt

    def wait(self, pattern: str, seconds: float = 60) -> str:
        """Read until `pattern` appears; what came until then."""
        os.set_blocking(self.master, False)
        deadline, found = time.monotonic() + seconds, ""
        while not re.search(pattern, found, re.DOTALL):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {found!r}"
            try:
                found += os.read(self.master, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the process has ended
                break
        return found

    def type(self, text: str) -> None:
        os.set_blocking(self.master, True)
        for at in range(0, len(text), 500):  # a terminal takes so much at once
            os.write(self.master, text[at : at + 500].encode())
            time.sleep(0.02)

    def message(self, text: str) -> str:
        """The message that is received when `text` is typed."""
        self.type(text)
        seen = self.wait("GOT.*TOG.*>")  # and the next prompt
        return str(json.loads(seen[seen.rindex("GOT") + 3 : seen.rindex("TOG")]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~\r".replace("\n", "\r")


@with_toolkit
def test_prompt_toolkit_takes_lines_pastes_and_history(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(tmp_path))
    first = terminals[0]
    assert first.message(pasted(PASTE)) == PASTE
    assert first.message("日本語\\\rtwo\x1b\rthree\r") == "日本語\ntwo\nthree"
    [file] = tmp_path.rglob("chat_history")
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.message("half\x03half\x03whole\r") == "whole"
    first.type("\x04")
    first.wait("ENDED")
    terminals.append(Terminal(tmp_path))
    assert terminals[1].message("\x1b[A\r") == "whole"
    terminals[1].type("\x03")
    terminals[1].wait("Ctrl-C again.*>")
    terminals[1].type("\x03")
    terminals[1].wait("ENDED")


@with_toolkit
def test_history_that_cannot_be_written_is_no_obstacle(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("/dev/null"))
    assert terminals[0].message("a\r") == "a"
    assert terminals[0].message("\x1b[A\r") == "a"


def test_readline_cuts_nothing_either(tmp_path: Path, terminals: list[Terminal]) -> None:
    readline = pytest.importorskip("readline")
    text = "x" * 6000 if "libedit" in readline.__doc__ else PASTE
    terminals.append(Terminal(tmp_path, WITHOUT))
    assert "pip install prompt_toolkit" in terminals[0].seen
    assert terminals[0].message(pasted(text) if text == PASTE else text + "\r") == text


def test_where_the_terminal_cuts_it_is_said(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(tmp_path, f"{WITHOUT}; sys.modules['readline'] = None"))
    terminals[0].type("x" * 5000 + "\r")
    terminals[0].wait("The terminal cut this line at 4,095 bytes, so it was not sent.*>")
    assert terminals[0].message("short\r") == "short"


def test_prompts_may_go_to_standard_error(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(tmp_path, "", "sys.stderr"))
    terminals[0].type("a\r")
    out = terminals[0].process.stdout
    assert out is not None
    assert out.readline() == b'GOT"a"TOG\n'
