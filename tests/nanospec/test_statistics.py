"""Outputs follow the exact distribution with every drafter. `make statistics` also runs the marked test: all
drafting setups, all sampling parameters.

The target and its noisy copy, the draft model, have 5 tokens. All requests have the same prompt and at most 4
output tokens: few enough to count all outputs."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec import SamplingParams
from nanospec.drafters import Drafter, SimpleDrafter, draft_limits, make_proposal
from nanospec.engine.engine import Engine
from nanospec.kernels.sampling import sample
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.drive import MODES, Job, K, make_engine, run
from tests.exact import Logits, Output, combined_p, fit, joint, least_p, logits_by_output
from tests.tiny import checkpoint

VOCAB, LENGTH = 5, 4
PROMPT = [0, 3, 2, 2, 4, 1, 0, 1, 3, 0, 4, 1, 2, 0, 3, 2, 4, 1, 0]  # longer than a block: its K/V are shared
BOUND = 1e-6  # seeds are fixed, so results are reproducible


class Models(NamedTuple):
    """The target's folder, the models, and `bigram` [V, V], logits after each token for custom drafters."""

    folder: Path
    model: Model
    draft: Model
    bigram: Tensor


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, noisy = (checkpoint(folder / name, "llama", **sizes) for name in ("target", "draft"))
    weights, generator = load_file(noisy / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        weights[name] = weight + 0.12 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, noisy / "model.safetensors", metadata={"format": "pt"})
    model, draft = (load_model(path, torch.float32, torch.device("cpu")) for path in (target, noisy))
    bigram = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    return Models(target, model, draft, bigram)


@pytest.fixture(scope="module")
def logits(models: Models) -> Logits:
    return logits_by_output(models.folder, PROMPT, VOCAB, LENGTH)


class BigramDrafter(SimpleDrafter):
    """A custom drafter of the likeliest tokens after the last one."""

    def __init__(self, bigram: Tensor) -> None:
        self.after = bigram.argmax(1).tolist()

    def draft(self, tokens: list[int], k: int) -> Iterator[int]:
        token = tokens[-1]
        for _ in range(k):
            token = self.after[token]
            yield token


class SamplingDrafter(Drafter):
    """A custom drafter that samples with each request's parameters from `bigram`, with its own noise."""

    def __init__(self, bigram: Tensor) -> None:
        self.bigram = bigram

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        own, index = table._replace(seed=table.seed ^ 0x5EED), rows.clamp(min=0)
        num_drafts, last = draft_limits(table, rows, k), table.num_tokens[index] - 1
        token, drafts = table.tokens[index, last.clamp(min=0)], list[Tensor]()
        for j in range(k):
            batch = lay_out(table, rows, last + j, (num_drafts > j).int(), 1)
            if not batch.num_tokens:
                break
            ids = sample.sample(self.bigram[token[batch.row_of_token]], own, batch).clamp(min=0)
            token = torch.where(num_drafts > j, ids[batch.last_tokens()], 0)
            drafts.append(token)
        drafts += [torch.zeros_like(rows)] * (k - len(drafts))
        return make_proposal(torch.stack(drafts, 1), num_drafts)


class Setup(NamedTuple):
    """A drafting setup: its method or a custom drafter, K, and the width of trees."""

    method: str = ""
    k: K = 3
    tree_width: int = 1
    custom: type[BigramDrafter] | type[SamplingDrafter] | None = None


SETUPS: dict[str, Setup] = {
    "none": Setup(k=None), "ngram": Setup("ngram", "auto"), "ngram tree": Setup("ngram", 6, 3),
    "draft": Setup("draft"), "dflash": Setup("dflash"), "eagle3": Setup("eagle3", 6),
    "ngram+draft": Setup("ngram+draft"), "ngram tree+draft": Setup("ngram+draft", 4, 2),
    "ngram tree+dflash": Setup("ngram+dflash", 5, 2), "custom": Setup(custom=BigramDrafter),
    "custom sampling": Setup(custom=SamplingDrafter),
}  # fmt: skip
SAMPLING: dict[str, dict[str, Any]] = {  # parameters other than temperature
    "nothing": {},
    "filters": {"top_k": 4, "top_p": 0.9, "min_p": 0.03},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "all": {
        "top_k": 4, "top_p": 0.93, "presence_penalty": 0.5, "frequency_penalty": -0.4,
        "repetition_penalty": 0.8, "logit_bias": {0: 1.0, 4: -1.0}, "stop_token_ids": [3], "min_tokens": 2,
    },
}  # fmt: skip
SOME_SETUPS = "none", "draft", "ngram tree+draft", "custom sampling", "ngram tree"
SOME_SAMPLING = ("nothing", 1.0), ("filters", 1.7), ("penalties", 0.6), ("all", 1.0)


