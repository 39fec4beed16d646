"""The account of a pass: split over GPUs it is the same work and what they exchange; prompts; the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.cli.account import Machine, Step, account, kv_tokens, prefill
from nanospec.cli.shapes import SHAPES

H200 = Machine()
LARGE = ("qwen3-0.6b", "qwen3-8b", "llama-3.3-70b")


def flops(step: Step, part: str) -> int:
    return sum(kernel.flops for kernel in step.kernels if kernel.part == part)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("model", LARGE)
def test_gpus_share_all_arithmetic(model: str, gpus: int) -> None:
    whole, one = (account(SHAPES[model], 16, 3, gpus=n) for n in (1, gpus))
    for part in ("products", "attention", "head"):
        assert gpus * flops(one, part) == flops(whole, part)


@pytest.mark.parametrize(("gpus", "share"), [(2, 1 / 2), (8, 1 / 8), (16, 1 / 8)])
def test_every_gpu_reads_its_heads_of_keys(gpus: int, share: float) -> None:
    """There are eight. Beyond that many GPUs some read the same."""
    whole, one = (account(SHAPES["llama-3.3-70b"], 4, 0, context=10**6, gpus=n) for n in (1, gpus))
    read = [next(k.bytes for k in step.kernels if k.name == "attention") for step in (whole, one)]
    assert read[1] / read[0] == share


def test_what_is_exchanged_by_hand() -> None:
    """Qwen3-8B: 36 layers, 4096 values per token, 151,936 logits; 2 x 3 tokens in bf16 over 4 GPUs."""
    gathered, ring = (account(SHAPES["qwen3-8b"], 2, 2, gpus=4, ring=ring) for ring in (False, True))
    message, logits = 6 * 4096 * 2, 3 * 6 * (151_936 // 4) * 2
    assert gathered.received == 2 * 36 * 3 * message + logits
    assert ring.received == 2 * 36 * 2 * 3 * message // 4 + logits
    assert (gathered.exchanges, ring.exchanges) == (2 * 36 + 1, 4 * 36 + 1)
    alone = account(SHAPES["qwen3-8b"], 2, 2)
    assert (alone.received, alone.exchanges) == (0, 0)


def test_what_exchanges_cost() -> None:
    step = account(SHAPES["qwen3-8b"], 2, 2, gpus=4)
    free = replace(H200, link=float("inf"), exchange=0.0)
    assert step.bound(H200) - step.bound(free) == pytest.approx(1e3 * step.received / H200.link)
    starts = (step.estimate(H200) - step.bound(H200)) - (step.estimate(free) - step.bound(free))
    assert starts == pytest.approx(1e3 * step.exchanges * H200.exchange)


def test_gathering_wins_while_messages_are_small() -> None:
    few, many = (
        [account(SHAPES["llama-3.3-70b"], B, 0, gpus=8, ring=ring).estimate(H200) for ring in (False, True)]
        for B in (1, 256)
    )
    assert few[0] < few[1]
    assert many[0] > many[1]


@pytest.mark.parametrize("gpus", [2, 5])
def test_heads_that_cannot_be_shared(gpus: int) -> None:
    with pytest.raises(ValueError, match=f"{gpus} GPUs cannot share 9 heads, 3 heads of keys"):
        account(SHAPES["smollm2-135m"], 1, 0, gpus=gpus)


@settings(deadline=None)
@given(
    pieces=st.tuples(st.integers(1, 50), st.integers(0, 50)),
    start=st.integers(0, 60),
    window=st.sampled_from([None, 1, 7, 40]),
)
def test_attention_of_a_prompt_sees_what_is_before(
    pieces: tuple[int, int], start: int, window: int | None
) -> None:
    """In one piece or in two; a token sees itself."""
    config = replace(SHAPES["smollm2-135m"], windows=(window,) * 30)
    sees = sum(min(at + 1, window or at + 1) for at in range(start, start + sum(pieces)))
    parts = [prefill(config, pieces[0], start), prefill(config, pieces[1], start + pieces[0])]
    assert sum(flops(part, "attention") for part in parts) == 4 * 30 * sees * 9 * 64


@pytest.mark.parametrize("window", [None, 1, 700])
def test_a_prompt_of_one_token_is_a_step(window: int | None) -> None:
    config = replace(SHAPES["qwen3-8b"], windows=(window,) * 36)
    assert prefill(config, 1, start=999).kernels == account(config, 1, 0, context=1000).kernels


@pytest.mark.parametrize(
    ("gpus", "room"),
    [
        (1, 0),  # 141 GB of weights
        (2, 0.9 * 141e9 - 2 * 128_256 * 8192 - 2 * 69.5e9 / 2),
        (8, 0.9 * 141e9 - 2 * 128_256 * 8192 - 2 * 69.5e9 / 8),
    ],
)
def test_room_for_the_cache(gpus: int, room: float) -> None:
    """Of Llama 70B: 70.55e9 weights, 1.05e9 of them the embedding; 80 layers, 8 heads of 128."""
    per_token = 2 * 2 * 80 * (8 // gpus) * 128
    assert kv_tokens(SHAPES["llama-3.3-70b"], H200, gpus) == pytest.approx(room / per_token, rel=1e-3)
