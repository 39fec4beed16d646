"""Linear layers: comparison with float64, and bitwise independence of other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import GPUS, forced
from nanospec.kernels.layer import product, tiling
from nanospec.kernels.layer.linear import Linear, NativeLinear, OneDnnLinear, TritonLinear, make_linear
from nanospec.kernels.native import library
from tests.kernels.products import KINDS, Products
from tests.random_weights import random_quantized
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 1e-6}
# (T, N, K): one or several tiles in each dimension, whole or not; 1,100 and 1,536 columns have several parts.
SHAPES = [(1, 64, 64), (5, 100, 576), (17, 66, 1100), (33, 66, 100), (130, 64, 128), (3, 64, 1536)]
# Test each kind with three of the shapes, alternating dtypes and GPUs.
CASES = [
    (kind, shape, (FP16, FP32)[(k + n) // 2 % 2], [*GPUS][(k // 2 + n) % len(GPUS)])
    for k, kind in enumerate(KINDS)
    for n, shape in enumerate(SHAPES)
    if k % 2 == n % 2
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "dtype", "target"), CASES, ids=str)
def test_linear_matches_float64(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, target: str
) -> None:
    products = Products(*shape, dtype)
    with forced(gpu=GPUS[target]):
        out = products.run(kind)
        assert out.dtype == dtype
        assert torch.equal(out, products.run(kind))  # counters were reset to zero
    assert_close(out, products.expected(kind), TOLERANCE[dtype], kind)


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("kind", "weight"),
    [("linear_bias", FP32), ("linear_add", FP16), ("norm_linear", FP32), ("norm_swiglu", FP16),
     ("norm_swiglu", "int4-min"), ("linear_add", "int8"), ("linear", "fp8")],
)  # fmt: skip
def test_result_is_bitwise_independent_of_other_rows(
    kind: str, weight: torch.dtype | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Products(100, 128, 320, FP16 if isinstance(weight, str) else weight)
    if isinstance(weight, str):
        products.of(random_quantized(weight, 128, 320, 64 if weight == "int8" else 32))
    products.check_independence(kind, monkeypatch)


@pytest.mark.parametrize("backend", ["triton", "naive"])
def test_slice_of_a_wider_input(backend: Any) -> None:
    wide, weight = torch.randn(5, 100), torch.randn(40, 64)
    with forced(backend):
        assert_close(make_linear(weight)(wide[:, 20:84]), wide[:, 20:84] @ weight.T, 1e-6)


def test_parts_and_stages_depend_on_the_gpu() -> None:
    parts = {name: tiling.split_k_parts(1024, 3072, gpu)[0] for name, gpu in GPUS.items()}
    assert (parts["sm_86"], parts["sm_90"], parts["sm_120"]) == (5, 8, 8)
    assert GPUS["sm_86"].stages(33 << 10, 6, programs=3) == 1  # 1 KiB is reserved for each program


@pytest.mark.parametrize("name", GPUS)
def test_parts_of_k_depend_only_on_weight_shape(name: str) -> None:
    target = GPUS[name]
    for N, K in ((4096, 1024), (576, 576), (151936, 1024), (24576, 4096), (576, 1536), (8, 16)):
        parts, part = tiling.split_k_parts(N, K, target)
        assert part % (128 if K % 128 == 0 else 64) == 0
        assert (parts - 1) * part < K <= parts * part
        for T in (1, 33, 65, 4096):
            chosen = tiling.choose_tiling(T, N, K, target, 2, 2)
            assert (chosen.parts, chosen.part, chosen.split_k) == (parts, part, parts > 1 and T <= 256)
            assert part % chosen.block_k == 0
            size = (chosen.rows + chosen.width) * chosen.block_k * 2
            buffers = chosen.stages - (target.family not in ("sm_90", "sm_100"))
            assert max(buffers, 1) * size <= target.shared
            assert chosen.stages <= 1 + -(-(part if chosen.split_k else K) // chosen.block_k)
            if T == 1 and target.pdl:  # with room for the next kernel
                assert 2 * (buffers * size + 1024) <= target.shared + 1024
            tiles = -(-T // chosen.width) * -(-N // chosen.rows)
            counters = product.new_counters(torch.empty(N, K, device="meta"))
            assert not chosen.split_k or tiles <= len(counters)


def test_layers_do_not_share_counters() -> None:
    """Two engines may run on different streams of a GPU."""
    with forced("triton"):
        layers = [make_linear(torch.ones(64, 64)) for _ in range(2)]
    first, second = (layer._launch.keywords["counters"] for layer in layers)  # type: ignore[attr-defined]
    assert first.data_ptr() != second.data_ptr()


def test_implementation_depends_on_backend_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """If oneDNN does not support bfloat16 (CPUs without AVX-512), weights are not packed."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    packs = torch.backends.mkldnn.is_available()
    for backend, dtype, K, kind in (
        ("triton", FP32, 8, TritonLinear),
        ("naive", FP32, 8, OneDnnLinear if packs else Linear),
        ("naive", torch.bfloat16, 8, Linear),
        ("auto", torch.bfloat16, 7, Linear),
        ("auto", torch.bfloat16, 8, NativeLinear if library() else Linear),
    ):
        weight = torch.ones(6, K).to(dtype)
        with forced(backend):  # type: ignore[arg-type]
            linear = make_linear(weight)
            assert type(linear) is kind
            assert linear(weight).eq(K).all()
            assert (linear.unpacked_weight is None) == (kind in (OneDnnLinear, NativeLinear))


def test_onednn_computes_a_long_single_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN sums one long row in another order than several rows."""
    sizes: list[int] = []

    def spy(rows: Tensor, *rest: object) -> Tensor:
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    for T, K in ((1, 1024), (1, 1025), (2, 1025)):
        assert len(OneDnnLinear(None)(torch.ones(T, K))) == T
    assert sizes == [1, 2, 2]
