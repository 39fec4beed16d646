"""The part of a model on each rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.shard import Shard, check_split
from nanospec.models.config import ModelConfig
from nanospec.models.weights import load_model
from tests.ranks import groups_of, together
from tests.tiny import ModelRunner, checkpoint, tiny_config
from tests.util import assert_close

HEADS = [(4, 2), (6, 3), (8, 1), (9, 3), (15, 5), (4, 4), (14, 2)]  # (query heads, KV heads)


def fits(config: ModelConfig, size: int) -> bool:
    try:
        check_split(config, size)
    except ValueError:
        return False
    return True


@given(
    heads=st.sampled_from(HEADS),
    size=st.integers(1, 16),
    inner=st.integers(16, 100),
    vocab=st.integers(256, 999),
)
@settings(max_examples=150)
def test_shards_cover_all_weights_with_equal_shapes(
    heads: tuple[int, int], size: int, inner: int, vocab: int
) -> None:
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], intermediate_size=inner, vocab_size=vocab,
                         num_layers=1, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)  # fmt: skip
    if not fits(config, size):
        return
    shards = [Shard(config, group) for group in groups_of(size)]
    assert len({shard.config for shard in shards}) == 1
    kv_copies = max(size // heads[1], 1)
    local = shards[0].config.parameter_shapes()
    for name, shape in config.parameter_shapes().items():
        numbers = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        seen = torch.zeros(numbers.numel() + 1, dtype=torch.int64)
        for shard in shards:
            mine = shard.take(name, numbers)
            wanted = (shard.num_tokens, *shape[1:]) if "embed" in name or "lm_head" in name else local[name]
            assert mine.shape == wanted, name
            seen += torch.bincount(mine.flatten(), minlength=len(seen))
        copies = size if "norm" in name else kv_copies if "k_proj" in name or "v_proj" in name else 1
        assert set(seen[1:].tolist()) == {copies}, name


@given(heads=st.sampled_from(HEADS), size=st.integers(1, 16))
def test_query_heads_match_their_kv_heads(heads: tuple[int, int], size: int) -> None:
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1])
    if not fits(config, size):
        return
    queries, keys = (
        torch.arange(n).repeat_interleave(config.head_dim)[:, None] for n in (heads[0], heads[1])
    )
    for group in groups_of(size):
        shard = Shard(config, group)
        q, k = (
            shard.take(f"model.layers.0.self_attn.{name}.weight", whole)[:: config.head_dim, 0].tolist()
            for name, whole in (("q_proj", queries), ("k_proj", keys))
        )
        assert q
        together = shard.config.num_heads // shard.config.num_kv_heads
        for place, head in enumerate(q):
            assert head // (heads[0] // heads[1]) == k[place // together]


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        ((9, 3), "1, 2, 3, 9"),
        ((4, 2), "1, 2, 4"),
        ((8, 4), "1, 2, 4, 8"),
        ((14, 2), "1, 2, 14"),
        ((15, 5), "1, 2, 3, 5, 15"),
        ((8, 1), "1, 2, 4, 8"),
    ],
    ids=str,
)
def test_indivisible_heads_are_rejected(heads: tuple[int, int], sizes: str) -> None:
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1])
    match = f"=7 cannot split {heads[0]} .* and {heads[1]} .*; use one of {sizes}."
    with pytest.raises(ValueError, match=match):
        check_split(config, 7)


FAMILIES = ["llama-mqa", "llama-linear-biases-d24", "qwen2-tied", "qwen3-biases-windows"]
FAMILIES += ["phi3-partly-rotated", "gemma2-caps", "gemma2-biases", "gemma3"]


@pytest.mark.parametrize("variant", FAMILIES)
def test_ranks_compute_logits_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    """Fused tensors, reordered heads, biases, Gemma's norms, QK norms, caps, windows; checkpoint files are
    sharded independently."""
    folder = checkpoint(tmp_path, variant, max_shard_size="50KB")
    ids = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(0))

    def logits(group: Group | None) -> Tensor:
        split = None if group is None else partial(Shard, group=group)
        model = load_model(folder, torch.float32, "cpu", split=split)
        pages = ModelRunner(model, 1, 64)
        pages.step({0: ids[:30]})
        return pages.step({0: ids[30:]})[0]

    expected = logits(None)
    for result in together(2, logits):
        assert_close(result, expected, 1e-5)
