"""nanospec, through its public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "tokenizers")
GUESSES = ("auto",)
LARGEST_BATCH = 1 << 10
_llms: list[Any] = []


def environment(python: Path, cores: list[int]) -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)}


def start(work: dict[str, Any]) -> Callable[..., list[list[int]]]:
    from nanospec import LLM, SamplingParams, SpecConfig

    guess = work["guess"]
    spec = SpecConfig(method="none") if guess is None else SpecConfig(num_speculative_tokens=guess)
    llm = LLM(
        work["model"],
        spec=spec,
        dtype=work.get("dtype", "bfloat16"),
        device="cpu",
        max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"],
        enable_prefix_caching=False,
    )
    _llms.append(llm)

    def generate(prompts: list[list[int]], case: dict[str, Any]) -> list[list[int]]:
        seed = case.get("seed")
        params = [
            SamplingParams(
                temperature=case["temperature"],
                seed=None if seed is None else seed + i,
                max_tokens=case["max_tokens"],
                ignore_eos=case.get("ignore_eos", False),
            )
            for i in range(len(prompts))
        ]
        return [output.token_ids for output in llm.generate(prompts, params)]

    return generate


def notes() -> dict[str, Any]:
    """Mean ms per decoding step by stage since the start (prefill: per prompt token)."""
    metrics = _llms[0].engine.metrics
    steps, tokens = max(metrics.num_forward_steps, 1), max(metrics.num_prefill_tokens, 1)
    times = {name: round(value / steps * 1e3, 3) for name, value in metrics.stages.seconds.items()}
    return {"stage_ms": {**times, "prefill": round(metrics.stages.seconds["prefill"] / tokens * 1e3, 4)}}
