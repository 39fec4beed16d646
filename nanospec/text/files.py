"""Read the files of models. Errors in their content are ValueErrors that begin with the path."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .validation import reason

MAX_FILE = 256 << 20  # maximum bytes of a file; those of large vocabularies have about 40 MB


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Raise errors in the content of a file as ValueError with its path. The types of values need no checks:
    an error that is not a ValueError means that the file is corrupt."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {reason(error, 1000)}.") from None
    except Exception as error:
        problem = f"{path} has invalid content ({type(error).__name__}: {reason(error)})"
        raise ValueError(f"{problem}; it may be corrupt, download it again.") from error


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises ValueError if it is too large or not UTF-8."""
    check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 at byte {error.start}; download it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # malformed, or nested too deeply
        raise ValueError(f"{path} is not valid JSON ({reason(error)}); download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, not a {type(content).__name__}.")
    return content


def check_size(path: Path) -> None:
    """Raise ValueError if a file is larger than MAX_FILE."""
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE >> 20} MiB, the limit for files of its kind.")
