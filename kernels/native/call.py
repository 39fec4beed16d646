"""How the functions of this folder's C++ are called: with one structure of words of 8 bytes, each the address
of a tensor or a number. `step.h` has the structures that tables, batches and proposals are.

All tensors must be contiguous, as tables, batches and proposals are, but for `Rows` of structs.h.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from ..batch import Batch
from .build import library

Word = Tensor | int | None


def call(name: str, *values: Word) -> array[int]:
    """Call a function of the library. Return the words, some of which it may have changed."""
    found = words(*values)
    _function(name)(found.buffer_info()[0])
    return found


def words(*values: Word) -> array[int]:
    return array("q", [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values])


@cache
def _function(name: str) -> Callable[[int], Any]:
    found = library()
    assert found is not None  # `use_native` has said so
    function = getattr(found, name)
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def batch_words(b: Batch) -> tuple[Word, ...]:
    """Return `Batch` of step.h. (A table is its own words.)"""
    tensors = b.rows, b.input_ids, b.positions, b.slots, b.block_table, b.q_start, b.q_len, b.base_len
    sizes = b.num_rows, b.num_tokens, b.max_q_len, b.block_table.shape[1]
    return *tensors, b.ancestors, b.parents, *sizes
