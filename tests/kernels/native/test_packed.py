"""C++ products of packed weights: accuracy and bitwise independence of the batch, on all processors."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from nanospec.kernels import native
from nanospec.kernels.native import packed
from tests.processors import PROCESSORS, built_for, compiled_for, other_library

__all__ = ["built_for", "compiled_for", "other_library"]
pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")

BF16 = torch.bfloat16


@pytest.mark.parametrize("K", [2, 50, 576])
def test_linear(K: int) -> None:
    for N, T in product((1, 31, 32, 33, 200), (0, 1, 2, 11, 12, 13, 33, 200)):
        generator = torch.Generator().manual_seed(T * N + K)
        x, weight, bias = (torch.randn(*s, generator=generator).to(BF16) for s in ((T, K), (N, K), (N,)))
        for b in (None, bias):
            out = packed.linear(x, packed.pack(weight), b)
            expected = x.double() @ weight.double().T + (0 if b is None else b.double())
            torch.testing.assert_close(out.double(), expected, rtol=1 / 200, atol=2e-5 * K)


def test_linear_with_strided_rows() -> None:
    weight, wide = packed.pack(torch.randn(70, 16).to(BF16)), torch.randn(30, 40).to(BF16)
    for x in (wide[:, 3:19], wide[::2, :16], wide[:16].T[:20], wide[:1, :16].expand(14, 16)):
        assert torch.equal(packed.linear(x, weight), packed.linear(x.contiguous(), weight))


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("K", [200, 224])
def test_result_is_bitwise_independent_of_batch_on_all_processors(K: int, cancel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((300, K), (70, K)))
    if cancel:  # the exact sums are 0, so the rounding errors reveal the summation order
        order, half = torch.randperm(K, generator=generator), K // 2
        x = torch.cat([x[:, :half], x[:, :half]], 1)[:, order]
        weight = torch.cat([weight[:, :half], -weight[:, :half]], 1)[:, order]
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
    """Like bfloat16 instructions, since float instructions would be ten times slower with subnormals. PyTorch
    still keeps them in the same thread."""
    strips = packed.pack(torch.full((40, 96), weight, dtype=BF16))
    for count in (1, 13):
        assert (packed.linear(torch.full((count, 96), x, dtype=BF16), strips) == 0).all()
    assert torch.tensor(1e-20) * torch.tensor(1e-19) > 0


def test_avx2_and_avx512_are_bitwise_identical(
    built_for: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare AVX2 and AVX-512 on sums of exact value 0, whose rounding errors reveal the order."""
    if not {"avx2", "avx512vl"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("not a processor with both")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(40, 200, generator=generator).to(BF16) for _ in range(2))
    x, weight = torch.cat([x, x], 1), torch.cat([weight, -weight], 1)
    actual = []
    for name in ("AVX2", "AVX-512"):
        library = ctypes.CDLL(str(built_for(PROCESSORS[name][0])))
        monkeypatch.setattr(native, "library", lambda required=False, library=library: library)
        actual.append(packed.linear(x, packed.pack(weight)))
    assert (actual[0] != 0).float().mean() > 0.2
    assert torch.equal(*actual)


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


WITHOUT_PERMISSION = """
import ctypes, struct
def line(code, true, false, value): return struct.pack("HBBI", code, true, false, value)
# Of a call: its number; arch_prctl? its argument; ARCH_REQ_XCOMP_PERM? EPERM; else allowed.
filter = (line(0x20, 0, 0, 0) + line(0x15, 0, 3, 158) + line(0x20, 0, 0, 16) + line(0x15, 0, 1, 0x1023)
          + line(0x06, 0, 0, 0x00050001) + line(0x06, 0, 0, 0x7FFF0000))
lines = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filter) // 8, ctypes.addressof(lines)))
prctl = ctypes.CDLL(None).prctl
allowed = not prctl(38, 1, 0, 0, 0) and not prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)

import torch
from nanospec.kernels import native
from nanospec.kernels.native import packed
x, weight = torch.ones(5, 64, dtype=torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16)
assert (packed.linear(x, packed.pack(weight)) == 64).all()
print(native.target() if allowed else "no filter")
"""


@pytest.mark.skipif(native.library() is None or native.target() != "AMX", reason="not a processor with AMX")
def test_denied_amx_permission_falls_back_to_avx512() -> None:
    """As in some containers, here with a seccomp filter that denies the permission for AMX."""
    child = [sys.executable, "-c", WITHOUT_PERMISSION]
    result = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() in (["AVX-512"], ["no", "filter"])
