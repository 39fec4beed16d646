"""Weights split among ranks, which run in one process here."""

import pytest
import torch
from torch import Tensor

from nanospec.extras.tensor_parallel import shard
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.shard import ParallelLMHead, RowParallelLinear, VocabParallelEmbedding
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.residual import Norm, embed
from tests.kernels.products import residual_of
from tests.ranks import together
from tests.util import assert_close


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("ranks", "backend"), [(1, "triton"), (2, "naive"), (3, "naive")])
def test_row_parallel_weight_matches_whole_weight(
    ranks: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering products and adding in slices are bitwise identical. Three ranks receive 2 x 800 bytes in one
    message, or 4 / 3 x 800 bytes in two."""
    h, weight, x, bias = normal(5, 48), normal(40, 48, seed=1), normal(5, 40, seed=2), normal(40, seed=3)
    norm, columns = Norm(torch.ones(40), 1e-5), 48 // ranks

    def run(group: Group) -> tuple[Tensor, int]:
        own_bias = torch.zeros_like(bias) if group.rank else bias
        part = make_linear(weight.split(columns, 1)[group.rank].contiguous(), own_bias)
        columns_of_rank = h.split(columns, 1)[group.rank].contiguous()
        added = RowParallelLinear(part, group).add_to(residual_of(x, norm), columns_of_rank, norm)
        return added.x, group.count  # type: ignore[attr-defined]

    results = []
    for limit, messages in ((534, 1), (533, 2)):
        monkeypatch.setattr(shard, "EXCHANGE", limit)
        with forced(backend):
            for result, count in together(ranks, run):
                results.append(result)
                assert ranks < 3 or count == messages
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], x + h @ weight.T + bias, 1e-5)


@pytest.mark.parametrize("ranks", [3, 4])
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
