"""A small vocabulary, every way of guessing on it, and what may be asked: for tests of distributions.

The target and a blurred copy, the draft model, are checkpoints that transformers can load too. All requests
have one prompt, and outputs of at most `LENGTH` tokens: few enough to count all of them.
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
from nanospec.drafters import Drafter, SimpleDrafter, make_proposal, room
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
PROMPT = [0, 3, 2, 2, 4, 1, 0, 1, 3, 0, 4, 1, 2, 0, 3, 2, 4, 1, 0]  # more than a page: its K/V are shared
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class World(NamedTuple):
    """The target's folder, and what guesses for it. `said` [V, V]: what it says behind each token alone."""

    folder: Path
    model: Model
    draft: Model
    heads: Heads
    said: Tensor


def make_world(folder: Path) -> World:
    target = checkpoint(folder / "target", "llama", **_SIZES)
    blurred = checkpoint(folder / "draft", "llama", **_SIZES)
    weights, generator = load_file(blurred / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        weights[name] = weight + 0.12 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, blurred / "model.safetensors", metadata={"format": "pt"})
    model, draft = (load_model(path, torch.float32, torch.device("cpu")) for path in (target, blurred))
    said = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    return World(target, model, draft, random_heads(model, 3), said)


class Likely(SimpleDrafter):
    """A user's: what is likeliest behind the last token."""

    def __init__(self, said: Tensor) -> None:
        self.after = said.argmax(1).tolist()

    def draft(self, tokens: list[int], k: int) -> Iterator[int]:
        token = tokens[-1]
        for _ in range(k):
            token = self.after[token]
            yield token


class Dice(Drafter):
    """A user's: drawn, as each request asks, from a distribution of its own with noise of its own."""

    def __init__(self, said: Tensor) -> None:
        self.said = said

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        own, index = table._replace(seed=table.seed ^ 0x5EED), rows.clamp(min=0)
        wanted, last = room(table, rows, k), table.num_tokens[index] - 1
        token, drafts, logits = table.tokens[index, last.clamp(min=0)], list[Tensor](), list[Tensor]()
        for j in range(k):
            batch = lay_out_text(table, rows, last + j, (wanted - j).clamp(0, 1), 1)
            logits.append(self.said[token])
            token = sample(logits[-1], own, batch).clamp(min=0)
            drafts.append(token)
        return make_proposal(torch.stack(drafts, 1), wanted)._replace(logits=torch.stack(logits, 1))


class Fork(Drafter):
    """A user's: a tree of the two likeliest behind the last token, and two behind each of them."""

    makes_trees = True

    def __init__(self, said: Tensor) -> None:
        self.likely = said.topk(2).indices.int()

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        first = self.likely[table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]]
        drafts = torch.cat((first, self.likely[first].flatten(1)), 1)[:, :k]
        parents = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)[:k].expand_as(drafts).contiguous()
        return make_proposal(drafts, room(table, rows, k), parents)


class Way(NamedTuple):
    """How to guess: `SpecConfig`'s fields, K, or a user's own."""

    guess: dict[str, Any]
    k: K = 3
    own: type[Likely] | type[Dice] | type[Fork] | None = None
    before: tuple[str, ...] = ()


WAYS: dict[str, Way] = {
    "none": Way({}, None),
    "ngram": Way({"method": "ngram"}),
    "ngram, auto": Way({"method": "ngram"}, "auto"),
    "ngram tree": Way({"method": "ngram", "tree_width": 3}, 6),
    "draft": Way({"method": "draft"}),
    "draft, K = 1": Way({"method": "draft"}, 1),
    "medusa": Way({"method": "medusa"}),
    "medusa tree": Way({"method": "medusa", "tree_width": 3}, 6),
    "ngram+draft": Way({"method": "ngram+draft", "prompt_lookup_min": 3}),
    "ngram tree+draft": Way({"method": "ngram+draft", "prompt_lookup_min": 3, "tree_width": 2}, 4),
    "ngram+medusa": Way({"method": "ngram+medusa", "prompt_lookup_min": 3}),
    "ngram tree+medusa tree": Way({"method": "ngram+medusa", "prompt_lookup_min": 3, "tree_width": 2}, 5),
    "a user's": Way({}, 3, Likely),
    "a user's dice": Way({}, 3, Dice),
    "a user's tree": Way({"tree_width": 2}, 6, Fork),
    "ngram+a user's": Way({"prompt_lookup_min": 3}, 3, Likely, before=("ngram",)),
    "ngram+a user's dice": Way({"prompt_lookup_min": 3}, 3, Dice, before=("ngram",)),
}

# What may be asked beside a temperature.
ASKED: dict[str, dict[str, Any]] = {
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


def rules(way: str) -> tuple[str, ...]:
    """Where nobody guesses there is nothing to reject."""
    return LOSSLESS if WAYS[way].k is not None else LOSSLESS[:1]


def asked(what: str, temperature: float, rule: str) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=LENGTH, acceptance=rule, **ASKED[what])


def engine_for(world: World, name: str, rule: str = "rejection", **options: Any) -> Engine:
    """An engine that lets every request choose between "exact" and this rule."""
    way = WAYS[name]
    guess, given = {**way.guess, "acceptance": rule}, dict[str, Any]()
    methods = way.guess.get("method", "")
    if "draft" in methods:
        given["draft_model"] = world.draft
    if "medusa" in methods:
        given["heads"] = world.heads
    if way.own is not None:
        given["drafter"] = [*way.before, way.own(world.said)]
    settings = {"max_num_seqs": 256, "max_model_len": 32, **options}
    return make_engine(world.model, way.k, guess=guess, **given, **settings)


class Drawn(NamedTuple):
    """How often each output was drawn, of a sixteenth of all requests, a quarter, and all; how many tokens
    were guessed and accepted for them."""

    outputs: tuple[Counter[Output], ...]
    drafted: int
    accepted: int


def draw(
    engines: Sequence[Engine], cells: Sequence[SamplingParams], samples: int, first_seed: int = 0
) -> list[Drawn]:
    """So many outputs for each of the cells, all beside each other, every request with a seed of its own; by
    the engines in turn."""
    sizes = (samples // 16, samples // 4, samples)
    counts = [tuple(Counter[Output]() for _ in sizes) for _ in cells]
    sums = [[0, 0] for _ in cells]
    each = max(2048 // len(cells), 1)
    for start in range(0, samples, each):
        numbers = [(c, i) for i in range(start, min(start + each, samples)) for c in range(len(cells))]
        jobs = [Job(PROMPT, replace(cells[c], seed=first_seed + c * samples + i)) for c, i in numbers]
        requests = run(engines[start // each % len(engines)], jobs)
        for (c, i), request in zip(numbers, requests, strict=True):
            for counter, size in zip(counts[c], sizes, strict=True):
                if i < size:
                    counter[tuple(request.output_ids)] += 1
            sums[c][0] += request.stats.num_drafted
            sums[c][1] += request.stats.num_accepted
    return [Drawn(own, *both) for own, both in zip(counts, sums, strict=True)]
