"""Automatic K in the running engine: it exploits repetition, drops failing drafts, and keeps outputs."""

import json
from unittest.mock import Mock

import pytest
import torch

from nanospec.config import SamplingParams
from nanospec.device.step import _truncate
from nanospec.drafters.estimates import RowProposal
from nanospec.engine.locking import SharedEngine
from nanospec.kernels import NO_DRAFTER
from nanospec.kernels.speculation.proposal import Proposal
from tests.drive import Job, make_engine, run_and_compare
from tests.kernels.batches import ints
from tests.tiny import tiny_model


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_automatic_k_speculates_without_changing_output(eager: bool) -> None:
    jobs = [
        Job([3, 1, 3, 1], SamplingParams(temperature=0, max_tokens=80, logit_bias={7: 60.0})),
        Job([2, 9, 4], SamplingParams(temperature=1.0, seed=2, max_tokens=60)),
    ]
    model = tiny_model()
    engine = make_engine(model, "auto", max_num_seqs=2, enforce_eager=eager)
    requests = run_and_compare(engine, model, jobs)
    assert requests[0].stats.tokens_per_step > 2
    report = json.loads(json.dumps(SharedEngine(engine).report()))
    assert ("step_ms_by_tokens" in report, "step_ms_by_batch_and_k" in report) == (eager, not eager)


def test_policy_gets_the_proposal_of_each_row() -> None:
    count_drafts, drafts = Mock(return_value=[2, 0]), torch.zeros(2, 4, dtype=torch.int32)
    proposal = Proposal(drafts, ints(3, 0), drafts, ints(5, -5), ints(1, NO_DRAFTER))
    assert _truncate(ints(7, 4), proposal, count_drafts).num_drafts.tolist() == [2, 0]
    count_drafts.assert_called_once_with([RowProposal(7, 1, 3, 5), RowProposal(4, 0, 0, 0)])
