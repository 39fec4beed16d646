"""Medusa heads: comparison with a float64 reference, and errors for invalid files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nanospec.drafters.medusa import Heads
from nanospec.kernels.launch import forced
from nanospec.models.decoder import Model
from tests.ranks import weights_of
from tests.tiny import tiny_config
from tests.util import assert_close

H, V = 80, 64  # a packed lm_head is read in pieces of 64 columns
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def target(dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Model, Tensor]:
    """Return a tiny target and its lm_head before packing."""
    config = tiny_config(hidden_size=H, **overrides)
    weights = weights_of(config, dtype)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return Model(config, dtype, "cpu", weights.__getitem__), weights[head]


def tensors(
    num_heads: int = 3, num_layers: int = 1, own: tuple[int, ...] = (), rows: int = V
) -> dict[str, Tensor]:
    """Return random heads in the published layout; the heads in `own` have their own projections."""
    generator = torch.Generator().manual_seed(5)
    result = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            result[f"{head}.{layer}.linear.weight"] = torch.randn(H, H, generator=generator) / H**0.5
            result[f"{head}.{layer}.linear.bias"] = torch.randn(H, generator=generator)
        if head in own:
            result[f"{head}.{num_layers}.weight"] = torch.randn(rows, H, generator=generator)
    return result


def reference(result: dict[str, Tensor], hidden: Tensor, lm_head: Tensor) -> Tensor:
    """Compute the published formula head by head; heads without a projection use the lm_head's rows."""
    num_heads = 1 + max(int(name.split(".")[0]) for name in result if name != "token_map")
    if "token_map" in result:
        lm_head = lm_head[result["token_map"].long()]
    results = []
    for head in range(num_heads):
        x, layer = hidden.double(), 0
        while f"{head}.{layer}.linear.weight" in result:
            weight, bias = (result[f"{head}.{layer}.linear.{part}"].double() for part in ("weight", "bias"))
            x, layer = x + F.silu(F.linear(x, weight, bias)), layer + 1
        results.append(F.linear(x, result.get(f"{head}.{layer}.weight", lm_head).double()))
    return torch.stack(results, 1)


MAP = torch.tensor([3, 60, 7, 8, 41, 0, 22], dtype=torch.int32)
LAYOUTS: dict[str, dict[str, Tensor]] = {
    "published-2-blocks": {f"medusa_head.{n}": t for n, t in tensors(num_layers=2, own=(0, 1, 2)).items()},
    "shared-3-blocks": tensors(num_layers=3),
    "one-of-three-shared": tensors(own=(0, 2)),
    "own-map": {**tensors(own=(0, 1, 2), rows=len(MAP)), "token_map": MAP.long()},
    "shared-map-1-head": {**tensors(num_heads=1), "token_map": MAP},
}


@pytest.mark.parametrize(
    ("dtype", "tied", "backend"),
    [(torch.float32, False, "auto"), (torch.bfloat16, True, "auto"), (torch.float32, False, "triton")],
    ids=str,
)
def test_logits_match_reference(tmp_path: Path, tied: bool, dtype: torch.dtype, backend: Any) -> None:
    with forced(backend):
        model, lm_head = target(dtype, tie_word_embeddings=tied)
        for layout, stored in LAYOUTS.items():
            save_file(stored, tmp_path / "heads.safetensors")
            heads = Heads.load(tmp_path / "heads.safetensors", model)
            result = {name.removeprefix("medusa_head."): tensor for name, tensor in stored.items()}
            for count in (3,) if backend == "triton" else (0, 1, 63):
                hidden = torch.randn(count, H, generator=torch.Generator().manual_seed(7)).to(dtype)
                actual = heads.logits(hidden)
                assert actual.dtype == dtype
                assert actual.shape[1] == heads.num_heads
                assert_close(actual, reference(result, hidden, lm_head), TOLERANCE[dtype], layout)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda result: result.update({name: tensor})


ERRORS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda result: result.clear(), "is not a file of Medusa heads: .* .found no tensors"),
    (put("1.0.linear.bias", torch.zeros(48)), r"size 80, 64 tokens.*1.0.linear.bias \[48\] instead of \[80"),
    (
        lambda result: result.update({"0.1.weight": torch.zeros(V, H), "token_map": MAP}),
        r"7 tokens.*0.1.weight \[64, 80\] instead of \[7, 80\]",
    ),
    (lambda result: result.pop("2.0.linear.bias"), "1 tensor.s. missing: 2.0.linear.bias"),
    (put("99.0.linear.bias", torch.zeros(H)), "missing: 10.0.linear.bias, .* more"),
    (put(f"{'9' * 5000}.0.linear.bias", torch.zeros(H)), "unexpected: '999"),
    (put("lm_head.weight", torch.zeros(V, H)), "unexpected: lm_head.weight"),
    (put("0.0.linear.bias", torch.zeros(H).int()), "not stored as F32, BF16, F16: 0.0.linear.bias I32"),
    (put("token_map", torch.tensor([1, 64])), "distinct ids from 0 to 63"),
    (put("token_map", torch.tensor([-2, 5])), "distinct ids from 0"),
    (put("token_map", torch.tensor([5, 5])), "distinct ids from 0"),
    (put("token_map", torch.ones(3, 2).int()), r"not int32 \[3, 2\]"),
    (put("token_map", torch.ones(0).int()), r"not int32 \[0\]"),
]


def test_invalid_heads_are_rejected(tmp_path: Path) -> None:
    model, _ = target()
    for change, sentence in ERRORS:
        result = tensors()
        change(result)
        save_file(result, tmp_path / "heads.safetensors")
        with pytest.raises(ValueError, match=sentence):
            Heads.load(tmp_path / "heads.safetensors", model)
    with pytest.raises(FileNotFoundError, match="Medusa heads .*nowhere not found"):
        Heads.load(tmp_path / "nowhere", model)
