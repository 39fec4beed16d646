"""What a replica is made of, and how it is made, in a process that Ray started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import SpecConfig

if TYPE_CHECKING:
    from ...llm import LLM


class Settings(NamedTuple):
    """What a replica is made of.

    Attributes:
        folder, model: the model's folder on the machine that asks, and what the user called it: where the
            folder is not there, it is found by this name.
        neighbours: replicas on one machine, which share its memory.
    """

    folder: str
    model: str
    spec: SpecConfig
    options: dict[str, Any]
    neighbours: int = 1


def load(settings: Settings) -> LLM:
    """The engine of a replica."""
    from ...device.devices import resolve_device
    from ...device.memory import spare_memory
    from ...llm import LLM
    from ...models.hub import resolve_model

    folder, options = Path(settings.folder), dict(settings.options)
    device = resolve_device(options.get("device", "auto"))
    if device.type == "cpu" and settings.neighbours > 1:  # all start at once, and see the same free memory
        ranks = options.get("tensor_parallel_size", 1)
        options.setdefault("kv_cache_memory", spare_memory(device, settings.neighbours * ranks))
    here = folder if folder.is_dir() else resolve_model(settings.model)
    return LLM(here, spec=settings.spec, **options)
