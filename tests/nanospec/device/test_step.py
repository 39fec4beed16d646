"""Launches and memory of a captured step, counted on `meta` tensors."""

from __future__ import annotations

import torch

from nanospec.config import SpecConfig
from nanospec.device.graphs import StepGraphs
from nanospec.device.step import Step, _truncate
from nanospec.drafters.estimates import RowProposal
from nanospec.kernels import NO_DRAFTER
from nanospec.kernels.speculation.proposal import Proposal
from tests.dry import DryRun, dry_step, meta_model
from tests.kernels.batches import ints
from tests.tiny import tiny_config

VOCABULARY = 151936


ROWS = torch.empty(8, dtype=torch.int32, device="meta")


def step_of(num_layers: int) -> Step:
    config = tiny_config(num_layers=num_layers, vocab_size=VOCABULARY, head_dim=64)
    return dry_step(meta_model(config), SpecConfig(num_speculative_tokens=4), 8)


def test_launches_of_a_step() -> None:
    """After a warm-up as before a real capture."""
    layer = ["_gemm", "_rope_cache", "_attend", "_gemm", "_gemm", "_gemm"]
    end = ["_residual_add", "_gemm", "_scan", "_finish", "_commit"]
    step = step_of(2)
    for k in (0, 4):
        with DryRun():
            step(ROWS, k)
        with DryRun() as run:
            step(ROWS, k)
        begin = ["_propose"] * bool(k) + ["_lay_out", "index_select", "embedding", "_residual_add"]
        assert run.launches == [*begin, *layer, *layer, *end]


def test_captures_share_logits() -> None:
    """Captures keep one buffer of logits and a few numbers per row alive."""
    kept = {}
    for ks in ([4], [1, 2, 3, 4]):
        step = step_of(1)
        graphs = StepGraphs(step, torch.device("meta"), 8, ks)
        with DryRun():
            graphs.capture_all()  # persistent allocations
        graphs.captures.clear()
        with DryRun() as run:
            step.share_logits(graphs.max_tokens)
            graphs.capture_all()
        results = [capture.result for capture in graphs.captures.values()]
        assert len({result.logits.untyped_storage()._cdata for result in results}) == 1
        kept[len(results)] = run.alive - graphs.max_tokens * VOCABULARY * 2
    assert all(0 < size < 300 * 5 * number for number, size in kept.items())
    assert len(kept) == 2


def test_step_larger_than_shared_logits_allocates() -> None:
    step = step_of(1)
    step.share_logits(8)
    for k, own in ((0, False), (1, True)):
        with DryRun():
            result = step(ROWS, k)
        shared = result.logits.untyped_storage()._cdata == step._logits.untyped_storage()._cdata
        assert shared is not own


def test_truncate_passes_proposals_to_policy() -> None:
    offered: list[RowProposal] = []

    def count_drafts(offers: list[RowProposal]) -> list[int]:
        offered.extend(offers)
        return [2, 0]

    drafts = torch.zeros(2, 4, dtype=torch.int32)
    proposal = Proposal(drafts, ints(3, 0), drafts, ints(5, 0), ints(1, NO_DRAFTER))
    assert _truncate(ints(7, 4), proposal, count_drafts).num_drafts.tolist() == [2, 0]
    assert offered == [RowProposal(7, 1, 3, 5), RowProposal(4, 0, 0, 0)]
