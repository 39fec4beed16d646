"""Interactive chat: conversation history, commands, and terminal input. A paste is one message and is never
truncated."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli.chat import Chat
from nanospec.apps.cli.console import Console
from nanospec.config import SamplingParams
from nanospec.outputs import Piece

Messages = list[dict[str, str]]
CODE = """\
import json, sys
from nanospec.apps.cli.console import Console
from nanospec.apps.cli.chat import typed_messages
for message in typed_messages(Console({})):
    print("GOT" + json.dumps(message) + "TOG", flush=True)
print("ENDED", flush=True)
"""
PASTE = "def f():\n    return '日本語'\n" + "x" * 6000


class Echo:
    """A model that answers with the number of messages in its prompt and records each prompt."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(has_chat_template=True)
        self.engine = SimpleNamespace(check=lambda ids, params: None)
        self.shown: list[Messages] = []

    def chat_prompt(self, messages: Messages) -> Messages:
        if "long" in messages[-1]["content"]:
            raise ValueError("too long; raise max_model_len.")
        return messages

    def stream_pieces(
        self, prompt: Messages, params: SamplingParams, on_finish: Callable[[Any], None]
    ) -> Iterator[list[Piece]]:
        self.shown.append(prompt)
        yield [Piece(f"{len(prompt)}", -1)]
        if "stop" in prompt[-1]["content"]:
            raise KeyboardInterrupt
        yield [Piece(" seen", -1)]
        on_finish(prompt)


def run_chat(*messages: str, system: str | None = None) -> tuple[list[list[str]], str, int]:
    """Return the prompts the model received, the printed text and the number of complete answers."""
    llm: Any = Echo()
    stream = io.StringIO()
    whole: list[Any] = []
    Chat(llm, SamplingParams(), Console(stream), system, whole.append).run(messages)
    return [[message["content"] for message in each] for each in llm.shown], stream.getvalue(), len(whole)


def test_conversation_is_kept_reset_and_undone() -> None:
    shown, printed, _ = run_chat("a", "b", "/undo", "c", "/reset", "/undo", "d", " ")
    assert shown == [["a"], ["a", "1 seen", "b"], ["a", "1 seen", "c"], ["d"]]
    assert "Removed: b\n" in printed
    assert "Nothing to undo." in printed


def test_system_message_persists() -> None:
    shown, printed, _ = run_chat("a", "/system Be\nbrief.", "/system", "b", "/reset", "c", system="Be long.")
    assert [each[0] for each in shown] == ["Be long.", "Be\nbrief.", "Be\nbrief."]
    assert printed.count("System message: Be\nbrief.") == 2
    assert "No system message is set" in run_chat("/system")[1]


def test_unanswered_messages_are_dropped() -> None:
    shown, printed, whole = run_chat("a", "too long", "please stop", "b")
    assert shown[-1] == ["a", "1 seen", "please stop", "3", "b"]
    assert "raise --max-model-len. Use /undo to remove the last message" in printed
    assert " [stopped]\n" in printed
    assert whole == 2


def test_commands_are_slash_and_whole_word() -> None:
    shown, printed, _ = run_chat("/help", "/rest", "/usr/bin/env is what?", " /help me", "/exit", "b")
    assert shown == [["/usr/bin/env is what?"], ["/usr/bin/env is what?", "1 seen", "/help me"]]
    assert "/system TEXT" in printed
    assert "Unknown command /rest; did you mean /reset?" in printed


def test_chat_requires_chat_template() -> None:
    llm: Any = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=False))
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(llm, SamplingParams(), Console(io.StringIO()))


# ---- in a terminal -----------------------------------------------------------------------------


class Terminal:
    """A process attached to a pseudo-terminal; with `stream`, its prompts go to that stream."""

    def __init__(self, stream: str = "") -> None:
        code = CODE.format(stream)
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm"}
        out = subprocess.PIPE if stream else slave
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=out, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.wait(">")  # the prompt

    def wait(self, pattern: str, seconds: float = 60) -> str:
        """Read until `pattern` appears and return everything read."""
        os.set_blocking(self.master, False)
        deadline, result = time.monotonic() + seconds, ""
        while not re.search(pattern, result, re.DOTALL):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {result!r}"
            try:
                result += os.read(self.master, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the process has ended
                break
        return result

    def type(self, text: str) -> None:
        os.set_blocking(self.master, True)
        for at in range(0, len(text), 500):  # a terminal's input buffer is small
            os.write(self.master, text[at : at + 500].encode())
            time.sleep(0.02)

    def message(self, text: str) -> str:
        """Type `text` and return the message the process receives."""
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


def test_readline_lines_pastes_and_history(terminals: list[Terminal]) -> None:
    readline = pytest.importorskip("readline")
    terminals.append(terminal := Terminal())
    text = "x" * 6000 if "libedit" in readline.__doc__ else PASTE
    assert terminal.message(pasted(text) if text == PASTE else text + "\r") == text
    assert terminal.message("日本語\\\rtwo\r") == "日本語\ntwo"
    assert terminal.message("\x1b[A\r") == "two"
    terminal.type("half\\\r")
    terminal.wait(r"\. ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait("Ctrl-C again.*>")
    assert terminal.message("whole\r") == "whole"
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait("Ctrl-C again.*>")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait("ENDED")


def test_json_mode_prompts_on_stderr(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("sys.stderr"))
    terminals[0].type("a\r")
    out = terminals[0].process.stdout
    assert out is not None
    assert out.readline() == b'GOT"a"TOG\n'
