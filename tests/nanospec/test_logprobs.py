"""Log-probabilities match transformers in float64, with and without speculation, in a mixed batch."""

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanospec import SamplingParams
from nanospec.engine.request import Request
from nanospec.models.weights import load_model
from tests.drive import MODES, Job, make_engine, run
from tests.tiny import checkpoint, reference_logits

LENGTH = 12
TOLERANCE = 2e-4  # log-probabilities of these models reach -15
SETUPS: dict[str, dict[str, Any]] = {
    "trees": {"method": "ngram", "tree_width": 3}, "draft": {"method": "draft"},
    "typical acceptance": {"method": "draft", "acceptance": "typical"},
    "blocks in trees": {"method": "ngram+dflash", "tree_width": 3},
}  # fmt: skip


def jobs() -> list[Job]:
    """Return greedy and sampling jobs; filters, biases and penalties must not affect logprobs."""
    rng = random.Random(4)
    phrase = [rng.randrange(199) for _ in range(5)]
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.4, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {7: 4.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {7: 60.0}},  # token found by lookup
        {"temperature": 0.0, "num_speculative_tokens": 0},
    ]
    return [
        Job(
            phrase * rng.randint(1, 8) + [rng.randrange(199) for _ in range(3)],
            SamplingParams(seed=i, max_tokens=LENGTH, logprobs=5, **fields),
        )
        for i, fields in enumerate(params)
    ]


@lru_cache(maxsize=64)
def reference_logprobs(folder: Path, text: tuple[int, ...]) -> np.ndarray:
    """Return log-probabilities [T, V] in float64 after each token of a text."""
    logits = reference_logits(folder, torch.tensor(text))
    return logits.log_softmax(-1).numpy()


def check(request: Request, folder: Path) -> None:
    """Check the token's value and rank and the five likeliest tokens, allowing near ties to swap."""
    text = (*request.prompt_ids, *request.output_ids)
    rows = reference_logprobs(folder, text)[len(request.prompt_ids) - 1 : -1]
    assert len(request.logprobs) == len(rows) == LENGTH
    for token, entry, row in zip(request.output_ids, request.logprobs, rows, strict=True):
        assert next(iter(entry)) == token
        fifth, above, near = np.sort(row)[-5], row > row[token] + TOLERANCE, row > row[token] - TOLERANCE
        assert above.sum() < entry[token].rank <= near.sum()
        for other, given in entry.items():
            assert abs(given.logprob - row[other]) < TOLERANCE
            assert other == token or row[other] > fifth - TOLERANCE
        assert len(entry) == 5 + (entry[token].rank > 5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama-linear-biases-d24", "gemma2-caps"])
def test_logprobs_match_transformers(variant: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant)
    model = load_model(folder, torch.float32, torch.device("cpu"))
    for request in run(make_engine(model, None), jobs()):
        check(request, folder)
    for i, (setup, spec) in enumerate(SETUPS.items()):
        given: dict[str, Any] = {"draft_model": model} if spec["method"] == "draft" else {}
        mode = MODES["as-on-gpu" if i % 2 else "plain"]
        engine = make_engine(model, 5, spec=spec, max_num_batched_tokens=32, **given, **mode)
        for request in run(engine, jobs()):
            check(request, folder)
        assert engine.metrics.spec.num_accepted > 0, setup
