"""What a person types into a chat, a message at a time.

On a terminal prompt_toolkit reads (the extra `[chat]`): history in a file, messages of several lines, wide
characters. Without it Python's readline does, and without that the terminal itself, whose lines end at 4,095
bytes. What is no terminal gives a message a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.hub import cache_folder
from .console import DIM, Console

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUED = "> ", ". "
CUT_AT = 4095  # bytes of a line that a terminal takes by itself; the rest is lost
PLAIN = "For history and messages of several lines: pip install prompt_toolkit"


def typed_messages(console: Console) -> Iterator[str]:
    """The messages, to the end of input, which two Ctrl-C in a row are too. Prompts go where the console
    writes."""
    ask = _reader(console)
    interrupted = False
    while True:
        try:
            text = ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            console.line("\nCtrl-C again or Ctrl-D ends the chat.", DIM)
            continue
        interrupted = False
        yield text


def _reader(console: Console) -> Callable[[], str]:
    """What asks for a message. It raises EOFError and KeyboardInterrupt."""
    if not (sys.stdin.isatty() and console.stream.isatty()):
        return lambda: _plain(console)
    try:
        return _with_prompt_toolkit(console)
    except ImportError:
        console.line(PLAIN, DIM)
    if console.stream is sys.stdout:
        with suppress(ImportError):
            import readline  # noqa: F401 (input() uses it from now on)

            return lambda: input(PROMPT)
    return lambda: _plain(console)


def _plain(console: Console) -> str:
    """A line. Raises EOFError at the end."""
    terminal = sys.stdin.isatty()
    while True:
        console.write(PROMPT)
        line = sys.stdin.readline()
        if not line:
            console.line()
            raise EOFError
        text = line.rstrip("\n")
        if not terminal or len(text.encode(errors="surrogateescape")) < CUT_AT:
            return text
        console.line(f"The terminal cut this line at {CUT_AT:,} bytes, so it was not sent. {PLAIN}")


def _with_prompt_toolkit(console: Console) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=lambda width, line, wrapped: "" if wrapped else CONTINUED,
        key_bindings=_keys(),
        history=_history(cache_folder() / "chat_history"),
        output=create_output(console.stream),
    )
    return session.prompt


def _keys() -> KeyBindings:
    """Enter sends a message; Alt-Enter, and Enter behind a backslash, begin a new line; Ctrl-C takes back
    what was typed, if anything was."""
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition, is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=Condition(lambda: bool(get_app().current_buffer.text)))
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return keys


def _history(path: Path) -> History:
    """Earlier messages: in a file that its owner alone may read; where none can be written, of this chat."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk is no reason to end the chat
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
        path.open("rb").close()
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))
