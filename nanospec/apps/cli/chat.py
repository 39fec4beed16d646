"""Interactive chat: reads messages, runs commands and streams answers, which Ctrl-C stops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ...config import SamplingParams
from ...llm import LLM
from ...outputs import RequestOutput
from ..options import in_flags
from ..tasks import with_system
from .console import DIM, Console

PROMPT, CONTINUED = "> ", ". "
WELCOME = """\
Enter sends a message; end a line with a backslash to continue on the next one. Ctrl-C stops an answer.
/undo removes the last message and its answer, /reset clears the conversation, Ctrl-D ends the chat."""


@dataclass
class Chat:
    """A conversation with a model. `on_answer` is called with each completed answer. Raises ValueError for a
    model without a chat template."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: str | None = None
    on_answer: Callable[[RequestOutput], None] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)  # user and assistant alternate

    def __post_init__(self) -> None:
        if not self.llm.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; use --prompt instead of --chat.")
        self.llm.engine.check_params(self.params)

    def run(self, messages: Iterable[str]) -> None:
        """Answer messages and run commands until the input ends."""
        self.console.line(WELCOME, DIM)
        for text in messages:
            if text.strip() == "/reset":
                self.messages = []
                self.console.line("Conversation cleared.", DIM)
            elif text.strip() == "/undo":
                last = self.messages[-2]["content"] if self.messages else ""
                self.messages = self.messages[:-2]
                self.console.line(f"Removed: {last}" if last else "Nothing to undo.", DIM)
            elif text.strip():
                self.answer(text.strip())

    def answer(self, text: str) -> None:
        """Answer a message and add both to the conversation. Ctrl-C stops the answer and keeps its text."""
        turn = [*self.messages, {"role": "user", "content": text}]
        outputs: list[RequestOutput] = []
        answer: list[str] = []
        try:
            prompt = self.llm.chat_prompt(with_system(turn, self.system))
            for pieces in self.llm.stream_pieces(prompt, self.params, outputs.append):
                self.console.pieces(pieces)
                answer += [piece.text for piece in pieces]
        except KeyboardInterrupt:
            self.console.line(" [stopped]", DIM)
        except ValueError as error:  # the conversation exceeds the context length
            self.console.line(f"{in_flags(str(error))} Use /undo to remove the last message, or /reset.")
            return
        else:
            self.console.line()
        self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]
        if outputs and self.on_answer is not None:
            self.on_answer(outputs[0])


def typed_messages(console: Console) -> Iterator[str]:
    """Yield messages until the input ends. A line that ends with a backslash continues on the next one, and
    Ctrl-C drops the message. Prompts are written to the console."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and a history)
    text = ""
    while True:
        try:
            prompt = CONTINUED if text else PROMPT
            if console.stream is not sys.stdout:  # `input` would write it there
                console.write(prompt)
                prompt = ""
            text += input(prompt)
        except EOFError:
            console.line()
            return
        except KeyboardInterrupt:
            text = ""
            console.line("\nPress Ctrl-D to end the chat.", DIM)
            continue
        if text.endswith("\\"):
            text = text[:-1] + "\n"
            continue
        yield text
        text = ""
