"""Results are bitwise independent of how a text is split into forward passes: drafts change the sizes of a
concurrent prompt's chunks, and which requests are preempted and recomputed.

Compares the K/V of every position, not only tokens, in the interpreter with sums in the order of tensor
cores."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.kernels import launch
from nanospec.kernels.layer import product, tiling
from tests.drive import Job, known_text_drafter, make_engine, run, run_alone
from tests.tiny import tiny_model

VOCAB = 64
Trace = tuple[list[int], Tensor, int]


MODEL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 80, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "qk_norm": True, "windows": (20, None), "attention_softcap": 3.0,
}  # fmt: skip


def jobs() -> list[Job]:
    """Return three jobs, of which one has a long prompt that must wait."""
    rng = random.Random(3)
    return [
        Job(rng.choices(range(VOCAB), k=n), SamplingParams(temperature=temperature, max_tokens=limit, seed=5))
        for n, limit, temperature in ((13, 6, 0), (28, 7, 0), (9, 3, 1))
    ]


def traces(k: int, texts: list[list[int]], num_blocks: int | None, budget: int) -> list[Trace]:
    """Run the jobs with `k` drafts from `texts`, every third of them wrong. Return for each its text, the K/V
    of all but its last token [layers, 2, Hkv, n, D], and how often it was preempted."""
    drafter = known_text_drafter(texts, wrong=lambda at: at % 3 == 0) if k else None
    engine = make_engine(
        tiny_model(**MODEL), k or None, drafter=drafter, num_blocks=num_blocks, max_model_len=64,
        max_num_seqs=3, max_num_batched_tokens=budget, enforce_eager=True, async_scheduling=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    worker, kept = engine.worker, {}
    table, cache, release = worker.table, worker.kv_cache, worker.release

    def keep(row: int) -> None:
        n = int(table.num_tokens[row])
        pages = cache[:, :, :, table.block_table[row].long()].flatten(3, 4)
        kept[tuple(table.tokens[row, :n].tolist())] = pages[:, :, :, : n - 1].clone()
        release(row)

    worker.release = keep  # type: ignore[method-assign]
    result = [(r.prompt_ids + r.output_ids, r.num_preemptions) for r in run(engine, jobs())]
    return [(text, kept[tuple(text)], preempted) for text, preempted in result]


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dot")
def test_kv_cache_is_bitwise_independent_of_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of more than 64 columns have several parts."""
    monkeypatch.setattr(product, "choose_tiling", tiling.choose_tiling.__wrapped__)  # uncached
    monkeypatch.setattr(tiling, "MAX_UNSPLIT_K", 64)
    monkeypatch.setattr(tiling, "MIN_PART_K", 32)
    assert product.choose_tiling(1, 128, 80, launch.GPUS["sm_90"], 4, 4).parts > 1
    with launch.forced("triton"):
        off = traces(0, [], None, 256)
        texts = [text for text, _, _ in off]
        in_chunks, preempted = traces(3, texts, None, 17), traces(3, texts, 4, 48)
    alone = run_alone(tiny_model(**MODEL), jobs(), max_model_len=64)  # without Triton
    assert texts == [job.prompt + outcome.token_ids for job, outcome in zip(jobs(), alone, strict=True)]
    assert not any(count for _, _, count in in_chunks)
    assert any(count for _, _, count in preempted)
    for (text, kv, _), *result in zip(off, in_chunks, preempted, strict=True):
        assert torch.isfinite(kv).all()
        for its_text, its_kv, _ in result:
            assert its_text == text
            differ = (its_kv != kv).any(-1).nonzero()
            assert not len(differ), f"{len(differ)} vectors differ, first {differ[0].tolist()}"
