"""DFlash and EAGLE-3: their drafts follow the distributions of a reference in every state of the engine."""

import math
import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.drafters import draft_limits, eagle3
from nanospec.drafters.hidden_states import CONTENDERS
from nanospec.drafters.policy import Choice
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.launch import forced
from nanospec.kernels.sampling import noise
from nanospec.kernels.speculation.proposal import Proposal, parents_of
from nanospec.kernels.speculation.trim import Estimates
from nanospec.kernels.table import Table
from nanospec.models.cpu import model_class
from nanospec.models.decoder import Model, new_states
from tests.drive import MODES, Job, make_engine, run, run_and_compare
from tests.nanospec.drafters.draft_reference import Reference
from tests.random_weights import hidden_state_drafter, write_drafter
from tests.ranks import weights_of
from tests.tiny import tiny_config, tiny_model

VOCAB = 30


def states_of(model: Model, text: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Return the hidden states [T, n * H] of a text in float64, computed in one pass."""
    table = Table.empty(1, len(text), 16, VOCAB, model.device)
    table.tokens[0, : len(text)] = torch.tensor(text)
    table.block_table.copy_(torch.arange(table.max_blocks))
    kept, states = new_states(model, len(text), layers)
    cache = model.allocate_kv_cache(table.max_blocks, 16)
    model.forward(Batch.from_chunks(table, [Chunk(0, 0, len(text))]), cache, states)
    return kept.double()


LEAST_CHANCE = 0.02  # some chains of random weights end at this, and some do not


class Checked:
    """Compares every proposal of a drafter with the reference.

    Attributes:
        compared: number of distributions that were compared.
        agreed: number of these from which C++, where logits are not visible, drafted the reference's token.
        unready: number of rows that got no drafts although they could use some.
    """

    def __init__(self, drafter: Any, reference: Reference, tolerance: float) -> None:
        self.drafter, self.reference, self.tolerance = drafter, reference, tolerance
        self.compared = self.agreed = self.unready = 0
        self.logits: dict[tuple[int, int], Tensor] = {}  # by request row and position
        self._propose, self._best = drafter.propose, drafter._best
        drafter.propose, drafter._best = self.propose, self.best

    def best(self, hidden: Tensor, table: Table, rows: Tensor, positions: Tensor) -> Tensor:
        logits = self.drafter.lm_head(hidden).float()
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        self.logits.update({place: logits[i] for i, place in reversed([*enumerate(places)])})
        return self._best(hidden, table, rows, positions)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        self.logits.clear()
        proposal = self._propose(table, rows, k)
        limits = draft_limits(table, rows, k)
        for b, n in enumerate(proposal.num_drafts.tolist()):
            assert n <= limits[b]
            self.unready += int(limits[b] > n == 0)
            if n:
                drafts, parents = (part[b, :n].tolist() for part in (proposal.drafts, parents_of(proposal)))
                self.check(table, int(rows[b]), drafts, parents)
                if not self.logits:
                    self.check_chance(table, int(rows[b]), drafts, min(int(limits[b]), 8))
        return proposal

    def check(self, table: Table, row: int, drafts: list[int], parents: list[int]) -> None:
        text, paths = table.tokens[row, : int(table.num_tokens[row])].tolist(), [list[int]()]
        for draft, parent in zip(drafts, parents, strict=True):
            paths.append([*paths[parent], draft])
        block = None
        if self.drafter.name == "dflash":
            block = self.reference.dflash(text, len(drafts))
        for node in {*parents}:
            depth = len(paths[node])
            logits = wanted = self.reference.eagle3(text, paths[node]) if block is None else block[depth]
            if self.logits:
                logits = self.logits[row, len(text) + depth]
                assert float((logits - wanted).abs().max()) < self.tolerance, (len(text), paths[node])
            likely, place = logits.topk(min(CONTENDERS, len(logits)))
            ids = self.reference.ids[place].int()
            log_e = noise.naive(int(table.seed[row]), len(text) + depth, ids)
            scores = (likely - table.temperature[row] * log_e).tolist()
            chosen = [d for d, parent in zip(drafts, parents, strict=True) if parent == node]
            if self.logits:
                score_of = dict(zip(ids.tolist(), scores, strict=True))  # some may be equal
                assert [score_of[d] for d in chosen] == sorted(scores, reverse=True)[: len(chosen)]
            self.agreed += int(ids[scores.index(max(scores))]) == chosen[0]
            self.compared += 1

    def check_chance(self, table: Table, row: int, drafts: list[int], most: int) -> None:
        """Check that a chain in C++ of at most `most` drafts ends because of `LEAST_CHANCE`."""
        text, n = table.tokens[row, : int(table.num_tokens[row])].tolist(), len(drafts)
        logits = [self.reference.eagle3(text, drafts[:j]) for j in range(n + 1)]
        chances = torch.stack(logits).softmax(1).amax(1).cumprod(0)
        assert chances[n - 1] > 0.8 * LEAST_CHANCE
        assert n == most or chances[n] < 1.25 * LEAST_CHANCE


def jobs_of(rng: random.Random, longest: int) -> list[Job]:
    """Return jobs that share 33 tokens: two blocks, and the token that entry 31 of EAGLE-3 depends on."""
    common, jobs = rng.choices(range(VOCAB), k=33), []
    for i, k in enumerate((None, None, 2, 0, None)):
        prompt = common * (i % 2) + rng.choices(range(VOCAB), k=(1, 2, 16, 17, 7)[i])
        given: dict[str, Any] = {
            "temperature": (0, 1, 6)[i % 3],
            "max_tokens": longest - 2 * (i % 3),
            "seed": i,
        }
        jobs.append(Job(prompt, SamplingParams(num_speculative_tokens=k, **given)))
    return jobs


CASES: dict[str, dict[str, Any]] = {
    "dflash": {"num_layers": 2},
    "dflash-few": {"vocab": 20, "attention_bias": True},
    "ngram+dflash": {"own_head": True, "vocab": 25, "reads": (3, 1, 2)},
    "eagle3": {"reads": (0, 2, 3)},
    "eagle3-few": {"vocab": 20, "own_head": True},
    "eagle3-qwen3": {"model_type": "qwen3", "norm_before_residual": True},
    "ngram+eagle3-tree": {"width": 2, "own_head": True, "attention_bias": True},
    "dflash-bfloat16": {"num_layers": 2, "attention_bias": True},
    "eagle3-few-bfloat16": {"vocab": 20},
    "eagle3-bfloat16": {"norm_before_residual": True, "own_head": True},
    "ngram+eagle3-bfloat16": {"vocab": 20},
    "dflash-triton": {"vocab": 20},
    "eagle3-triton": {"norm_before_residual": True, "own_head": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, "plain", marks=pytest.mark.long) if "triton" in case else (case, mode)
        for case, mode in zip(CASES, cycle(MODES))
    ],
)
def test_drafts_follow_the_reference(
    case: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test chunks, preemption, prefix hits, rows with their own K, and steps without drafts."""
    monkeypatch.setattr(eagle3, "LEAST_CHANCE", LEAST_CHANCE)
    fields, method, few = dict(CASES[case]), case.split("-")[0], "triton" in case
    config = tiny_config(vocab_size=VOCAB, head_dim=32, num_layers=1 if few else 3)
    width, dtype = fields.pop("width", 1), torch.bfloat16 if "bfloat16" in case else torch.float32
    weights = weights_of(config, dtype)
    folder = write_drafter(tmp_path, method.split("+")[-1], config, **fields)
    spec = {"method": method, "tree_width": width, "draft_model": str(folder)}
    options: dict[str, Any] = {"num_blocks": 8, "max_num_seqs": 3, "max_num_batched_tokens": 16, "min_n": 2}
    with forced("triton" if few else "auto"):
        model = model_class(config, dtype, "cpu")(config, dtype, "cpu", weights.__getitem__)
        engine = make_engine(model, (8, 5, 3)[(width == 1) + few], spec=spec, **options, **MODES[mode])
        drafter: Any = engine.worker.drafters[-1]
        if dtype == torch.float32:  # no unwritten entry is read; C++ reads whole blocks, but stores no NaN
            drafter.kv.fill_(math.nan)
        reference = Reference(
            folder, weights["model.embed_tokens.weight"], weights["lm_head.weight"],
            lambda text: states_of(model, text, drafter.hidden_state_layers),
        )  # fmt: skip
        checked = Checked(drafter, reference, 0.3 if dtype == torch.bfloat16 else 1e-4)  # products in 8 bits
        choose, rng = engine.policy.choose, random.Random(0)
        engine.worker._step.estimates = estimates = Estimates.empty(2, 3, "cpu")[1]

        def choose_randomly(limits: Any, *args: Any) -> Choice:
            if rng.random() > 0.7:
                return Choice(0, 0)
            estimates.min_match.fill_(rng.randrange(5))
            return choose(limits, *args)

        engine.policy.choose = choose_randomly  # type: ignore
        if few:
            run(engine, jobs_of(random.Random(3), 6)[:2])
            assert checked.compared > 5
            return
        for longest in (38, 12):  # the second run uses the prefix cache
            run_and_compare(engine, model, jobs_of(random.Random(3), longest))
    assert checked.compared > 100
    assert checked.agreed > 0.95 * checked.compared
    assert checked.unready <= ("eagle3" in case)  # before a prompt of one token, which has no states yet
    assert min(engine.metrics.num_preemptions, engine.metrics.num_cached_tokens) > 0


def test_drafts_of_one_row_in_triton() -> None:
    drafter: Any = hidden_state_drafter("dflash", tiny_model())
    table, hidden = Table.empty(1, 64, 16, 64, "cpu"), torch.randn(4, 32)
    table.temperature.fill_(3.0), table.seed.fill_(7)
    rows, positions = torch.zeros(4, dtype=torch.int32), torch.arange(9, 13)
    expected = drafter._best(hidden, table, rows, positions)
    with forced("triton"):
        assert torch.equal(drafter._best(hidden, table, rows, positions), expected)
