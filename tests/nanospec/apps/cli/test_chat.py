"""Interactive chat: conversation history, commands, terminal input and colors."""

import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec.apps.cli.chat import Chat, typed_messages
from nanospec.apps.cli.console import Console
from nanospec.config import SamplingParams
from nanospec.outputs import Piece

Messages = list[dict[str, str]]


class Echo:
    """A model that answers with the number of messages in its prompt and records each prompt."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(has_chat_template=True)
        self.engine = SimpleNamespace(check_params=lambda params: None)
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


def test_conversation_and_system_message_are_kept_reset_and_undone() -> None:
    shown, printed, _ = run_chat("a", "b", "/undo", "c", "/reset", "/undo", "d", " ")
    assert shown == [["a"], ["a", "1 seen", "b"], ["a", "1 seen", "c"], ["d"]]
    assert "Removed: b\n" in printed
    assert "Nothing to undo." in printed
    shown, _, _ = run_chat("a", "/reset", "/usr/bin/env is what?", system="Be brief.")
    assert shown == [["Be brief.", "a"], ["Be brief.", "/usr/bin/env is what?"]]


def test_unanswered_messages_are_dropped() -> None:
    shown, printed, whole = run_chat("a", "too long", "please stop", "b")
    assert shown[-1] == ["a", "1 seen", "please stop", "3", "b"]
    assert "raise --max-model-len. Use /undo to remove the last message" in printed
    assert " [stopped]\n" in printed
    assert whole == 2


def test_chat_requires_chat_template() -> None:
    llm: Any = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=False))
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(llm, SamplingParams(), Console(io.StringIO()))


def test_typed_lines_become_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backslash continues a line, Ctrl-C drops the message, Ctrl-D ends the chat."""
    typed = Mock(side_effect=["half\\", KeyboardInterrupt, "日本語\\", "two", "", EOFError])
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    stream = io.StringIO()
    assert list(typed_messages(Console(stream))) == ["日本語\ntwo", ""]
    assert stream.getvalue() == "> . \nPress Ctrl-D to end the chat.\n> . > > \n"
    if importlib.util.find_spec("readline"):
        assert "readline" in sys.modules


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["drafts", "terminal", "no-color", "file"])
def test_colors_appear_in_terminals_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "no-color":
        monkeypatch.setenv("NO_COLOR", "")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO() if kind == "file" else Terminal()
    console = Console(stream, show_drafts=kind != "terminal")
    console.line("a", "<")
    console.pieces([Piece("b", -1), Piece("", 3), Piece("c", 0), Piece("d", -2)])
    console.table(["", "xx"], [("one", "1")])
    expected = {
        "drafts": "<a\x1b[0m\nb\x1b[32mc\x1b[0m\x1b[32md\x1b[0m\x1b[1m     xx\x1b[0m\none   1\n",
        "terminal": "<a\x1b[0m\nbcd\x1b[1m     xx\x1b[0m\none   1\n",
    }
    assert stream.getvalue() == expected.get(kind, "a\nbcd     xx\none   1\n")
