"""Options that implement `device/extension.py` or wrap the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..device.extension import Extension
    from ..text.tokenizer import Tokenizer


def create_extensions(config: EngineConfig, tokenizer: Tokenizer | None = None) -> list[Extension]:
    """Return the extensions of an engine, which every rank creates alike. Only the process with the engine
    needs the tokenizer. Each extension is imported here, when a worker needs it."""
    from .grammar.extension import Grammar

    extensions: list[Extension] = [Grammar(tokenizer)]
    if config.trace:
        from .tracing.recorder import Recorder

        extensions.append(Recorder())  # last, so that it sees all drafts
    return extensions
