"""Terminal output: streamed text with accepted drafts highlighted, and small tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from ...kernels import FROM_TARGET
from ...outputs import Piece

ACCEPTED = "\x1b[32m"  # green
DIM, BOLD, RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Console:
    """Writes to a stream, with escape codes only if it is a terminal and NO_COLOR is not set."""

    def __init__(self, stream: TextIO | None = None, show_drafts: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.color = self.stream.isatty() and "NO_COLOR" not in os.environ
        self.show_drafts = show_drafts and self.color

    def write(self, text: str, style: str = "") -> None:
        """Write text without a newline, and flush."""
        self.stream.write(f"{style}{text}{RESET}" if style and self.color else text)
        self.stream.flush()

    def line(self, text: str = "", style: str = "") -> None:
        self.write(text, style)
        self.write("\n")

    def pieces(self, pieces: Iterable[Piece]) -> None:
        """Write streamed tokens, highlighting accepted drafts if `show_drafts` is set."""
        for text, source in pieces:
            if text:
                self.write(text, ACCEPTED if self.show_drafts and source != FROM_TARGET else "")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table with the first column aligned left and the others aligned right."""
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        for n, row in enumerate((header, *rows)):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            self.line("  ".join(cells).rstrip(), BOLD if n == 0 else "")
