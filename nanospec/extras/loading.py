"""Load an engine's worker with the optional features that its config enables."""

from __future__ import annotations

from pathlib import Path

from ..config import EngineConfig
from ..device.hardware import resolve_device, use_device, use_threads
from ..device.memory import explain_oom, oom_remedy
from ..device.worker import Worker
from ..drafters.methods import Drafters, load_model_and_drafters
from ..text.tokenizer import Tokenizer
from . import create_extensions


def load_worker(config: EngineConfig, folder: Path, drafter: Drafters | None, tokenizer: Tokenizer) -> Worker:
    """Return the worker for the checkpoint in `folder`; with tensor parallelism, the worker of rank 0."""
    if config.tensor_parallel_size > 1:
        from .tensor_parallel.launcher import lead

        return lead(config, folder, drafter, tokenizer)
    device = resolve_device(config.device)
    if device.type == "cpu":
        use_threads(config.threads)
    smaller = "use a device with more memory, a narrower dtype or a smaller model"
    with use_device(device), explain_oom(f"the weights on {device}", smaller):
        model, drafters = load_model_and_drafters(config, folder, drafter, tokenizer, device)
    with explain_oom(f"the engine in addition to the weights on {device}", oom_remedy(config)):
        return Worker(config, model, drafters, create_extensions(config, tokenizer))
