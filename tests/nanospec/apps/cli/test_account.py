"""The account of a pass: split over GPUs it is the same work and what they exchange; prompts; the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanospec.apps.cli.account import Machine, Step, account, kv_tokens, prefill
from nanospec.apps.cli.shapes import SHAPES
from nanospec.kernels.layer.norm import Norm
from nanospec.kernels.layer.stream import embed
from nanospec.kernels.layer.vocab_parallel import Summed, Vocabulary

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
    """Qwen3-8B: 36 layers, 4096 values per token, 151,936 logits; 2 x 3 tokens in bf16 over 4 GPUs, each of
    which has 19 chunks of 2048 logits."""
    gathered, sliced, whole = (
        account(SHAPES["qwen3-8b"], 2, 2, gpus=4, slices=slices, whole=whole)
        for slices, whole in ((False, False), (True, False), (False, True))
    )
    message, candidates, logits = 6 * 4096 * 2, 6 * 19 * 8, 6 * (151_936 // 4) * 2
    assert gathered.received == (2 * 36 + 1) * 3 * message + 3 * candidates
    assert whole.received == (2 * 36 + 1) * 3 * message + 3 * logits
    assert sliced.received == 2 * 36 * 2 * 3 * (2 * 4096 * 2) + 3 * message + 3 * candidates  # 8 rows for 6
    assert gathered.exchanges == whole.exchanges == 2 * 36 + 2
    assert sliced.exchanges == 4 * 36 + 2
    alone = account(SHAPES["qwen3-8b"], 2, 2)
    assert (alone.received, alone.exchanges) == (0, 0)


class Counted(TorchDispatchMode):
    """What a rank does: kernels that a GPU would start for torch's operations, exchanges, bytes received."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.kernels, self.exchanges, self.received = ranks, 0, 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name()
        fills = name == "aten::constant_pad_nd" and any(args[1])  # and copies
        free = op.is_view or "empty" in name or name == "aten::promote_types"
        self.kernels += 0 if free else 1 + fills
        return op(*args, **(kwargs or {}))

    def arrived(self, message: Tensor) -> None:
        self.exchanges += 1
        self.received += (self.ranks - 1) * message.nbytes

    def gather(self, x: Tensor) -> Tensor:
        self.arrived(x)
        return torch.empty(self.ranks, *x.shape, dtype=x.dtype)

    def exchange(self, x: Tensor) -> Tensor:
        self.arrived(x[0])
        return x.new_empty(x.shape)


@pytest.mark.parametrize("T", [1, 29, 32, 172, 173, 176, 603])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_what_is_exchanged_is_what_the_engine_exchanges(gpus: int, T: int) -> None:
    """Passes of Qwen3-8B, on both sides of where sums are added in slices."""
    kernels = {kernel.name: kernel for kernel in account(SHAPES["qwen3-8b"], T, 0, gpus=gpus).kernels}
    product = torch.empty(T, 4096, dtype=torch.bfloat16)
    with Counted(gpus) as counted:
        Summed(None, counted.gather, counted.exchange, gpus).parts(product)
    sums, each = kernels["sums"], 2 * 36
    assert (sums.exchanges, sums.received) == (each * counted.exchanges, each * counted.received)
    assert sums.launches == each * (counted.kernels + 1)  # and residual_add

    ids, norm = torch.zeros(T, dtype=torch.int32), Norm(torch.ones(4096), 1e-6)
    with Counted(gpus) as counted:
        embed(ids, Vocabulary(product[:1], counted.gather, 0, 151_936), norm)
    rows = kernels["rows of all"]
    assert (rows.exchanges, rows.received) == (counted.exchanges, counted.received)
    assert rows.launches == counted.kernels - 1  # that of `_embed` is counted for one GPU, too


@pytest.mark.parametrize(("model", "gpus"), [(model, gpus) for model in LARGE[1:] for gpus in (4, 8)])
def test_the_engine_adds_in_slices_where_that_is_faster(model: str, gpus: int) -> None:
    """By the account, within 15 % of the number of tokens."""

    def ms(tokens: int, slices: bool | None) -> float:
        return account(SHAPES[model], tokens, 0, gpus=gpus, slices=slices).estimate(H200)

    first = next(T for T in range(1, 4097) if ms(T, True) < ms(T, False))
    for T in (1, int(0.85 * first)):
        assert ms(T, None) == ms(T, False) < ms(T, True)
    for T in (int(1.15 * first), 4096):
        assert ms(T, None) == ms(T, True) < ms(T, False)


def test_what_exchanges_cost() -> None:
    step = account(SHAPES["qwen3-8b"], 2, 2, gpus=4)
    free = replace(H200, link=float("inf"), exchange=0.0)
    assert step.bound(H200) - step.bound(free) == pytest.approx(1e3 * step.received / H200.link)
    starts = (step.estimate(H200) - step.bound(H200)) - (step.estimate(free) - step.bound(free))
    assert starts == pytest.approx(1e3 * step.exchanges * H200.exchange)


@pytest.mark.parametrize("gpus", [2, 5])
def test_heads_that_cannot_be_shared(gpus: int) -> None:
    with pytest.raises(ValueError, match=f"{gpus} GPUs cannot share 9 heads, 3 heads of keys"):
        account(SHAPES["smollm2-135m"], 1, 0, gpus=gpus)


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
        (2, 0.9 * 141e9 - 2 * 70.55e9 / 2),
        (8, 0.9 * 141e9 - 2 * 70.55e9 / 8),
    ],
)
def test_room_for_the_cache(gpus: int, room: float) -> None:
    """Of Llama 70B: 70.55e9 weights, 80 layers, 8 heads of 128."""
    per_token = 2 * 2 * 80 * (8 // gpus) * 128
    assert kv_tokens(SHAPES["llama-3.3-70b"], H200, gpus) == pytest.approx(room / per_token, rel=1e-3)
