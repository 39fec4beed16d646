"""The inline assembly that dequantizes weights, which only GPUs run, in an emulator of its instructions."""

import re

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import GPUS, forced
from nanospec.kernels.layer import dequantize
from nanospec.kernels.layer.dequantize import PackedCodes, pack_codes, rearrange
from nanospec.kernels.layer.quantized import Quantized, concatenate, quantize
from tests.random_weights import random_quantized
from tests.util import assert_close

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("form", ["int4", "int4-min", "int8", "int8-min", "fp8"])
def test_assembly_dequantizes_the_weight(
    form: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 16 or 256 codes occur. Values of 2^40 are beyond float16, and those of 2^-40 below it."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # pack for a GPU
    monkeypatch.setattr(dequantize, "OLD_TRITON", width == 4)
    for K, group, size in ((96, 96, 2.0**40), (192, 32, 2.0**-40), (1024, 128, 2.0**-4)):
        weight = random_quantized(form, 7, K, group, size, dtype)
        with forced(gpu=GPUS["sm_89"]):
            packed = pack_codes(weight)
        assert packed.width == width
        weights = emulated(packed).double() * packed.factor
        if dtype == BF16 and "min" not in form:  # which represents the scales and shifts
            expected = weight.dequantize()
            assert torch.equal(weights, expected.double())
            assert torch.equal(packed.rows(torch.tensor([6, 2])), expected[[6, 2]])
        else:
            exact = weight._replace(dtype=torch.float64).dequantize()
            assert_close(weights, exact, 1e-3 if dtype == FP16 else 2.5e-3)


@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "5 of 8 bits", "4 and 8 bits"])
def test_minima_are_rounded_little(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shifts of a group have a common error, which matters if activations have a mean. The weights are
    rounded to bfloat16, which alone has an error of 0.0017."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # pack for a GPU
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 1024, generator=generator) * 0.02
    levels, low = {"8 bits": 255, "5 of 8 bits": 31}.get(kind, 15), weight.amin(1, keepdim=True)
    scale = (weight.amax(1, keepdim=True) - low) / levels
    codes = ((weight - low) / scale).round().to(torch.uint8)
    stored = Quantized(codes, scale, low, 4 if kind == "4 bits" else 8, BF16)
    if kind == "4 and 8 bits":
        stored = concatenate([quantize(weight.bfloat16(), 8), quantize(weight.bfloat16(), 4)])
    with forced(gpu=GPUS["sm_90"]):
        packed = pack_codes(stored)
    x = torch.randn(16, 1024, generator=generator).double() + 0.2
    exact = stored._replace(dtype=torch.float64).dequantize()
    assert_close(x @ (emulated(packed).double() * packed.factor).T, x @ exact.T, 7e-3)


def emulated(packed: PackedCodes) -> Tensor:
    """Return the weight [N, K], divided by `factor`, as the assembly dequantizes it."""
    bits, K = packed.bits, packed.shape[1]
    chunks = torch.arange(-(-K // 64))[:, None, None, None] * 64
    columns = (chunks + torch.tensor([0, 32])[:, None]).expand(-1, 4, 2, bits // 4)  # [chunk, l, h, q]
    words = packed.words[(columns.flatten() >> packed.shift).clamp(max=len(packed.words) - 1)].T
    pairs = []
    for index in range(16 // bits):
        constants = bits, packed.is_float, packed.center, packed.dtype == BF16
        ptx = dequantize.unpack_ptx(index, *constants)
        pairs.append(run_ptx(ptx, packed.codes, words, packed.dtype))
    stored = torch.stack(pairs, -1).flatten(1)  # a word has its first columns, and then its second ones
    orders = dequantize.STORED[bits], dequantize.COLUMNS[packed.width]
    return rearrange(stored, *orders)[:, :K]


def run_ptx(ptx: str, codes: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [.., 2]: the outputs $0 and $1 of assembly with the inputs $2 and $3."""
    registers = {"$2": codes.long() & 0xFFFFFFFF, "$3": words.long() & 0xFFFFFFFF}
    for line in ptx.split(";"):
        operation, *names = re.findall(r"[\w.$]+", line) or [""]
        if operation in ("", ".reg"):
            continue
        if names[:2] == ["$0", "$1"]:
            return halves(registers[names[2]], dtype)
        a, *others = (registers[n] if n in registers else torch.tensor(int(n, 0)) for n in names[1:])
        if operation == "mov.b32":
            result = a
        elif operation == "prmt.b32":  # bytes of a, or their signs
            result = torch.zeros_like(a)
            for n in range(4):
                selector = int(others[1]) >> 4 * n & 15
                assert selector & 4 == 0  # a byte of the first operand
                part = a >> 8 * (selector & 3) & 255
                result |= ((part >> 7) * 255 if selector & 8 else part) << 8 * n
        elif operation.startswith("fma.rn."):
            assert operation == f"fma.rn.{'bf16' if dtype == BF16 else 'f16'}x2"
            x, y, z = (halves(part, dtype).double() for part in (a, *others))
            result = (x * y + z).to(dtype).view(torch.int32)[..., 0].long()
        else:
            by = others[0]
            result = {"shl.b32": a << by, "shr.u32": a >> by, "and.b32": a & by}[operation]
        registers[names[0]] = result & 0xFFFFFFFF
    raise AssertionError("no result")


def halves(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the two numbers [.., 2] in each word."""
    return words[..., None].to(torch.int32).view(dtype)
