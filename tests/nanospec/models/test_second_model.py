"""Qwen2.5-Coder-1.5B, the second real model (`make test-models`): QKV bias, another tokenizer, tied head."""

from dataclasses import replace

import pytest

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.models.weights import fast_in_bfloat16
from tests.conftest import WEIGHTS

pytestmark = [pytest.mark.model2, pytest.mark.timeout(900)]
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
CODE += "    return area(width, height) * depth\n"
QUESTION = f"Rename width to w everywhere and return only the code:\n\n{CODE}"


def test_speculation_does_not_change_output() -> None:
    folder = WEIGHTS / "qwen2.5-coder-1.5b-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs {folder.name}: make test-models")
    llm = LLM(folder, spec=SpecConfig(), max_model_len=512, max_num_seqs=4, enable_prefix_caching=False)
    prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    greedy = SamplingParams(temperature=0, max_tokens=60)
    seeded = SamplingParams(temperature=0.7, top_p=0.8, seed=1, max_tokens=40)
    plain = [replace(params, num_speculative_tokens=0) for params in (greedy, seeded)]
    on, sampled_on, off, sampled_off = llm.generate([prompt] * 4, [greedy, seeded, *plain])
    assert "def area(w, " in on.text
    assert on.stats.tokens_per_step > 1.1
    if fast_in_bfloat16():  # bitwise identical in bf16 only
        assert (on.token_ids, sampled_on.token_ids) == (off.token_ids, sampled_off.token_ids)
