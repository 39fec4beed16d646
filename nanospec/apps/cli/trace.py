"""`--trace FILE`: what has run becomes a page when the command ends, also where it was interrupted."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ...extras.tracing.trace import Trace, check_target
from ...llm import LLM
from ...outputs import Completion, RequestOutput


class TraceFile:
    """A context in which models run. Without a path it does nothing.

    Raises ValueError, before anything is loaded, if the page cannot be written to `path`.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._llm: LLM | None = None
        self._names: list[str] = []
        self._outputs: list[Completion] = []
        self._plain: list[Completion] = []
        if path is not None:
            check_target(path)

    @property
    def options(self) -> dict[str, Any]:
        """Further ones of `LLM`."""
        return {} if self.path is None else {"trace": True}

    def watch(self, llm: LLM) -> LLM:
        """Show all that this model does."""
        self._llm = llm if self.path is not None else None
        return llm

    def add(self, name: str, output: RequestOutput, plain: RequestOutput) -> None:
        """Show this output, and how fast it was without guesses, instead of all that ran."""
        if self.path is not None:
            self._names.append(name)
            self._outputs.append(output.outputs[0])
            self._plain.append(plain.outputs[0])

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if self._outputs:
            trace = Trace.of(self._outputs, self._names, self._plain)
        else:
            trace = self._llm.trace() if self._llm is not None else Trace()
        if trace.lanes:
            trace.save(self.path)
            begin = "" if error is None else "\n"  # the text may end anywhere
            print(f"{begin}Trace: {self.path}", file=sys.stderr)
        elif error is None:
            print(f"Nothing has run, so {self.path} is not written.", file=sys.stderr)
