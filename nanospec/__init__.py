"""nanospec: a compact LLM inference engine for speculative decoding.

Public names are imported on first use, so that commands that do not need torch, such as `--help`, start
without importing it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apps.async_llm import AsyncLLM
    from .config import EngineConfig, SamplingParams, SpecConfig
    from .drafters import Drafter, SimpleDrafter
    from .llm import LLM
    from .outputs import Completion, RequestOutput

__all__ = [
    "LLM", "AsyncLLM", "Completion", "Drafter", "EngineConfig", "RequestOutput", "SamplingParams",
    "SimpleDrafter", "SpecConfig",
]  # fmt: skip
__version__ = "0.1.0"
_MODULES = {  # name -> module; the other names are in `config`
    "LLM": "llm",
    "AsyncLLM": "apps.async_llm",
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
