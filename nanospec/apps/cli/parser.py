"""An argument parser whose errors are one sentence, with a suggestion for misspelt names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ...text.checks import shown

WORDS = (  # argparse's messages -> ours
    (r"^argument ([^:]+): expected (?:one|at least one) argument$", r"\1 needs a value"),
    (r"^argument ([^:]+): ignored explicit argument (.*)$", r"\1 takes no value, but was given \2"),
    (r"^argument ([^:]+): ", r"\1 "),
    (r"^the following arguments are required: ", "missing: "),
)


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations; an error is one sentence and exit status 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                self.error(f"{shown(unknown[0])} belongs to no option; a text with blanks needs quotes")
            self.error(f"there is no option {name}{did_you_mean(name, self._option_string_actions)}")
        return found

    def error(self, message: str) -> NoReturn:
        for pattern, words in WORDS:
            message = re.sub(pattern, words, message)
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See --help.\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return what to add to "there is no ...": the name that begins like it, or else the closest, if any."""
    names = [name for name in known if name != word]
    longer = sorted((name for name in names if word.strip("-") and name.startswith(word)), key=len)
    close = longer or (get_close_matches(word, names) if word.strip("-") else [])
    return f"; did you mean {close[0]}?" if close else ""
