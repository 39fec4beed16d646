"""A chat: what is kept of a conversation, what commands do, and what ends what."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.apps.cli.chat import Chat
from nanospec.apps.cli.console import Console
from nanospec.config import SamplingParams
from nanospec.engine.request import Piece

Messages = list[dict[str, str]]


class Echo:
    """Answers with the number of messages it was shown, and remembers them; some messages do more."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(has_chat_template=True)
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


def talk(*messages: str, system: str | None = None) -> tuple[list[list[str]], str, int]:
    """What the model was shown, what was printed, and how many answers were whole."""
    llm: Any = Echo()
    stream = io.StringIO()
    whole: list[Any] = []
    Chat(llm, SamplingParams(), Console(stream), system, whole.append).run(messages)
    return [[message["content"] for message in each] for each in llm.shown], stream.getvalue(), len(whole)


def test_a_conversation_is_kept_and_reset_and_undone() -> None:
    shown, printed, _ = talk("a", "b", "/undo", "c", "/reset", "/undo", "d", " ")
    assert shown == [["a"], ["a", "1 seen", "b"], ["a", "1 seen", "c"], ["d"]]
    assert "Taken back: b\n" in printed
    assert "There is nothing to take back." in printed


def test_the_system_message_holds_from_then_on() -> None:
    shown, printed, _ = talk("a", "/system Be\nbrief.", "/system", "b", "/reset", "c", system="Be long.")
    assert [each[0] for each in shown] == ["Be long.", "Be\nbrief.", "Be\nbrief."]
    assert printed.count("The system message is: Be\nbrief.") == 2
    assert "There is no system message" in talk("/system")[1]


def test_what_is_not_answered_is_not_part_of_the_conversation() -> None:
    shown, printed, whole = talk("a", "too long", "please stop", "b")
    assert shown[-1] == ["a", "1 seen", "please stop", "3", "b"]
    assert "raise --max-model-len. /undo takes the last message back" in printed
    assert " [stopped]\n" in printed
    assert whole == 2


@pytest.mark.parametrize("end", ["/exit", "/quit", "/bye"])
def test_a_command_may_end_it(end: str) -> None:
    assert talk("a", end, "b")[0] == [["a"]]


def test_commands_are_whole_words_behind_a_slash() -> None:
    shown, printed, _ = talk("/help", "/rest", "/usr/bin/env is what?", " /help me")
    assert shown == [["/usr/bin/env is what?"], ["/usr/bin/env is what?", "1 seen", "/help me"]]
    assert "/system TEXT" in printed
    assert "There is no command /rest; did you mean /reset?" in printed


def test_a_model_without_a_template_does_not_chat() -> None:
    llm: Any = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=False))
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(llm, SamplingParams(), Console(io.StringIO()))
