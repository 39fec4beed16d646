"""What guesses. A drafter fills drafts for the rows of a step; verification does not care which."""

from __future__ import annotations

from ..config import SpecConfig
from ..heads import Heads
from ..model import Model
from ..state import State
from .base import Drafter
from .draft_model import ModelDrafter
from .fallback import Fallback
from .ngram import NgramDrafter
from .parallel import HeadsDrafter

__all__ = ["Drafter", "Fallback", "HeadsDrafter", "ModelDrafter", "NgramDrafter", "make_drafter"]


def make_drafter(
    spec: SpecConfig,
    state: State,
    target: Model,
    num_blocks: int,
    block_size: int,
    draft_model: Model | None = None,
    heads: Heads | None = None,
) -> Drafter | None:
    """The drafter of `spec.method`, None for none; ValueError if what it needs is not given."""
    drafter: Drafter | None = None
    for method in reversed(spec.methods if spec.max_k else ()):
        made: Drafter
        if method == "ngram":
            made = NgramDrafter(spec)
        elif method == "draft":
            if draft_model is None:
                raise ValueError(f"method={spec.method!r} needs a draft model: SpecConfig(draft_model=...).")
            vocab, keep_logits = target.config.vocab_size, spec.acceptance != "exact"
            made = ModelDrafter(draft_model, vocab, state, num_blocks, block_size, keep_logits)
        else:
            if heads is None:
                raise ValueError(f"method={spec.method!r} needs heads: SpecConfig(heads=...).")
            made = HeadsDrafter(heads, state, target.config.hidden_size, target.dtype, spec.tree_width)
        drafter = made if drafter is None else Fallback(made, drafter)
    return drafter
