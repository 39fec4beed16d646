"""Out of memory: how it is told from other failures, and the sentence that says what to lower."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..config import EngineConfig
from ..text.checks import shown


class OutOfMemory(MemoryError):
    """Memory ran out; the message says where, and what to lower."""


def ran_out(error: BaseException) -> bool:
    """Whether it says that there is no memory left: Python, the system, and PyTorch in two ways; or hides it,
    as what a CUDA graph says of its capture that was cut short."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text, hidden = str(error), error.__context__
    told = "can't allocate memory" in text or ("captur" in text and hidden is not None and ran_out(hidden))
    return isinstance(error, RuntimeError) and told


def in_a_step(config: EngineConfig) -> str:
    """What may have taken too much of it in a step, and would take less."""
    lower = ("max_num_batched_tokens", "max_num_seqs", "kv_cache_memory", "max_model_len")
    given = [f"{name}={value}" for name in lower if (value := getattr(config, name)) is not None]
    return f"lower {', '.join(given[:-1])} or {given[-1]}"


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Have whatever runs out of memory say what it was, and what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not ran_out(error):
            raise
        first = str(error).strip().split("\n")[0]
        raise OutOfMemory(f"Memory ran out for {what} ({shown(first)}); {remedy}.") from error
