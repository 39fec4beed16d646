"""nanospec: a compact LLM inference engine for speculative decoding.

What may be set is imported at once and needs no torch; the rest when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import EngineConfig, SamplingParams, SpecConfig

if TYPE_CHECKING:
    from .llm import LLM, Completion, RequestOutput

__all__ = ["LLM", "Completion", "EngineConfig", "RequestOutput", "SamplingParams", "SpecConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion", "RequestOutput"):
        from . import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
