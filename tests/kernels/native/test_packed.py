"""C++ products of packed weights: accuracy and bitwise independence of the batch, on all processors."""

import ctypes
import errno
import mmap
from itertools import product
from threading import Thread

import pytest
import torch
from torch import Tensor

from nanospec.kernels import native
from nanospec.kernels.native import packed
from nanospec.kernels.native.packed import LINE, Arena

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler: install g++")

BF16 = torch.bfloat16


@pytest.mark.parametrize("K", [2, 50, 576])
def test_linear_matches_float64(K: int) -> None:
    for N, T in product((1, 32, 33, 200), (0, 1, 12, 13, 33, 200)):
        generator = torch.Generator().manual_seed(T * N + K)
        x, weight, bias = (torch.randn(*s, generator=generator).to(BF16) for s in ((T, K), (N, K), (N,)))
        for b in (None, bias):
            out = packed.linear(x, packed.pack(weight), b)
            expected = x.double() @ weight.double().T + (0 if b is None else b.double())
            torch.testing.assert_close(out.double(), expected, rtol=1 / 200, atol=2e-5 * K)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("K", [200, 224])
def test_result_is_bitwise_independent_of_batch_on_all_processors(K: int) -> None:
    """The exact sums are 0, so the rounding errors reveal the summation order."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, K // 2, generator=generator).to(BF16) for n in (300, 70))
    order = torch.randperm(K, generator=generator)
    x, weight = torch.cat([x, x], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    strips = packed.pack(weight)
    expected = packed.linear(x, strips)
    assert (expected != 0).float().mean() > 0.2
    torch.testing.assert_close(expected.double(), x.double() @ weight.double().T, rtol=1 / 200, atol=4e-3)
    for count in (*range(1, 18), 31, 32, 33, 34, 64, 97, 257):
        assert torch.equal(packed.linear(x[:count], strips), expected[:count])
        assert torch.equal(packed.linear(x[-count:], strips), expected[-count:])


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize(("x", "weight"), [(1e-20, 1e-19), (1e-39, 1e20), (1e20, 1e-39)])
def test_subnormals_are_flushed_to_zero(x: float, weight: float) -> None:
    """The kernels treat subnormals like bfloat16 instructions, as float instructions would be ten times
    slower with them. PyTorch operations in the same thread keep subnormals."""
    strips = packed.pack(torch.full((40, 96), weight, dtype=BF16))
    for count in (1, 13):
        assert (packed.linear(torch.full((count, 96), x, dtype=BF16), strips) == 0).all()
    assert torch.tensor(1e-20) * torch.tensor(1e-19) > 0


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("K", [2, 30, 100, 400])
def test_no_read_past_the_last_row(K: int) -> None:
    """The input ends at a page boundary, and the next page is inaccessible."""
    page, weight = mmap.PAGESIZE, packed.pack(torch.randn(40, K).to(BF16))
    room = mmap.mmap(-1, 5 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + 4 * page, page, 0) == 0
    for T in (1, 2, 12, 13):
        x = torch.frombuffer(room, dtype=BF16, count=T * K, offset=4 * page - 2 * T * K).view(T, K).normal_()
        assert torch.equal(packed.linear(x, weight), packed.linear(x.clone(), weight))


def test_arena_tensors_of_several_threads_are_zero_and_separate() -> None:
    arena = Arena()
    result: list[tuple[Tensor, Tensor]] = []

    def fill(mark: int) -> None:
        for i in range(100):
            shape = (i % 7 + 1, i * mark % 50 + 1)
            tensor = arena.zeros(shape, BF16)
            assert (tensor.shape, bool(tensor.any()), tensor.data_ptr() % LINE) == (shape, False, 0)
            result.append((tensor.fill_(len(result) % 97 + mark), tensor.clone()))

    threads = [Thread(target=fill, args=(mark,)) for mark in (1, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(result) == 200
    assert all(torch.equal(tensor, copy) for tensor, copy in result)

    with pytest.raises(OSError, match=rf"Errno {errno.ENOMEM}\b"):  # by which `is_oom` recognizes it
        arena.zeros((1 << 52,), torch.int8)
