"""The ends of what may be asked and of what a model may look like: shapes that are no powers of two, a
vocabulary of one token, windows that are full at once, more drafts than fit, parameters at their limits.

`EXTREMES=1000` draws so many engines instead of a few; each is named by its number, which replays it.
`EXTREMES_LONG=8192` makes the long text so long.
"""

from __future__ import annotations

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
from tests.tiny import ModelRunner, checkpoint, tiny_model

NUM_ENGINES = int(os.environ.get("EXTREMES", "15"))
LENGTH = int(os.environ.get("EXTREMES_LONG", "1000"))
LEAST, MOST = 1e-45, 2**31 - 1  # of float32 and of int32


def drawn_model(rng: random.Random, window: int) -> Model:
    """Any small shape; one in two is computed in bfloat16, by C++ as far as it takes the shape."""
    layers, kv_heads = rng.choice((1, 2)), rng.choice((1, 2, 3))
    return tiny_model(
        rng.randrange(1 << 30),
        rng.choice((torch.float32, torch.bfloat16)),
        vocab_size=rng.choice((1, 1, 2, 3, 5, 63, 64, 65, 127, 4097)),
        hidden_size=rng.choice((2, 6, 10, 32, 50, 62, 96)),
        intermediate_size=rng.choice((1, 2, 7, 31, 32, 33, 64, 96)),
        num_layers=layers,
        num_heads=kv_heads * rng.choice((1, 2, 3, 5)),
        num_kv_heads=kv_heads,
        head_dim=rng.choice((2, 4, 6, 10, 16, 24, 32, 34, 48, 80, 96)),
        windows=tuple(rng.choice((None, 1, 2, 9, 16, 17, 33)) for _ in range(layers)),
        max_position_embeddings=window + rng.choice((0, 7)),
        qk_norm=rng.random() < 0.5,
    )


def drawn_job(rng: random.Random, vocab_size: int, window: int) -> Job:
    """A prompt of any length, often the longest, and parameters at their limits."""
    length, variety = rng.choice((1, window - 1, rng.randint(1, window - 1))), rng.choice((2, vocab_size))
    several = dict.fromkeys(range(min(vocab_size, 5)), 1e6)
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0, 1.0, 1e-5, 1e-7, LEAST, 100.0)),
        top_k=rng.choice((0, 0, 1, vocab_size, vocab_size + 1, MOST)),
        top_p=rng.choice((1.0, 1.0, LEAST, 1 - 2**-24, 0.5)),
        min_p=rng.choice((0.0, 0.0, 1.0, LEAST)),
        seed=rng.choice((-(2**63), 2**63 - 1)),
        max_tokens=rng.choice((None, 1, window, MOST)),
        logprobs=rng.choice((None, 0, 20)),
        presence_penalty=rng.choice((0, 0, 2, -2)),
        frequency_penalty=rng.choice((0, 0, 2, -2)),
        repetition_penalty=rng.choice((1, 1, 0.01, 100)),
        logit_bias=rng.choice(({}, {}, {0: 1e6}, {vocab_size - 1: -1e6}, several)),
    )
    return Job([rng.randrange(min(vocab_size, variety)) for _ in range(length)], params)


@pytest.mark.parametrize("number", range(NUM_ENGINES))
def test_drawn_engines_write_what_decoding_alone_does(number: int) -> None:
    rng = random.Random(number)
    window = rng.choice((2, 3, 5, 16, 17, 33, 64, 65))
    model = drawn_model(rng, window)
    jobs = [drawn_job(rng, model.config.vocab_size, window) for _ in range(4)]
    spec: dict[str, Any] = {"method": "ngram"}
    spec |= {"tree_width": rng.choice((1, 4))} if spec["method"] == "ngram" else {}
    engine = make_engine(
        model, rng.choice((1, 3, 16, 63)), spec={**spec, "max_speculative_tokens": 63}, max_num_seqs=3,
        max_model_len=window, max_num_batched_tokens=rng.choice((2048, 1, 17)),
    )  # fmt: skip
    expected = run_alone(model, jobs, max_model_len=window)
    for request, wanted in zip(run(engine, jobs), expected, strict=True):
        assert wanted.finish_reason == "length"
        assert_same(outcome(request), wanted)


