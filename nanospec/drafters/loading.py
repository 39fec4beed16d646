"""The drafter that a `SpecConfig` asks for."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import SpecConfig
from .base import Drafter, Target, registered
from .first_match import FirstMatch


def load_drafter(
    spec: SpecConfig, target: Target, ready: Mapping[str, Drafter] | None = None
) -> Drafter | None:
    """The drafter of `spec.method`, None if it never drafts; ValueError or FileNotFoundError if what it
    needs is missing or does not fit. `ready`: by method, those that need no loading."""
    windows = [window for window in target.model.config.windows if window is not None]
    if spec.tree_width > 1 and windows and min(windows) <= spec.max_k:
        raise ValueError(
            f"Trees of {spec.max_k} drafts do not fit into the model's sliding window of {min(windows)} "
            "tokens; lower num_speculative_tokens or use tree_width=1."
        )
    drafter: Drafter | None = None
    for method in reversed(spec.methods if spec.max_k else ()):
        made = (ready or {}).get(method) or registered()[method].load(spec, target)
        drafter = made if drafter is None else FirstMatch(made, drafter)
    return drafter
