"""Extreme models and requests: shapes that are not powers of two, a vocabulary of one token, full context
windows, more drafts than fit, sampling parameters at their limits.

`EXTREMES=1000` sets the number of random engines; each has its number as seed and test id."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.config import SamplingParams
from nanospec.models.config import cos_sin_table
from nanospec.models.decoder import Model
from nanospec.models.families import read_config
from tests.drive import Job, assert_same, make_engine, outcome, run, run_alone
from tests.tiny import checkpoint, tiny_model

NUM_ENGINES = int(os.environ.get("EXTREMES", "15"))
LEAST, MOST = 1e-45, 2**31 - 1  # the limits of float32 and int32


def random_model(rng: random.Random, window: int) -> Model:
    """Return a random small model, half of them in bfloat16, which run in C++ if the shape is supported."""
    layers, kv_heads = rng.choice((1, 2)), rng.choice((1, 2, 3))
    return tiny_model(
        rng.randrange(1 << 30), rng.choice((torch.float32, torch.bfloat16)),
        vocab_size=rng.choice((1, 1, 2, 3, 5, 63, 64, 65, 127, 4097)),
        hidden_size=rng.choice((2, 6, 10, 32, 50, 62, 96)),
        intermediate_size=rng.choice((1, 2, 7, 31, 32, 33, 64, 96)), num_layers=layers,
        num_heads=kv_heads * rng.choice((1, 2, 3, 5)), num_kv_heads=kv_heads,
        head_dim=rng.choice((2, 4, 6, 10, 16, 24, 32, 34, 48, 80, 96)),
        windows=tuple(rng.choice((None, 1, 2, 9, 16, 17, 33)) for _ in range(layers)),
        max_position_embeddings=window + rng.choice((0, 7)), qk_norm=rng.random() < 0.5,
    )  # fmt: skip


def random_job(rng: random.Random, vocab_size: int, window: int) -> Job:
    """Return a job with a prompt of random length, often the maximum, and parameters at their limits."""
    length, distinct = rng.choice((1, window - 1, rng.randint(1, window - 1))), rng.choice((2, vocab_size))
    several = dict.fromkeys(range(min(vocab_size, 5)), 1e6)
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0, 1.0, 1e-5, 1e-7, LEAST, 100.0)),
        top_k=rng.choice((0, 0, 1, vocab_size, vocab_size + 1, MOST)),
        top_p=rng.choice((1.0, 1.0, LEAST, 1 - 2**-24, 0.5)), min_p=rng.choice((0.0, 0.0, 1.0, LEAST)),
        seed=rng.choice((-(2**63), 2**63 - 1)), max_tokens=rng.choice((None, 1, window, MOST)),
        logprobs=rng.choice((None, 0, 20)), presence_penalty=rng.choice((0, 0, 2, -2)),
        frequency_penalty=rng.choice((0, 0, 2, -2)), repetition_penalty=rng.choice((1, 1, 0.01, 100)),
        logit_bias=rng.choice(({}, {}, {0: 1e6}, {vocab_size - 1: -1e6}, several)),
    )  # fmt: skip
    return Job([rng.randrange(min(vocab_size, distinct)) for _ in range(length)], params)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_ENGINES))
def test_random_batches_match_single_requests(number: int) -> None:
    rng = random.Random(number)
    window = rng.choice((2, 3, 5, 16, 17, 33, 64, 65))
    model = random_model(rng, window)
    jobs = [random_job(rng, model.config.vocab_size, window) for _ in range(4)]
    spec = {"method": "ngram", "tree_width": rng.choice((1, 4))}
    k, budget = rng.choice((1, 3, 16, 63)), rng.choice((2048, 1, 17))
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": window, "max_num_batched_tokens": budget}
    expected = run_alone(model, jobs, max_model_len=window)
    for request, wanted in zip(run(make_engine(model, k, spec=spec, **limits), jobs), expected, strict=True):
        assert wanted.finish_reason == "length"
        assert_same(outcome(request), wanted)


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "phi3-longrope"])
def test_rope_at_far_positions(tmp_path: Path, variant: str) -> None:
    """Compare with transformers, up to rounding of its float32 products of positions and frequencies."""
    import transformers

    far, positions = 1 << 17, torch.tensor([[0, 1, 8191, 65535, (1 << 17) - 1]])
    folder = checkpoint(tmp_path, variant, max_position_embeddings=far)
    _, config = read_config(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cos, sin = (part[0].double() for part in model.model.rotary_emb(torch.zeros(1, 5, 1), positions))
    actual = cos_sin_table(config.rope, config.head_dim, far, "cpu")[positions[0]].double()
    half = cos.shape[-1] // 2
    expected = torch.cat((cos[:, :half], sin[:, :half]), 1)
    bound = 1e-6 + positions[0, :, None] * 2.0**-23 * config.rope.amplitude
    assert bool(((actual - expected).abs() <= bound).all())
