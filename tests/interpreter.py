"""Triton's interpreter in about half the time, with masks of one scalar condition, and with programs that run
in any order, as they do on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def find_builtins_once() -> None:
    """At each call of a kernel or function the interpreter looks through all of triton.language for what it
    has to replace. Here it is found once, before anything is replaced; what still is replaced, stays."""
    replace: Callable[..., None] = interpreter._patch_attr
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    found = {place: _builtins(place) for place in places}

    def patch_builtin(place: Any, *rest: Any) -> None:
        for name, member in found[place].items():
            if getattr(place, name) is member:
                replace(place, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


def replace_once() -> None:
    """Each call of a function in a kernel replaces the same again that the kernel's launch has replaced."""
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


def remember_types() -> None:
    """What follows from a type alone is worked out anew for each value. Here it is kept: a block's type for
    its elements and shape, a value's shape and size, numpy's dtypes, and that two shapes are equal."""
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


def keep_conditions() -> None:
    """The interpreter notes a comparison of integers as an integer. Spread over a block it then is one, which
    loads and stores refuse as a mask since triton 3.9 (compiled kernels know that it is a condition)."""
    spread: Callable[..., Any] = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        known = interpreter.TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value
        return spread(self, shape, known)

    interpreter.InterpreterBuilder.create_splat = create_splat


class Programs:
    """In which order the programs of a launch run. It follows from the test that runs and the launch's grid,
    so that a test, and an example of Hypothesis, sees the same order again."""

    def __init__(self) -> None:
        self.test = ""

    def arrange(self, grid: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All of them: shuffled, backward or, as the interpreter does it, forward."""
        chance, chosen = random.Random(f"{self.test} {grid}"), list(product(*map(range, grid)))
        order = chance.choice(("shuffled", "shuffled", "backward", "forward"))
        if order == "shuffled":
            chance.shuffle(chosen)
        return chosen[::-1] if order == "backward" else chosen


programs = Programs()


def run_programs_in_any_order() -> None:
    """The interpreter runs program 0 first and the last one last, so that a kernel whose last program to
    finish does more than the others, or which reads what an earlier program wrote, would look right."""
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


def _builtins(place: Any) -> dict[str, Any]:
    return {name: getattr(place, name) for name in dir(place) if tl.core.is_builtin(getattr(place, name))}
