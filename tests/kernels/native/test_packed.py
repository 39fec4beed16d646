"""C++ products of packed and quantized weights: accuracy, and bitwise independence of the batch."""

import ctypes
import errno
import math
import mmap
from itertools import product
from threading import Thread

import pytest
import torch
from torch import Tensor

from nanospec.kernels import native
from nanospec.kernels.layer.quantized import GROUP, Quantized, as_integers, quantize
from nanospec.kernels.native import packed
from nanospec.kernels.native.packed import LINE, Arena
from tests.random_weights import random_quantized

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


FORMS = ("int4", "int4-min", "int8", "int8-min")


def random(form: str, N: int, K: int, group: int = GROUP) -> Quantized:
    """Return a weight with rows of magnitudes from 16 down to 1e-6."""
    sizes = 16 * 8.0 ** -torch.arange(N)[:, None].clamp(max=8)
    return random_quantized(form, N, K, group, sizes, torch.float64)


def expected(x: Tensor, weight: Quantized) -> Tensor:
    """Return the product in float64, with x [T, K] quantized to 8 bits in groups of at most 64."""
    groups = x.double().unflatten(1, (-1, math.gcd(weight.group, packed.MAX_GROUP)))
    unit = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / unit).round() * unit).flatten(1) @ weight.dequantize().T


@pytest.mark.parametrize("form", [*FORMS, "fp8"])
def test_quantized_product_and_rows_match_float64(form: str) -> None:
    for N, K, T in ((1, 64, 8), (33, 96, 3), (70, 1088, 65), (2100, 32, 5)):
        weight = random(form, N, K, GROUP if N % 2 else K)
        x, bias = torch.randn(T, K).to(BF16), torch.randn(N).to(BF16)
        strips, weight = packed.pack_quantized(weight), as_integers(weight)
        exact, wanted = weight.dequantize(), expected(x, weight)
        most = x.double().norm(dim=1)[:, None] * exact.norm(dim=1) / 200
        assert ((packed.linear(x, strips) - wanted).abs() <= most).all()
        assert ((packed.linear(x, strips, bias) - wanted - bias).abs() <= most + bias.abs() / 100).all()
        error = (strips.rows(torch.arange(N).flip(0)) - exact.flip(0)).abs()
        assert (error <= exact.flip(0).abs().amax(1, keepdim=True) / 100).all()


@pytest.mark.usefixtures("other_library")
def test_quantized_product_and_rows_match_float64_on_other_processors() -> None:
    for form in FORMS:
        test_quantized_product_and_rows_match_float64(form)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("form", FORMS)
def test_quantized_result_is_bitwise_independent_of_batch(form: str) -> None:
    for group in (32, 64):
        weight, x = packed.pack_quantized(random(form, 70, 192, group)), torch.randn(300, 192).to(BF16)
        whole = packed.linear(x, weight)
        for count in (1, 2, 3, 8, 31, 32, 33, 65, 257):
            assert torch.equal(packed.linear(x[:count], weight), whole[:count])
            assert torch.equal(packed.linear(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_stay_in_their_row(form: str) -> None:
    weight, x = packed.pack_quantized(random(form, 40, 96)), torch.randn(6, 96).to(BF16)
    clean = packed.linear(x, weight)
    x[1, 40], x[3, 95], x[4] = torch.nan, -torch.inf, 0
    out = packed.linear(x, weight)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert (out[4] == 0).all()
    assert torch.equal(out[[0, 2, 5]], clean[[0, 2, 5]])


def test_smallest_weights_and_activations_do_not_overflow() -> None:
    weight, x = quantize(torch.full((32, 64), 1e-39).to(BF16), 8), torch.full((4, 64), 1.0, dtype=BF16)
    assert packed.linear(x, packed.pack_quantized(weight)).abs().max() < 1e-36
    large, x = quantize(torch.full((32, 64), 1e30), 8), torch.zeros(4, 64, dtype=BF16)
    x[:, 5] = torch.tensor([1e-30, 1e-36, 3e-37, 1e-40])  # the inverse of the last two overflows
    out = packed.linear(x, packed.pack_quantized(large))
    assert torch.allclose(out[:2], (x[:2, 5:6] * 1e30).expand(2, 32), rtol=0.02)
    assert (out[2:] == 0).all()


def test_largest_codes_do_not_overflow() -> None:
    for form, sign in product(FORMS, (1, -1)):
        weight = random(form, 32, 64)
        weight.codes.fill_((1 << weight.bits) - 1)
        for table in weight.tables:
            table[0] = 1.9999  # rounds up to a power of two in float16
        x = torch.full((1, 64), sign * 3.0, dtype=BF16)
        error = packed.linear(x, packed.pack_quantized(weight)) - expected(x, weight)
        most = 3 * 64 * weight.scale.amax(1)  # overflow of int16: 1,500 times the scale
        assert (error.abs() <= most).all()