def test_more_log_probabilities_are_asked_for_than_there_are_tokens() -> None:
    model = tiny_model(vocab_size=3)
    for k in (0, 4):
        more, two = SamplingParams(logprobs=20, max_tokens=9), SamplingParams(logprobs=2, max_tokens=9)
        for request in run(make_engine(model, k), [Job([1, 2, 0, 1, 2], more), Job([1], two)]):
            for place in request.logprobs:
                assert request.params.logprobs == 2 or sorted(place) == [0, 1, 2]
                assert request.params.logprobs == 20 or len(place) in (2, 3)
                known = torch.tensor([entry.logprob for entry in place.values()]).exp().sum()
                assert len(place) < 3 or abs(float(known) - 1) < 1e-5


@pytest.fixture(scope="module")
def indifferent() -> Model:
    """All logits are equal."""
    model = tiny_model(vocab_size=65)
    model.norm.weight.zero_()
    return model


@pytest.mark.parametrize("temperature", [1e-5, 9.9e-6, LEAST, 1e-46])
def test_from_some_temperature_down_it_is_greedy(indifferent: Model, temperature: float) -> None:
    """Ties are broken by chance above it, below by the lowest id: in float32 nothing else would tell tokens
    apart, and what divides by such a number overflows."""
    for limits in ({}, {"top_p": 0.5, "top_k": 9, "min_p": 0.5}):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, **limits)  # type: ignore
        for k in (0, 4):
            (request,) = run(make_engine(indifferent, k), [Job([3, 3, 3], params)])
            assert (set(request.output_ids) == {0}) == (temperature < 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_overflow_is_an_error_that_says_so(dtype: torch.dtype) -> None:
    """Numbers that float32 has room for overflow in float16: one sentence, and no token is made up."""
    model = tiny_model(dtype=dtype)
    for layer in model.layers:
        layer.post_norm.weight.mul_(1e3)
    (request,) = run(make_engine(model), [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))])
    if dtype == torch.float32:
        assert len(request.output_ids) == 4
    else:
        assert (request.finish_reason, request.output_ids) == ("abort", [])
        assert "NaN or infinite logits" in str(request.error)
        assert "float16 ends at 65,504" in str(request.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_of_a_long_text_is_the_likeliest(dtype: torch.dtype) -> None:
    """Guessed, in full, and then scored at once, which needs no decoding alone to compare with."""
    end = LENGTH + 3
    model = tiny_model(dtype=dtype, max_position_embeddings=end, windows=(64, None), head_dim=32)
    engine = make_engine(model, 16, spec={"method": "ngram"}, max_model_len=end, max_num_seqs=1)
    (request,) = run(engine, [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=LENGTH))])
    assert len(request.output_ids) == LENGTH
    assert request.stats.num_accepted > LENGTH // 3
    text = torch.tensor(request.tokens, dtype=torch.int32)
    (logits,) = ModelRunner(model, 1, end).step({0: text[:-1]}).values()
    scores = logits[2:].float()
    chosen = scores.gather(1, text[3:, None].long())[:, 0]
    assert bool((chosen >= scores.amax(-1) - (1e-3 if dtype == torch.float32 else 0.1)).all())


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "phi3-longrope"])
def test_angles_of_far_positions(tmp_path: Path, variant: str) -> None:
    """Those of transformers, up to the last place of its products of positions and frequencies in float32."""
    import transformers

    far, places = 1 << 17, torch.tensor([[0, 1, 8191, 65535, (1 << 17) - 1]])
    folder = checkpoint(tmp_path, variant, max_position_embeddings=far)
    _, config = read_config(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cos, sin = (part[0].double() for part in model.model.rotary_emb(torch.zeros(1, 5, 1), places))
    own = cos_sin_table(config.rope, config.head_dim, far, "cpu")[places[0]].double()
    half = cos.shape[-1] // 2
    theirs = torch.cat((cos[:, :half], sin[:, :half]), 1)
    bound = 1e-6 + places[0, :, None] * 2.0**-23 * config.rope.amplitude
    assert bool(((own - theirs).abs() <= bound).all())
