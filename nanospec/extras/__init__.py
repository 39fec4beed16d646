"""Options that implement `device/extension.py` or wrap the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..device.extension import Extension
    from ..text.tokenizer import Tokenizer


def wanted(config: EngineConfig, tokenizer: Tokenizer | None = None) -> list[Extension]:
    """Return the extensions of an engine, which every rank creates alike. Only the process with the engine
    needs the tokenizer."""
    from .grammar.extension import Grammar

    found: list[Extension] = [Grammar(tokenizer)]
    if config.trace:
        from .tracing.recorder import Recorder

        found.append(Recorder())  # last, so that it sees all drafts
    return found
