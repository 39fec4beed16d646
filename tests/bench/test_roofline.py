"""The static account gives the published figures, and behaves like a limit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench import roofline
from bench.roofline import MODELS, Machine, account, break_even, expected_tokens
from nanospec.models.config import ModelConfig

H200 = Machine()
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}

# Least ms per step at a context of 1024 for K = 0, 2, 4, 8, as printed; break-even tokens below.
STEP_MS = {
    ("qwen3-0.6b", 1): ("0.305", "0.306", "0.307", "0.309"),
    ("qwen3-0.6b", 8): ("0.499", "0.506", "0.514", "0.528"),
    ("qwen3-0.6b", 64): ("2.05", "2.11", "2.25", "2.66"),
    ("qwen3-0.6b", 256): ("7.40", "8.21", "9.01", "10.6"),
    ("qwen3-8b", 1): ("3.56", "3.56", "3.56", "3.57"),
    ("qwen3-8b", 8): ("3.81", "3.83", "3.86", "3.90"),
    ("qwen3-8b", 64): ("5.86", "6.03", "8.40", "13.3"),
    ("qwen3-8b", 256): ("13.9", "23.8", "33.6", "53.3"),
}
BREAK_EVEN = {
    ("qwen3-0.6b", 1): (None, None, None, "1.01"),
    ("qwen3-0.6b", 8): (None, None, "1.03", "1.06"),
    ("qwen3-0.6b", 64): (None, "1.03", "1.10", "1.29"),
    ("qwen3-0.6b", 256): (None, "1.11", "1.22", "1.44"),
    ("qwen3-8b", 8): (None, None, "1.01", "1.02"),
    ("qwen3-8b", 64): (None, "1.03", "1.43", "2.28"),
    ("qwen3-8b", 256): (None, "1.71", "2.42", "3.83"),
}
PUBLISHED = [(*case, K, ms) for case, row in STEP_MS.items() for K, ms in zip(roofline.DRAFTS, row)]
RATIOS = [(*c, K, r) for c, row in BREAK_EVEN.items() for K, r in zip(roofline.DRAFTS, row) if r]


def as_printed(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize(
    ("model", "B", "K", "ms"), PUBLISHED, ids=[f"{m}-B{b}-K{k}" for m, b, k, _ in PUBLISHED]
)
def test_the_published_step_times(model: str, B: int, K: int, ms: str) -> None:
    assert as_printed(account(MODELS[model], B, K).bound(H200), ms) == ms


@pytest.mark.parametrize(
    ("model", "B", "K", "ratio"), RATIOS, ids=[f"{m}-B{b}-K{k}" for m, b, k, _ in RATIOS]
)
def test_the_published_break_even_points(model: str, B: int, K: int, ratio: str) -> None:
    assert as_printed(break_even(MODELS[model], B, K, 1024, H200), ratio) == ratio


def test_the_published_ridge() -> None:
    assert round(H200.ridge) == 184


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_cache_are_counted_once(model: str) -> None:
    """At one token a step is little more than the weights and the cache read once."""
    config = MODELS[model]
    step = account(config, 1, 0, context=1000)
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    floor = 2 * (config.num_parameters - table) + 1000 * config.kv_bytes_per_token(config.torch_dtype)
    assert floor < step.bytes < 1.01 * floor
    assert step.intensity < 4


def test_a_window_bounds_what_attention_reads() -> None:
    config = ModelConfig.from_dict(MISTRAL)
    short, long = (account(config, 2, 3, context) for context in (4096, 100_000))
    attention = [next(k for k in step.kernels if k.name == "attention") for step in (short, long)]
    assert attention[0] == attention[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("B", [1, 7, 64, 300])
def test_more_drafts_cost_more_time_but_less_per_token(model: str, B: int) -> None:
    steps = [account(MODELS[model], B, K) for K in range(17)]
    times = [step.estimate(H200) for step in steps]
    assert all(a < b for a, b in pairwise(times))
    assert all(a / s.tokens > b / t.tokens for (a, s), (b, t) in pairwise(zip(times, steps)))
    assert all(step.bound(H200) < step.estimate(H200) for step in steps)


def test_launches_per_step() -> None:
    """Five per layer; nothing is looked up without drafts."""
    config = MODELS["qwen3-0.6b"]
    plain, spec = account(config, 1, 0).launches, account(config, 64, 4).launches
    assert plain == 5 * config.num_layers + 7
    assert spec == plain + 2


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_the_explanation_names_every_kernel_and_the_break_even_point() -> None:
    text = roofline.explain(MODELS["qwen3-8b"], H200, context=1024, B=64, K=4)
    for kernel in account(MODELS["qwen3-8b"], 1, 1).kernels:
        assert kernel.name in text
    assert "break even at 1.43 tokens" in text


def test_the_command_line_splits_over_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "qwen3-8b", "--batch", "2", "--drafts", "2", "--gpus", "4", "--out", str(tmp_path)]
    roofline.main(options)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    [row], step = result["models"]["qwen3-8b"], account(MODELS["qwen3-8b"], 2, 2, gpus=4)
    assert (row["received"], row["exchanges"], row["bytes"]) == (step.received, step.exchanges, step.bytes)
    assert result["machine"]["gpus"] == 4


def test_the_command_line_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MISTRAL))
    roofline.main(["--config", str(config), "--batch", "1", "--drafts", "0", "3", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "roofline.json").read_text())
    assert [(row["B"], row["K"]) for row in result["models"][str(config)]] == [(1, 0), (1, 3)]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
