"""Chat with a model: read messages, run commands, stream answers that Ctrl-C ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ...config import SamplingParams
from ...llm import LLM
from ...outputs import RequestOutput
from ..options import did_you_mean, in_flags
from ..tasks import with_system
from .console import DIM, Console

PROMPT, CONTINUED = "> ", ". "
COMMANDS = ("/help", "/reset", "/undo", "/system", "/exit")
WELCOME = "Type a message, then Enter; /help names the commands; Ctrl-D ends the chat."
HELP = """\
/help           this
/reset          forget the conversation
/undo           take back the last message and its answer
/system TEXT    what the model is told beforehand; without a text: show it
/exit           end the chat; so do Ctrl-D, and Ctrl-C twice
Enter sends; a backslash and Enter begin a new line. Ctrl-C ends an answer.
A message that begins with a slash needs a blank before it."""


@dataclass
class Chat:
    """A conversation with a model; `on_answer` is called with each whole answer. Raises ValueError for a
    model that cannot chat."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: str | None = None
    on_answer: Callable[[RequestOutput], None] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)  # questions and answers in turn

    def __post_init__(self) -> None:
        if not self.llm.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template, so it is no model to chat with; use --prompt.")
        self.llm.engine.check([0], self.params)

    def run(self, messages: Iterable[str]) -> None:
        """Answer messages and run commands until there are no more."""
        self.console.line(WELCOME, DIM)
        for text in messages:
            if command := re.match(r"/(\w+)(?:\s+(.*))?$", text, re.DOTALL):
                if command[1] in ("exit", "quit", "bye"):
                    return
                self.command(command[1], (command[2] or "").strip())
            elif text.strip():
                self.answer(text.strip())

    def command(self, name: str, text: str) -> None:
        """Run a command and print its effect."""
        if name == "help":
            reply = HELP
        elif name in ("reset", "clear"):
            self.messages, reply = [], "The conversation is forgotten."
        elif name == "undo":
            last = self.messages[-2]["content"] if self.messages else ""
            reply = f"Taken back: {last}" if last else "There is nothing to take back."
            self.messages = self.messages[:-2]
        elif name == "system":
            self.system = text or self.system
            reply = f"The system message is: {self.system}" if self.system else "There is no system message."
        else:
            hint = did_you_mean(f"/{name}", COMMANDS) or "; /help names those that there are."
            reply = f"There is no command /{name}{hint}"
        self.console.line(reply, DIM)

    def answer(self, text: str) -> None:
        """Answer a message and keep both. Ctrl-C ends the answer; its text so far is kept."""
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
        except ValueError as error:  # the conversation has outgrown the window
            self.console.line(f"{in_flags(str(error))} /undo takes the last message back, /reset all.")
            return
        else:
            self.console.line()
        self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]
        if outputs and self.on_answer is not None:
            self.on_answer(outputs[0])


def typed_messages(console: Console) -> Iterator[str]:
    """Yield messages until the end of input or two Ctrl-C in a row. Prompts go to the console. A line that
    ends with a backslash continues in the next one."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines and keeps a history with it)
    text, interrupted = "", False
    while True:
        try:
            prompt = CONTINUED if text else PROMPT
            if console.stream is not sys.stdout:  # where `input` writes
                console.write(prompt)
                prompt = ""
            text += input(prompt)
        except EOFError:
            console.line()
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            text, interrupted = "", True
            console.line("\nCtrl-C again or Ctrl-D ends the chat.", DIM)
            continue
        interrupted = False
        if text.endswith("\\"):
            text = text[:-1] + "\n"
            continue
        yield text
        text = ""
