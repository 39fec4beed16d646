"""Weights split among ranks, which run in one process here."""

import pytest
import torch
from torch import Tensor

from nanospec.extras.tensor_parallel import shard
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.shard import RowParallelLinear
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.residual import Norm
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
