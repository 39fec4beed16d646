"""Tensors on memory-mapped pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from nanospec.kernels.native.packed import LINE, PIECE, Arena


def test_arena_tensors_of_several_threads_are_zero_and_separate() -> None:
    arena = Arena()
    result: list[tuple[Tensor, Tensor]] = []

    def fill(mark: int) -> None:
        for i in range(100):
            shape = (i % 7 + 1, i * mark % 50 + 1)
            tensor = arena.zeros(shape, torch.bfloat16)
            assert (tensor.shape, bool(tensor.any()), tensor.data_ptr() % LINE) == (shape, False, 0)
            result.append((tensor.fill_(len(result) % 97 + mark), tensor.clone()))

    threads = [Thread(target=fill, args=(mark,)) for mark in (1, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(result) == 200
    assert all(torch.equal(tensor, copy) for tensor, copy in result)


def test_small_tensors_share_huge_pages() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    arena = Arena()
    first, second, large, next_one = (arena.zeros((n,), torch.int8) for n in (LINE + 1, 3, PIECE + 1, 10))
    assert second.data_ptr() - first.data_ptr() == 2 * LINE
    text = Path("/proc/self/smaps").read_text() if Path("/proc/self/smaps").exists() else ""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)[1:]:
        begin, end = (int(number, 16) for number in area.split(" ", 1)[0].split("-"))
        if begin <= first.data_ptr() < end and "VmFlags" in area:
            assert " hg" in area.partition("VmFlags:")[2]
    large.fill_(1)
    before = resident()
    del large
    assert resident() < before - PIECE // 2  # freed although the arena exists
    assert not torch.cat([first, second, next_one]).any()


def test_allocation_failure_is_reported() -> None:
    with pytest.raises(OSError, match=r"Could not map 4294967296 MiB of memory \("):
        Arena().zeros((1 << 52,), torch.int8)
