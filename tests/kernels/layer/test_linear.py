"""Linear layers: comparison with float64, and bitwise independence of other rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanospec.kernels.launch import ARCHITECTURES, forced
from nanospec.kernels.layer import product
from nanospec.kernels.layer.linear import make_linear
from tests.kernels.products import KINDS, Products
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("T", "N", "K"),
    [(1, 64, 64), (5, 100, 576), (17, 198, 1000), (63, 66, 100), (130, 64, 256), (3, 64, 1536)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind: str, T: int, N: int, K: int, dtype: torch.dtype) -> None:
    products = Products(T, N, K, dtype)
    out = products.run(kind)
    assert out.dtype == dtype
    assert torch.equal(out, products.run(kind))  # counters were reset to zero
    assert_close(out, products.expected(kind), TOLERANCE[dtype], kind)


@pytest.fixture
def any_tiling(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Override fields of the tiling that `choose_tiling` returns."""
    chosen = product.choose_tiling

    def choose(**fields: Any) -> None:
        monkeypatch.setattr(product, "choose_tiling", lambda *shape: chosen(*shape)._replace(**fields))

    return choose


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "geglu"])  # same code as norm_swiglu
def test_result_is_bitwise_independent_of_other_rows(
    kind: str, dtype: torch.dtype, any_tiling: Callable[..., None]
) -> None:
    """Independent of the number of rows and of the tiling, except for the parts of K."""
    products = Products(320, 128, 320, dtype)
    any_tiling(parts=3, part=128, split_k=True)
    together = products.run(kind)
    for first, count in ((0, 1), (2, 3), (0, 17), (60, 65), (100, 130)):
        for split_k in (True, False):
            any_tiling(parts=3, part=128, split_k=split_k)
            rows = slice(first, first + count)
            assert torch.equal(products.run(kind, rows), together[rows]), (rows, split_k)
    for rows_, width, block_k in ((64, 64, 64), (128, 16, 64), (256, 64, 64), (128, 128, 64), (64, 32, 128)):
        any_tiling(parts=3, part=128, split_k=False, rows=rows_, width=width, block_k=block_k)
        assert torch.equal(products.run(kind, slice(0, 70)), together[:70]), (rows_, width)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("N", "K"), [(1024, 2048), (4096, 1024), (576, 576), (151936, 1024), (24576, 4096), (960, 576), (8, 16)]
)
def test_parts_of_k_depend_only_on_weight_shape(N: int, K: int, arch: str) -> None:
    parts, part = product.split_k_parts(N, K, arch)
    assert part % (128 if K % 128 == 0 else 64) == 0
    assert (parts - 1) * part < K <= parts * part
    for T in (1, 16, 33, 64, 65, 320, 4096):
        chosen = product.choose_tiling(T, N, K, arch, 2)
        assert (chosen.parts, chosen.part) == (parts, part)
        assert part % chosen.block_k == 0
        assert not chosen.split_k or parts > 1


@pytest.mark.parametrize(
    "arch", [name for name in ARCHITECTURES if name != "sm_90"]
)  # covered by the other tests
@pytest.mark.parametrize("T", [3, 70])
def test_tilings_of_every_architecture(T: int, arch: str) -> None:
    """Run with the tiling `choose_tiling` returns for it."""
    products = Products(T, 66, 1100, torch.float16)
    with forced(architecture=arch):
        assert_close(products.run("norm_swiglu"), products.expected("norm_swiglu"), TOLERANCE[torch.float16])


def test_empty_input() -> None:
    with forced("triton"):
        assert make_linear(torch.randn(32, 64))(torch.randn(0, 64)).shape == (0, 32)


def test_bfloat16_without_onednn_support() -> None:
    """As on a CPU without AVX-512 and without a compiler."""
    code = (
        "import torch; from nanospec.kernels.layer.linear import OneDnnLinear, make_linear; "
        "w = torch.ones(8, 8).bfloat16(); assert make_linear(w)(w).eq(8).all(); "
        "packs = torch.backends.mkldnn.is_available(); "
        "assert isinstance(make_linear(w.float()), OneDnnLinear) == packs"
    )
    environment = {**os.environ, "NANOSPEC_KERNELS": "naive", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
