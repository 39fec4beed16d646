"""Patches of Triton's interpreter: about twice as fast, scalar conditions as masks, programs in any order, as
on a GPU, and an error for accesses outside the tensors of a launch."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def find_builtins_once() -> None:
    """Find the builtins to patch once, instead of searching triton.language at each call of a kernel or
    function. Builtins that are already replaced stay so."""
    replace: Callable[..., None] = interpreter._patch_attr
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    result = {place: _builtins(place) for place in places}

    def patch_builtin(place: Any, *rest: Any) -> None:
        for name, member in result[place].items():
            if getattr(place, name) is member:
                replace(place, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


def patch_modules_once() -> None:
    """Patch modules once per launch, instead of at each call of a function in a kernel."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()

    @cache
    def places(function: Any) -> set[int]:
        return {id(place) for place in function.__globals__.values() if place is tl or place is tl.core}

    def patch_lang(function: Any) -> Any:
        if places(function) <= replaced:
            return None
        replaced.update(places(function))
        return replace(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def cache_types() -> None:
    """Cache what depends only on a type and is otherwise recomputed for each value: block types, shapes and
    sizes of values, numpy dtypes, and that two shapes are equal."""
    describe, make, find = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    spread: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([int(size) for size in shape])
        key = (element_ty.name, sizes)
        if key not in blocks:
            describe(self, element_ty, shape)
            blocks[key] = {**vars(self), "shape": shapes.setdefault(sizes, self.shape)}
        vars(self).update(blocks[key])

    def make_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in values:
            make(self, handle, type)
            values[type.name] = dict(vars(self))
        vars(self).update(values[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def find_once(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = find(type)
        return dtypes[type.name]

    def spread_if_needed(self: Any, left: Any, right: Any) -> Any:
        if isinstance(left.type, tl.block_type) and left.type.shape is getattr(right.type, "shape", None):
            return left, right
        return spread(self, left, right)

    tl.block_type.__init__, tl.tensor.__init__ = describe_once, make_once
    interpreter._get_np_dtype = find_once
    TritonSemantic.broadcast_impl_value = spread_if_needed


def keep_boolean_conditions() -> None:
    """Keep comparisons of scalars boolean. The interpreter types them as integers, and since triton 3.9
    loads and stores reject integer masks (compiled kernels are unaffected)."""
    spread: Callable[..., Any] = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        known = interpreter.TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value
        return spread(self, shape, known)

    interpreter.InterpreterBuilder.create_splat = create_splat


class Programs:
    """The order in which a launch's programs run. It depends only on the running test and the grid, so that
    tests and Hypothesis examples are reproducible."""

    def __init__(self) -> None:
        self.test = ""

    def arrange(self, grid: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return all programs shuffled, backward or forward, the interpreter's order."""
        chance, chosen = random.Random(f"{self.test} {grid}"), list(product(*map(range, grid)))
        order = chance.choice(("shuffled", "shuffled", "backward", "forward"))
        if order == "shuffled":
            chance.shuffle(chosen)
        return chosen[::-1] if order == "backward" else chosen


programs = Programs()


def shuffle_programs() -> None:
    """Run programs in any order. In ascending order, a kernel in which the last program finishes the work,
    or which reads what an earlier program wrote, would seem correct."""
    size: Callable[..., None] = interpreter.InterpreterBuilder.set_grid_dim
    place: Callable[..., None] = interpreter.InterpreterBuilder.set_grid_idx
    rest: Iterator[tuple[int, ...]] = iter(())

    def set_grid_dim(self: Any, *grid: int) -> None:
        nonlocal rest
        rest = iter(programs.arrange(grid))
        size(self, *grid)

    def set_grid_idx(self: Any, *index: int) -> None:
        place(self, *next(rest))

    interpreter.InterpreterBuilder.set_grid_dim = set_grid_dim
    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx


class Tensors:
    """The address ranges of the current launch's tensors."""

    def __init__(self) -> None:
        self.known = False
        self.begins: list[int] = []
        self.ends: list[int] = []

    def are(self, args: Any) -> None:
        ranges = sorted(set(_ranges(args)))
        self.begins, self.ends, self.known = [a for a, _ in ranges], [b for _, b in ranges], True

    def check(self, pointers: Any, mask: Any, size: int) -> None:
        """Raise IndexError if an unmasked element of `size` bytes lies outside all tensors."""
        if not self.known or self._holds(int(pointers.min()), int(pointers.max()) + size):
            return
        for place in np.unique(pointers[mask.astype(bool)]).tolist():
            if not self._holds(place, place + size):
                at = bisect_right(self.begins, place) - 1
                where = f"{place - self.ends[at]} bytes past the end of" if at >= 0 else "before"
                raise IndexError(f"{size} bytes are read or written {where} a tensor.")

    def _holds(self, first: int, end: int) -> bool:
        at = bisect_right(self.begins, first) - 1
        return at >= 0 and end <= self.ends[at]


tensors = Tensors()


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
    load, store, change, swap = raw.load, raw.store, raw.atomic_rmw, raw.atomic_cas

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        result = place(self, args, kwargs)
        tensors.are((*result[0], *result[1].values()))
        return result

    def checked_load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        tensors.check(pointers, mask, other.itemsize)
        return load(pointers, mask, other, dtype)

    def checked_store(pointers: Any, value: Any, mask: Any) -> Any:
        tensors.check(pointers, mask, value.itemsize)
        return store(pointers, value, mask)

    def checked_change(how: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        tensors.check(pointers, mask, value.itemsize)
        return change(how, pointers, value, mask, order)

    def checked_swap(pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        tensors.check(pointers, np.ones_like(pointers, dtype=bool), value.itemsize)
        return swap(pointers, expected, value, order)

    interpreter.GridExecutor._init_args_hst = init_args
    raw.load, raw.store, raw.atomic_rmw, raw.atomic_cas = (
        checked_load, checked_store, checked_change, checked_swap,
    )  # fmt: skip


def _builtins(place: Any) -> dict[str, Any]:
    return {name: getattr(place, name) for name in dir(place) if tl.core.is_builtin(getattr(place, name))}
