"""Results are bitwise independent of how a text is split into forward passes: drafts change the sizes of a
concurrent prompt's chunks, and which requests are preempted and recomputed.

Compares the K/V of every position, not only tokens, in the interpreter with sums in the order of tensor
cores.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.kernels import launch
from nanospec.kernels.layer import product
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, oracle, run, run_alone, use_drafter
from tests.tiny import tiny_model

VOCAB = 64


class Trace(NamedTuple):
    """A request's text, and the K/V of all but its last token: [layers, 2, Hkv, n, D]."""

    text: list[int]
    kv: Tensor
    preempted: int


def model() -> Model:
    return tiny_model(
        vocab_size=VOCAB, hidden_size=112, num_heads=2, num_kv_heads=1, head_dim=32, qk_norm=True,
        windows=(20, None), attention_softcap=3.0,
    )  # fmt: skip


def jobs() -> list[Job]:
    """Return three jobs, of which one has a long prompt that must wait."""
    rng = random.Random(3)

    def job(length: int, max_tokens: int, temperature: float = 0.0) -> Job:
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        return Job(prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5))

    return [job(13, 6), job(28, 7), job(9, 3, temperature=1.0)]


def traces(k: int, texts: list[list[int]] | None, num_blocks: int | None, budget: int) -> list[Trace]:
    """Run the jobs with `k` drafts from `texts`, every third of them wrong."""
    engine = make_engine(
        model(), k or None, num_blocks=num_blocks, max_model_len=64, max_num_seqs=3,
        enforce_eager=True, async_scheduling=False, enable_prefix_caching=False,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    if texts is not None:
        use_drafter(engine, oracle(texts, wrong=lambda at: at % 3 == 0))
    worker, kept = engine.worker, {}
    table, cache, release = worker.table, worker.kv_cache, worker.release

    def keep(row: int) -> None:
        n = int(table.num_tokens[row])
        pages = cache[:, :, :, table.block_table[row].long()].flatten(3, 4)
        kept[tuple(table.tokens[row, :n].tolist())] = pages[:, :, :, : n - 1].clone()
        release(row)

    worker.release = keep  # type: ignore[method-assign]
    requests = run(engine, jobs())
    result = [(r.prompt_ids + r.output_ids, r.num_preemptions) for r in requests]
    return [Trace(text, kept[tuple(text)], preempted) for text, preempted in result]


@pytest.fixture
def split_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split products of more than 64 columns into parts."""
    product.choose_tiling.cache_clear()
    monkeypatch.setattr(product, "MAX_UNSPLIT_K", 64)
    monkeypatch.setattr(product, "MIN_PART_K", 32)
    yield
    product.choose_tiling.cache_clear()


@pytest.mark.usefixtures("ordered_dot", "split_products")
def test_kv_cache_is_bitwise_independent_of_speculation() -> None:
    assert product.choose_tiling(1, 128, 112, "sm_90", 4).parts > 1
    with launch.forced("triton"):
        off = traces(0, None, None, 256)
        texts = [trace.text for trace in off]
        in_chunks, preempted = traces(3, texts, None, 17), traces(3, texts, 4, 48)
    alone = run_alone(model(), jobs(), max_model_len=64)  # without Triton
    assert texts == [job.prompt + outcome.token_ids for job, outcome in zip(jobs(), alone, strict=True)]
    assert not any(trace.preempted for trace in in_chunks)
    assert any(trace.preempted for trace in preempted)
    for expected, *result in zip(off, in_chunks, preempted, strict=True):
        assert torch.isfinite(expected.kv).all()
        for got in result:
            assert got.text == expected.text
            differ = (got.kv != expected.kv).any(-1).nonzero()
            assert not len(differ), f"{len(differ)} vectors differ, first {differ[0].tolist()}"
