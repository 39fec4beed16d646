"""Interactive chat: conversation history, commands and terminal input."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli.chat import Chat, typed_messages
from nanospec.apps.cli.console import Console
from nanospec.config import SamplingParams
from nanospec.outputs import Piece

Messages = list[dict[str, str]]
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


def echo_messages() -> None:
    """Print each typed message between GOT and TOG, then exit."""
    with open(0) as sys.stdin, open(1, "w") as sys.stdout:
        for message in typed_messages(Console()):
            print(f"GOT{json.dumps(message)}TOG", flush=True)
        print("ENDED", flush=True)


class Terminal:
    """A forked process that runs `echo_messages` in a pseudo-terminal."""

    def __init__(self) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            try:
                echo_messages()
            finally:
                os._exit(0)
        self.wait(">")  # the prompt

    def wait(self, pattern: str) -> str:
        """Read until `pattern` appears and return everything read."""
        result = b""
        while not re.search(pattern, result.decode(errors="replace"), re.DOTALL):
            assert select.select([self.terminal], [], [], 60)[0], f"{pattern!r} is not in {result!r}"
            result += os.read(self.terminal, 1 << 16)
        return result.decode(errors="replace")

    def type(self, text: str) -> None:
        for at in range(0, len(text), 500):  # a terminal's input buffer is small
            os.write(self.terminal, text[at : at + 500].encode())
            time.sleep(0.02)

    def message(self, text: str) -> str:
        """Type `text` and return the message the process receives."""
        self.type(text)
        seen = self.wait("GOT.*TOG.*>")  # and the next prompt
        return str(json.loads(seen[seen.rindex("GOT") + 3 : seen.rindex("TOG")]))

    def interrupt(self, pattern: str) -> None:
        """Send Ctrl-C once the process waits for input; readline does not notice an earlier one."""
        state = Path(f"/proc/{self.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGINT)
        self.wait(pattern)


def test_lines_pastes_and_history_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paste is one message and is never truncated."""
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    try:
        if "libedit" in readline.__doc__:
            assert terminal.message("x" * 6000 + "\r") == "x" * 6000
        else:
            assert terminal.message(f"\x1b[200~{PASTE}\x1b[201~\r".replace("\n", "\r")) == PASTE
        assert terminal.message("日本語\\\rtwo\r") == "日本語\ntwo"
        assert terminal.message("\x1b[A\r") == "two"
        terminal.type("half\\\r")
        terminal.wait(r"\. ")
        terminal.interrupt("Ctrl-C again.*>")
        assert terminal.message("whole\r") == "whole"
        terminal.interrupt("Ctrl-C again.*>")
        terminal.interrupt("ENDED")
    finally:
        os.kill(terminal.pid, signal.SIGKILL)
        os.waitpid(terminal.pid, 0)
        os.close(terminal.terminal)