def params_for(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=LENGTH, **SAMPLING[name])


def engine_for(models: Models, name: str, **options: Any) -> Engine:
    method, k, tree_width, custom = SETUPS[name]
    spec: dict[str, Any] = {"tree_width": tree_width}
    given: dict[str, Any] = {"draft_model": models.draft}
    if custom is not None:
        given["drafter"] = custom(models.bigram)
    elif method:
        spec["method"] = method
    min_n = 3 if "+" in method else 1
    options |= {"max_num_seqs": 256, "max_model_len": 32}
    return make_engine(models.model, k, min_n=min_n, spec=spec, **given, **options)


class Drawn(NamedTuple):
    """Counts of outputs, and the numbers of drafted and accepted tokens."""

    outputs: Counter[Output]
    drafted: int
    accepted: int


def draw(engine: Engine, cells: Sequence[SamplingParams], samples: int, first_seed: int = 0) -> list[Drawn]:
    """Draw `samples` outputs for each of the cells in mixed batches, each request with its own seed."""
    seeds = itertools.count(first_seed)
    jobs = [Job(PROMPT, replace(cell, seed=next(seeds))) for _ in range(samples) for cell in cells]
    requests, drawn = run(engine, jobs), []
    for own in (requests[c :: len(cells)] for c in range(len(cells))):
        stats = [request.stats for request in own]
        drafted, accepted = sum(each.num_drafted for each in stats), sum(each.num_accepted for each in stats)
        drawn.append(Drawn(Counter(tuple(request.output_ids) for request in own), drafted, accepted))
    return drawn


@pytest.mark.slow
def test_outputs_follow_exact_distribution(models: Models, logits: Logits) -> None:
    """Test setups that differ in sampling, layout or sharing, and all setups together."""
    cells = list(itertools.starmap(params_for, SOME_SAMPLING))
    counts = [Counter[Output]() for _ in cells]
    for i, setup in enumerate(SOME_SETUPS):
        mode = "as-on-gpu" if i % 2 else "plain"
        result = draw(engine_for(models, setup, **MODES[mode]), cells, 28, i * 10**6)
        fits = [fit(drawn.outputs, joint(logits, PROMPT, cell)) for drawn, cell in zip(result, cells)]
        assert combined_p(fits) > BOUND, (setup, fits)
        drafted, accepted = (sum(column) for column in list(zip(*result))[1:])
        assert 0.1 * drafted <= accepted <= 0.9 * drafted, (setup, drafted, accepted)
        assert setup == "none" or accepted > 50
        for counter, drawn in zip(counts, result, strict=True):
            counter.update(drawn.outputs)
    for counter, cell in zip(counts, cells, strict=True):
        assert least_p(counter, joint(logits, PROMPT, cell)) > BOUND, cell


@pytest.mark.statistics
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_setup_with_all_sampling_params(setup: str, models: Models, logits: Logits) -> None:
    cells = [params_for(*each) for each in itertools.product(SAMPLING, (0.6, 1.0, 1.7))]
    on_host = SETUPS[setup].custom is BigramDrafter  # such drafts cannot be captured
    for i, mode in enumerate(["plain"] if on_host else MODES):
        first_seed = (len(MODES) * list(SETUPS).index(setup) + i) * 10**9
        result = draw(engine_for(models, setup, **MODES[mode]), cells, 40, first_seed)
        fits = [fit(drawn.outputs, joint(logits, PROMPT, cell)) for drawn, cell in zip(result, cells)]
        assert combined_p(fits) > BOUND, fits
        drafted, accepted = (sum(column) for column in list(zip(*result))[1:])
        assert 0.05 * drafted <= accepted <= 0.95 * drafted
