"""Reading the texts of a model folder: whole and right, or refused with one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST = 256 << 20  # bytes; large vocabularies take some 40 MB


def reason(error: BaseException, most: int = 200) -> str:
    """What another library's exception says, for a message; see `brief`."""
    try:
        text = brief(str(error), most)
    except Exception:  # somebody's own class
        text = ""
    return text or type(error).__name__


def brief(text: str, most: int = 200) -> str:
    """A text of another library as part of a sentence: on one line, at most so many characters, and no more
    than 100 of a word, which may be quoted."""
    words = text[: 4 * most].rstrip(".: \n").split()
    text = " ".join(word if len(word) <= 100 else word[:97] + "..." for word in words)
    return text if len(text) <= most else text[: most - 3] + "..."


def read_text(path: Path) -> str:
    """The text of a file; ValueError if it is none in UTF-8."""
    try:
        return _content(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, at byte {error.start}; fetch it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a ValueError."""
    stored = _content(path)
    try:
        content = json.loads(text := stored.decode())
        if "\\ud" in text.lower():  # half of a pair cannot be written anywhere
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path} holds half of a surrogate pair, no text; fetch it again.") from None
    except (ValueError, RecursionError) as error:  # malformed, or nested without end
        raise ValueError(f"{path} is not valid JSON ({reason(error)}); fetch it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def check_size(path: Path) -> None:
    """ValueError if a file is too large to be read at once."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST >> 20} MB, too much for a file of its kind.")


def _content(path: Path) -> bytes:
    check_size(path)
    return path.read_bytes()
