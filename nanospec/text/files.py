"""Read the files of models. Errors in their content are ValueErrors that begin with the path."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .validation import reason

MAX_FILE = 256 << 20  # maximum bytes of a file; those of large vocabularies have about 40 MB


@contextmanager
def errors_of(source: object) -> Iterator[None]:
    """Raise errors in the content of `source`, such as a path, as ValueError with its name. Types of values
    need no checks: an error of another type, JSONDecodeError included, means that the content is corrupt."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if type(error) is ValueError:
            raise ValueError(f"{source}: {reason(error, 1000)}.") from None
        problem = f"{source} has invalid content ({type(error).__name__}: {reason(error)})"
        raise ValueError(f"{problem}; it may be corrupt, download it again.") from error


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises ValueError if it is too large or not UTF-8."""
    check_size(path)
    with errors_of(path):
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    text = read_text(path)
    with errors_of(path):
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"the content must be a JSON object, not a {type(content).__name__}")
        return content


def check_size(path: Path) -> None:
    """Raise ValueError if a file is larger than MAX_FILE."""
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE >> 20} MiB, the limit for files of its kind.")
