"""nanospec: a compact LLM inference engine for speculative decoding.

Names are imported when they are first used: what needs no torch, the command line's help say, starts
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig, SamplingParams, SpecConfig
    from .drafters import Drafter, SimpleDrafter
    from .llm import LLM
    from .outputs import Completion, RequestOutput

__all__ = [
    "LLM",
    "Completion",
    "Drafter",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SimpleDrafter",
    "SpecConfig",
]
__version__ = "0.1.0"
_MODULES = {  # others: config
    "LLM": "llm",
    "Completion": "outputs",
    "RequestOutput": "outputs",
    "Drafter": "drafters",
    "SimpleDrafter": "drafters",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nanospec' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES.get(name, 'config')}", __name__), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
