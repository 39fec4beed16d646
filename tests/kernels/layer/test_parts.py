"""Weights split among ranks, which are all in one process here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanospec.extras.tensor_parallel import shard
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.shard import ParallelLMHead, RowParallelLinear, VocabParallelEmbedding
from nanospec.kernels.launch import forced
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.residual import Norm, Residual, embed
from tests.kernels.products import normed, residual_of
from tests.ranks import together
from tests.util import assert_close


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Triton's interpreter supports one thread at a time.
@pytest.mark.parametrize(("ranks", "backend"), [(1, "triton"), (1, "naive"), (2, "naive"), (3, "naive")])
def test_row_parallel_weight_matches_whole_weight(ranks: int, backend: str) -> None:
    """Gathering and adding in slices are bitwise identical."""
    h, weight, x, bias = normal(5, 48), normal(40, 48, seed=1), normal(5, 40, seed=2), normal(40, seed=3)
    norm, columns = Norm(torch.ones(40), 1e-5), 48 // ranks

    def run(group: Group) -> list[Tensor]:
        own_bias = torch.zeros_like(bias) if group.rank else bias
        part = make_linear(weight.split(columns, 1)[group.rank].contiguous(), own_bias)
        summed = RowParallelLinear(part, group)
        mine = h.split(columns, 1)[group.rank].contiguous()
        return [summed.add_to(residual_of(x, norm), mine, norm).x for _ in range(2)]

    def compare(backend: str, limit: int) -> list[Tensor]:
        with forced(backend), pytest.MonkeyPatch.context() as patch:  # type: ignore[arg-type]
            patch.setattr(shard, "EXCHANGE", limit)
            result = [tensor for each in together(ranks, run) for tensor in each]
        assert all(torch.equal(tensor, result[0]) for tensor in result)
        return result

    gathered, in_slices = compare(backend, 1 << 30)[0], compare(backend, -1)[0]
    assert torch.equal(gathered, in_slices)
    assert_close(gathered, x + h @ weight.T + bias, 1e-5)


@pytest.mark.parametrize(("limit", "messages"), [(534, 1), (533, 2)])
def test_large_products_are_added_in_slices(
    monkeypatch: pytest.MonkeyPatch, limit: int, messages: int
) -> None:
    """Three ranks receive 2 x 800 bytes, or 4 / 3 x 800 bytes with slices."""
    monkeypatch.setattr(shard, "EXCHANGE", limit)
    norm, x = Norm(torch.ones(40), 1e-5), normal(5, 40)

    def run(group: Group) -> int:
        layer = RowParallelLinear(make_linear(normal(40, 16)), group)
        layer.add_to(residual_of(x, norm), normal(5, 16), norm)
        return group.count  # type: ignore[attr-defined]

    assert together(3, run) == [messages] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_split_vocabulary_matches_whole(ranks: int) -> None:
    V, H, ids, x = 50, 16, torch.tensor([0, 49, 24, 25, 24], dtype=torch.int32), normal(3, 16, seed=5)
    whole, width, norm = normal(V, H), -(-V // ranks), Norm(torch.ones(H), 1e-5)
    padded = torch.cat([whole, torch.zeros(ranks * width - V, H)]).split(width)

    def run(group: Group) -> None:
        part = padded[group.rank]
        table = VocabParallelEmbedding(part, group, group.rank * width)
        assert torch.equal(embed(ids, table, norm, 3.0).x, 3 * whole[ids.long()])
        head, out = ParallelLMHead(make_linear(part), group, V), torch.full((3, V), float("nan"))
        assert head(x, out) is out
        assert_close(out, x @ whole.T, 1e-6)
        assert torch.equal(head(x), out)

    together(ranks, run)


def test_triton_with_split_embeddings() -> None:
    whole, ids, norm = normal(8, 64), torch.tensor([7, 0], dtype=torch.int32), Norm(torch.ones(64), 1e-5)

    def run(group: Group) -> Residual:
        return embed(ids, VocabParallelEmbedding(whole, group, 0), norm)

    with forced("triton"):
        [residual] = together(1, run)
    assert torch.equal(residual.x, whole[ids.long()])
    assert_close(normed(residual), normed(residual_of(whole[ids.long()], norm)), 1e-6)
