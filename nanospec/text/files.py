"""Read the text files of a model folder; errors are one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST = 256 << 20  # bytes; large vocabularies take some 40 MB


def reason(error: BaseException, most: int = 200) -> str:
    """Return the text of another library's exception for a message; see `brief`."""
    try:
        text = brief(str(error), most)
    except Exception:  # of a class with a broken __str__
        text = ""
    return text or type(error).__name__


def brief(text: str, most: int = 200) -> str:
    """Return a text on one line, cut to `most` characters and to 100 of each word."""
    words = text[: 4 * most].rstrip(".: \n").split()
    text = " ".join(word if len(word) <= 100 else word[:97] + "..." for word in words)
    return text if len(text) <= most else text[: most - 3] + "..."


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError if it is too large or not UTF-8."""
    check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, at byte {error.start}; fetch it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # malformed, or nested without end
        raise ValueError(f"{path} is not valid JSON ({reason(error)}); fetch it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def check_size(path: Path) -> None:
    """Raise ValueError if a file is too large to be read at once."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST >> 20} MB, too much for a file of its kind.")
