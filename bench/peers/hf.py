"""transformers: `generate` with its default cache, one prompt at a time, plain or with prompt lookup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("transformers", "torch")
GUESSES = (None, 4, 10)
LARGEST_BATCH = 1


def environment(python: Path, cores: list[int]) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(cores))}


def start(work: dict[str, Any]) -> Callable[..., list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16).eval()
    guess = {} if work["guess"] is None else {"prompt_lookup_num_tokens": work["guess"]}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], case: dict[str, Any]) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": case["max_tokens"], "pad_token_id": 0, **guess}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    return generate
