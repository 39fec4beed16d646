"""A tiny model and requests for it, to see on a GPU within seconds that the engine works at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from nanospec import SamplingParams, SpecConfig
from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.drafters.base import Target
from nanospec.drafters.loading import load_drafter
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.random_weights import random_model

VOCAB = 512
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
Job = tuple[list[int], SamplingParams]


def make_model(device: torch.device, dtype: torch.dtype) -> Model:
    return random_model(ModelConfig.from_dict(SHAPE), dtype, device)


def make_engine(model: Model, k: int | str, rows: int, window: int = 512, **options: Any) -> Engine:
    """An engine with n-gram lookup that records what it needs when it needs it."""
    spec = SpecConfig(num_speculative_tokens=k)  # type: ignore[arg-type]
    config = EngineConfig(
        spec=spec, max_num_seqs=rows, max_model_len=window, enable_prefix_caching=False,
        kv_cache_memory=(rows + 1) * -(-window // 16) * 16 * model.config.kv_bytes_per_token(model.dtype),
        **{"enforce_eager": False, "lazy_capture": True, **options},
    )  # fmt: skip
    return Engine(config, Worker(config, model, load_drafter(spec, Target(model))))


def make_jobs(count: int = 6, max_tokens: int = 48, max_prompt: int = 90) -> list[Job]:
    """Greedy and seeded requests with prompts that repeat themselves, and one whose output does, so that
    drafts are accepted whatever the weights are."""
    rng, jobs = random.Random(0), []
    for i in range(count):
        phrase = [rng.randrange(VOCAB) for _ in range(rng.randint(3, 12))]
        prompt = (phrase * max_prompt)[: rng.randint(5, max_prompt)]
        jobs.append((prompt, SamplingParams(temperature=float(i % 2), seed=i, max_tokens=max_tokens)))
    again = SamplingParams(temperature=0, max_tokens=max_tokens, logit_bias={5: 60.0})
    return [*jobs, ([5, 9, 5, 5], again)]


def run(engine: Engine, jobs: Sequence[Job], most: int = 5000) -> list[Request]:
    """All jobs at once."""
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    for _ in range(most):
        if not engine.has_work:
            return requests
        engine.step()
    raise RuntimeError(f"Work is left after {most} steps.")


def differing(found: Sequence[Request], expected: Sequence[Request]) -> int:
    """How many outputs are not the same."""
    return sum(a.output_ids != b.output_ids for a, b in zip(found, expected, strict=True))
