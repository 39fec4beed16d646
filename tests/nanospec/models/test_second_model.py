"""Qwen2.5-Coder-1.5B, the second real model (`make test-models`): QKV bias, another tokenizer, tied head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.models.weights import fast_in_bfloat16
from tests.conftest import WEIGHTS

pytestmark = [pytest.mark.model2, pytest.mark.timeout(900)]
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
CODE += "    return area(width, height) * depth\n"
QUESTION = f"Rename width to w everywhere and return only the code:\n\n{CODE}"


@pytest.fixture(scope="module")
def folder() -> Path:
    path = WEIGHTS / "qwen2.5-coder-1.5b-instruct"
    if not (path / "config.json").is_file():
        pytest.skip(f"needs {path.name}: python tests/second_model.py")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, spec=SpecConfig(), max_model_len=512, max_num_seqs=3, enable_prefix_caching=False)


def test_speculation_does_not_change_output(llm: LLM) -> None:
    prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    params = [
        SamplingParams(temperature=0, max_tokens=60),
        SamplingParams(temperature=0, max_tokens=60, num_speculative_tokens=0),
        SamplingParams(temperature=0.7, top_p=0.8, seed=1, max_tokens=40),
        SamplingParams(temperature=0.7, top_p=0.8, seed=1, max_tokens=40, num_speculative_tokens=0),
    ]
    on, off, sampled_on, sampled_off = llm.generate([prompt] * 4, params)
    assert "def area(w, " in on.text
    assert on.stats.tokens_per_step > 1.1
    if fast_in_bfloat16():  # bitwise identical in bf16 only
        assert on.token_ids == off.token_ids
        assert sampled_on.token_ids == sampled_off.token_ids


def test_next_token_matches_transformers(llm: LLM, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = llm.tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n\n    return")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    assert output.token_ids[0] == int(expected.argmax())
    for token, result in output.logprobs[0].items():
        assert abs(result.logprob - float(expected[token])) < 0.15, llm.tokenizer.decode([token])
