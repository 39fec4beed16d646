"""Optional features that implement `device/extension.py` or wrap the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..device.extension import Extension
    from ..text.tokenizer import Tokenizer


def create_extensions(config: EngineConfig, tokenizer: Tokenizer | None = None) -> list[Extension]:
    """Return the extensions of an engine, in the same order on every rank. Only the process that runs the
    engine needs `tokenizer`. The libraries that extensions need are imported on first use."""
    from .grammar.extension import Grammar

    extensions: list[Extension] = [Grammar(tokenizer)]
    if config.trace:
        from .tracing.recorder import Recorder

        extensions.append(Recorder())  # last, so that it records the drafts of the others too
    return extensions
