"""Import this before triton to run kernels in Triton's interpreter where there is no GPU.

Patches the interpreter: patches modules once, accepts scalar masks, runs programs in random order, and
detects out-of-bounds accesses."""

import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# isort: split
import triton.language as tl
from triton.runtime import interpreter


def patch_modules_once() -> None:
    """Patch triton.language once, instead of at each call of a kernel or function."""
    replace, never = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)
    replaced: set[int] = set()

    @cache
    def patch_lang(function: Any) -> Any:
        modules = {id(place) for place in function.__globals__.values() if place is tl or place is tl.core}
        if not modules <= replaced:
            replace(function)
        replaced.update(modules)
        return never

    interpreter._patch_lang = patch_lang


def keep_boolean_conditions() -> None:
    """Keep comparisons of scalars boolean. The interpreter types them as integers, and since triton 3.9
    loads and stores reject integer masks (compiled kernels are unaffected)."""
    spread: Callable[..., Any] = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        known = interpreter.TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value
        return spread(self, shape, known)

    interpreter.InterpreterBuilder.create_splat = create_splat


running_test = ""  # the order of programs depends only on this and the grid, and is therefore reproducible


def order_programs_by(name: str) -> None:
    """Seed the order of programs by `name`."""
    global running_test
    running_test = name


def arrange(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all programs in random, descending or ascending order."""
    chance, chosen = random.Random(f"{running_test} {grid}"), list(product(*map(range, grid)))
    order = chance.choice(("random", "random", "descending", "ascending"))
    if order == "random":
        chance.shuffle(chosen)
    return chosen[::-1] if order == "descending" else chosen


def shuffle_programs() -> None:
    """Run programs in any order. Ascending order hides races, as in reductions by the last program."""
    size: Callable[..., None] = interpreter.InterpreterBuilder.set_grid_dim
    place: Callable[..., None] = interpreter.InterpreterBuilder.set_grid_idx
    rest: Iterator[tuple[int, ...]] = iter(())

    def set_grid_dim(self: Any, *grid: int) -> None:
        nonlocal rest
        rest = iter(arrange(grid))
        size(self, *grid)

    def set_grid_idx(self: Any, *index: int) -> None:
        place(self, *next(rest))

    interpreter.InterpreterBuilder.set_grid_dim = set_grid_dim
    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx


ranges: list[tuple[int, int]] = []  # of addresses of the current launch's tensors, ascending


def check(pointers: Any, mask: Any, size: int) -> None:
    """Raise IndexError if an unmasked element of `size` bytes lies outside all tensors."""
    if _in_a_tensor(int(pointers.min()), int(pointers.max()) + size):
        return
    for place in np.unique(pointers[mask.astype(bool)]).tolist():
        if not _in_a_tensor(place, place + size):
            raise IndexError(f"{size} bytes are read or written at {place:#x}, outside of all tensors.")


def _in_a_tensor(first: int, end: int) -> bool:
    at = bisect_right(ranges, first, key=lambda known: known[0]) - 1
    return at >= 0 and end <= ranges[at][1]


def _ranges(args: Any) -> Iterator[tuple[int, int]]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.numel():
                first, steps = arg.data_ptr(), zip(arg.shape, arg.stride(), strict=True)
                yield first, first + (1 + sum((n - 1) * step for n, step in steps)) * arg.element_size()
        elif isinstance(arg, tuple):
            yield from _ranges(arg)


def check_bounds() -> None:
    """Raise on accesses outside the launch's tensors, which the interpreter would perform. Accesses to
    another tensor of the same launch are not detected."""
    place: Callable[..., Any] = interpreter.GridExecutor._init_args_hst
    raw = interpreter._interpreter
    load, store, change = raw.load, raw.store, raw.atomic_rmw

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        result = place(self, args, kwargs)
        ranges[:] = sorted(set(_ranges((*result[0], *result[1].values()))))
        return result

    def checked_load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        check(pointers, mask, other.itemsize)
        return load(pointers, mask, other, *rest)

    def checked_store(pointers: Any, value: Any, mask: Any) -> Any:
        check(pointers, mask, value.itemsize)
        return store(pointers, value, mask)

    def checked_change(how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, value.itemsize)
        return change(how, pointers, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = init_args
    raw.load, raw.store, raw.atomic_rmw = checked_load, checked_store, checked_change


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_modules_once()
    keep_boolean_conditions()
    shuffle_programs()
    check_bounds()
