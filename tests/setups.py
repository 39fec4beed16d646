"""A small vocabulary, all drafting setups on it, and sampling parameters, for tests of distributions.

The target and its noisy copy, the draft model, are checkpoints that transformers can load too. All requests
have the same prompt and at most `LENGTH` output tokens: few enough to count all outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.drafters import Drafter, SimpleDrafter, draft_limits, make_proposal
from nanospec.drafters.medusa import Heads
from nanospec.engine.engine import Engine
from nanospec.kernels.sampling.sample import sample
from nanospec.kernels.speculation.proposal import Proposal, lay_out_text
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.models.weights import load_model
from tests.drive import Job, K, make_engine, run
from tests.exact import Output
from tests.random_weights import random_heads
from tests.tiny import checkpoint

VOCAB, LENGTH = 5, 4
PROMPT = [0, 3, 2, 2, 4, 1, 0, 1, 3, 0, 4, 1, 2, 0, 3, 2, 4, 1, 0]  # longer than a block: its K/V are shared
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Models(NamedTuple):
    """The target's folder, the models, and `bigram` [V, V], logits after each token for custom drafters."""

    folder: Path
    model: Model
    draft: Model
    heads: Heads
    bigram: Tensor


def make_models(folder: Path) -> Models:
    target = checkpoint(folder / "target", "llama", **_SIZES)
    blurred = checkpoint(folder / "draft", "llama", **_SIZES)
    weights, generator = load_file(blurred / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        weights[name] = weight + 0.12 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, blurred / "model.safetensors", metadata={"format": "pt"})
    model, draft = (load_model(path, torch.float32, torch.device("cpu")) for path in (target, blurred))
    bigram = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    return Models(target, model, draft, random_heads(model, 3), bigram)


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
        token, drafts, logits = table.tokens[index, last.clamp(min=0)], list[Tensor](), list[Tensor]()
        for j in range(k):
            batch = lay_out_text(table, rows, last + j, (num_drafts - j).clamp(0, 1), 1)
            logits.append(self.bigram[token])
            token = sample(logits[-1], own, batch).clamp(min=0)
            drafts.append(token)
        return make_proposal(torch.stack(drafts, 1), num_drafts)._replace(logits=torch.stack(logits, 1))


class Fork(Drafter):
    """A custom drafter of a tree: the two likeliest tokens after the last one, and two after each of them."""

    makes_trees = True

    def __init__(self, bigram: Tensor) -> None:
        self.likely = bigram.topk(2).indices.int()

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        first = self.likely[table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]]
        drafts = torch.cat((first, self.likely[first].flatten(1)), 1)[:, :k]
        parents = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)[:k].expand_as(drafts).contiguous()
        return make_proposal(drafts, draft_limits(table, rows, k), parents)


class Setup(NamedTuple):
    """A drafting setup: fields of `SpecConfig`, K, and optionally a custom drafter."""

    fields: dict[str, Any]
    k: K = 3
    custom: type[BigramDrafter] | type[SamplingDrafter] | type[Fork] | None = None
    before: tuple[str, ...] = ()


SETUPS: dict[str, Setup] = {
    "none": Setup({}, None),
    "ngram": Setup({"method": "ngram"}),
    "ngram, auto": Setup({"method": "ngram"}, "auto"),
    "ngram tree": Setup({"method": "ngram", "tree_width": 3}, 6),
    "draft": Setup({"method": "draft"}),
    "draft, K = 1": Setup({"method": "draft"}, 1),
    "medusa": Setup({"method": "medusa"}),
    "medusa tree": Setup({"method": "medusa", "tree_width": 3}, 6),
    "ngram+draft": Setup({"method": "ngram+draft", "prompt_lookup_min": 3}),
    "ngram tree+draft": Setup({"method": "ngram+draft", "prompt_lookup_min": 3, "tree_width": 2}, 4),
    "ngram+medusa": Setup({"method": "ngram+medusa", "prompt_lookup_min": 3}),
    "ngram tree+medusa tree": Setup({"method": "ngram+medusa", "prompt_lookup_min": 3, "tree_width": 2}, 5),
    "custom": Setup({}, 3, BigramDrafter),
    "custom sampling": Setup({}, 3, SamplingDrafter),
    "custom tree": Setup({"tree_width": 2}, 6, Fork),
    "ngram+custom": Setup({"prompt_lookup_min": 3}, 3, BigramDrafter, before=("ngram",)),
    "ngram+custom sampling": Setup({"prompt_lookup_min": 3}, 3, SamplingDrafter, before=("ngram",)),
}

# Sampling parameters other than temperature.
SAMPLING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "frequency below 0": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "stop": {"stop_token_ids": [2]},
    "min_tokens": {"stop_token_ids": [1, 2], "min_tokens": 2},
    "filters": {"top_k": 4, "top_p": 0.9, "min_p": 0.03},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "all": {
        "top_k": 4,
        "top_p": 0.93,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "repetition_penalty": 0.8,
        "logit_bias": {0: 1.0, 4: -1.0},
        "stop_token_ids": [3],
        "min_tokens": 2,
    },
}
TEMPERATURES = (0.6, 1.0, 1.7)
LOSSLESS = ("exact", "rejection")


def rules(setup: str) -> tuple[str, ...]:
    """Return the acceptance rules to test; without drafts there is only one."""
    return LOSSLESS if SETUPS[setup].k is not None else LOSSLESS[:1]


def params_for(name: str, temperature: float, rule: str) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=LENGTH, acceptance=rule, **SAMPLING[name])


def engine_for(models: Models, name: str, rule: str = "rejection", **options: Any) -> Engine:
    """Return an engine whose requests choose between "exact" and `rule`."""
    setup = SETUPS[name]
    fields, given = {**setup.fields, "acceptance": rule}, dict[str, Any]()
    methods = setup.fields.get("method", "")
    if "draft" in methods:
        given["draft_model"] = models.draft
    if "medusa" in methods:
        given["heads"] = models.heads
    if setup.custom is not None:
        given["drafter"] = [*setup.before, setup.custom(models.bigram)]
    settings = {"max_num_seqs": 256, "max_model_len": 32, **options}
    return make_engine(models.model, setup.k, spec=fields, **given, **settings)


class Drawn(NamedTuple):
    """Counts of outputs, and the numbers of drafted and accepted tokens."""

    outputs: Counter[Output]
    drafted: int
    accepted: int


def draw(
    engines: Sequence[Engine], cells: Sequence[SamplingParams], samples: int, first_seed: int = 0
) -> list[Drawn]:
    """Draw `samples` outputs for each of the cells in mixed batches, each request with its own seed, using
    the engines in turn."""
    counts, sums = [Counter[Output]() for _ in cells], [[0, 0] for _ in cells]
    each = max(2048 // len(cells), 1)
    for start in range(0, samples, each):
        numbers = [(c, i) for i in range(start, min(start + each, samples)) for c in range(len(cells))]
        jobs = [Job(PROMPT, replace(cells[c], seed=first_seed + c * samples + i)) for c, i in numbers]
        requests = run(engines[start // each % len(engines)], jobs)
        for (c, _), request in zip(numbers, requests, strict=True):
            counts[c][tuple(request.output_ids)] += 1
            sums[c][0] += request.stats.num_drafted
            sums[c][1] += request.stats.num_accepted
    return [Drawn(own, *both) for own, both in zip(counts, sums, strict=True)]
