"""The part of a model on each rank."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.extras.tensor_parallel.process_group import ProcessGroup
from nanospec.extras.tensor_parallel.shard import RowParallelLinear, Shard, check_split
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.residual import Norm
from nanospec.models.weights import load_model
from tests.kernels.products import residual_of
from tests.ranks import groups_of, together
from tests.tiny import ModelRunner, checkpoint, tiny_config
from tests.util import assert_close

UNIT = 32  # alignment of a rank's intermediate size and vocabulary
HEADS = [(4, 2), (6, 3), (8, 1), (9, 3), (15, 5), (4, 4), (14, 2)]  # (query heads, KV heads)


@given(
    heads=st.sampled_from(HEADS), size=st.integers(1, 16), inner=st.integers(16, 100),
    vocab=st.integers(256, 999),
)  # fmt: skip
@example(heads=(4, 4), size=4, inner=64, vocab=62)  # two ranks have no tokens
@settings(max_examples=100)
def test_shards_cover_all_weights_with_equal_shapes(
    heads: tuple[int, int], size: int, inner: int, vocab: int
) -> None:
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], intermediate_size=inner, vocab_size=vocab,
                         num_layers=1, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)  # fmt: skip
    try:
        check_split(config, size)
    except ValueError:
        return
    shards = [Shard(config, group) for group in groups_of(size)]
    assert len({shard.config for shard in shards}) == 1
    local = shards[0].config
    assert shards[0].num_tokens == -(-vocab // (size * UNIT)) * UNIT
    assert local.intermediate_size == -(-inner // (size * UNIT)) * UNIT
    kv_copies, shapes = max(size // heads[1], 1), local.parameter_shapes()
    for name, shape in config.parameter_shapes().items():
        numbers = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        seen = torch.zeros(numbers.numel() + 1, dtype=torch.int64)
        for shard in shards:
            part = shard.take(name, numbers)
            wanted = (shard.num_tokens, *shape[1:]) if "embed" in name or "lm_head" in name else shapes[name]
            assert part.shape == wanted, name
            seen += torch.bincount(part.flatten(), minlength=len(seen))
        copies = size if "norm" in name else kv_copies if "k_proj" in name or "v_proj" in name else 1
        assert set(seen[1:].tolist()) == {copies}, name
    # Each query head is on the rank of its KV head.
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
    wholes = [torch.arange(n).repeat_interleave(local.head_dim)[:, None] for n in heads]
    for shard in shards:
        q, k = (shard.take(*each)[:: local.head_dim, 0].tolist() for each in zip(names, wholes))
        assert q
        for place, head in enumerate(q):
            assert head // (heads[0] // heads[1]) == k[place // (local.num_heads // local.num_kv_heads)]


def test_unsuitable_sizes_are_rejected() -> None:
    for heads, kv_heads, sizes in ((9, 3, "1, 2, 3, 9"), (15, 5, "1, 2, 3, 5, 15"), (8, 1, "1, 2, 4, 8")):
        config = tiny_config(num_heads=heads, num_kv_heads=kv_heads)
        match = f"=7 cannot split {heads} .* and {kv_heads} .*; use one of {sizes}."
        with pytest.raises(ValueError, match=match):
            check_split(config, 7)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("variant", "dtype", "quantization"),
    [
        ("llama-mqa", FP32, "int4"),
        ("llama-mqa", BF16, "int4"),
        ("qwen3-biases-windows", FP32, None),
        ("phi3-partly-rotated", FP32, None),
        ("gemma2-biases", FP32, None),
    ],
    ids=str,
)
def test_ranks_compute_logits_of_the_whole_model(
    variant: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    """Test fused tensors, reordered heads, biases, Gemma's norms, QK norms and windows, and
    4 bits with a padded intermediate size."""
    checkpoint(tmp_path, variant)
    ids = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(0))

    def logits(group: ProcessGroup | None) -> Tensor:
        split = None if group is None else partial(Shard, group=group)
        model = load_model(tmp_path, dtype, "cpu", split=split, quantization=quantization)
        out = torch.empty(1, 199, dtype=dtype)
        assert model.logits(torch.zeros(1, model.config.hidden_size, dtype=dtype), out) is out
        pages = ModelRunner(model, 1, 64)
        pages.step({0: ids[:30]})
        return pages.step({0: ids[30:]})[0]

    expected = logits(None)
    assert expected.std() > 0.1
    for result in together(2, logits):
        assert_close(result, expected, 1e-5 if dtype == FP32 else 0.06)


@pytest.mark.parametrize(("ranks", "backend"), [(1, "triton"), (2, "naive"), (3, "naive")])
def test_row_parallel_weight_matches_whole_weight(ranks: int, backend: Backend) -> None:
    h, weight, x, bias = (torch.randn(shape) for shape in ((5, 48), (40, 48), (5, 40), (40,)))
    norm, columns = Norm(torch.ones(40), 1e-5), 48 // ranks

    def run(group: ProcessGroup) -> Tensor:
        own_bias = torch.zeros_like(bias) if group.rank else bias
        part = make_linear(weight.split(columns, 1)[group.rank].contiguous(), own_bias)
        columns_of_rank = h.split(columns, 1)[group.rank].contiguous()
        return RowParallelLinear(part, group).add_to(residual_of(x, norm), columns_of_rank, norm).x

    with forced(backend):
        results = together(ranks, run)
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], x + h @ weight.T + bias, 1e-5)
