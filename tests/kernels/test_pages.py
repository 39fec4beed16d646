"""Tensors on pages of the system's."""

from __future__ import annotations

from threading import Thread

import torch
from torch import Tensor

from nanospec.kernels.native.pages import LINE, PIECE, Arena


def test_tensors_of_an_arena_are_zeros_of_their_own() -> None:
    arena = Arena()
    found: list[tuple[Tensor, Tensor]] = []

    def fill(mark: int) -> None:
        for i in range(100):
            shape = (i % 7 + 1, i * mark % 50 + 1)
            tensor = arena.zeros(shape, torch.bfloat16)
            assert (tensor.shape, bool(tensor.any()), tensor.data_ptr() % LINE) == (shape, False, 0)
            found.append((tensor.fill_(len(found) % 97 + mark), tensor.clone()))

    threads = [Thread(target=fill, args=(mark,)) for mark in (1, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(torch.equal(tensor, copy) for tensor, copy in found)


def test_a_tensor_larger_than_a_piece() -> None:
    arena = Arena()
    small, large, next_one = (arena.zeros((n,), torch.int8) for n in (10, PIECE + 1, 10))
    large.fill_(1)
    assert not small.any()
    assert not next_one.any()
    del arena, large
    assert not small.any()
