"""What guesses. A drafter fills drafts for the rows of a step; verification does not care which."""

from __future__ import annotations

from torch import Tensor

from ..config import SpecConfig
from ..models.decoder import Model
from ..models.heads import Heads
from ..state import State
from .base import Drafter
from .draft_model import ModelDrafter
from .first_match import FirstMatch
from .medusa import MedusaDrafter
from .ngram import NgramDrafter

__all__ = ["Drafter", "FirstMatch", "MedusaDrafter", "ModelDrafter", "NgramDrafter", "make_drafter"]


def make_drafter(
    spec: SpecConfig,
    state: State,
    target: Model,
    num_blocks: int,
    block_size: int,
    draft_model: Model | None = None,
    heads: Heads | None = None,
    token_map: Tensor | None = None,
) -> Drafter | None:
    """The drafter of `spec.method`, None for none; ValueError if what it needs is not given."""
    drafter: Drafter | None = None
    narrowest = min((window for window in target.config.windows if window is not None), default=None)
    if spec.tree_width > 1 and narrowest is not None and narrowest <= spec.max_k:
        raise ValueError(
            f"Trees of {spec.max_k} drafts do not fit into the model's sliding window of {narrowest} tokens; "
            "lower num_speculative_tokens or use tree_width=1."
        )
    for method in reversed(spec.methods if spec.max_k else ()):
        made: Drafter
        if method == "ngram":
            made = NgramDrafter(spec)
        elif method == "draft":
            if draft_model is None:
                raise ValueError(f"method={spec.method!r} needs a draft model: SpecConfig(draft_model=...).")
            made = ModelDrafter(
                draft_model, target.config.vocab_size, state, num_blocks, block_size,
                keep_logits=spec.acceptance != "exact",
                catch_up=2 if len(spec.methods) == 1 else spec.max_k + 2,  # what lookup may have drafted
                token_map=token_map,
            )  # fmt: skip
        else:
            if heads is None:
                raise ValueError(f"method={spec.method!r} needs heads: SpecConfig(heads=...).")
            check_heads(heads, target, spec.tree_width)
            made = MedusaDrafter(heads, state, target.config.hidden_size, target.dtype, spec.tree_width)
        drafter = made if drafter is None else FirstMatch(made, drafter)
    return drafter


def check_heads(heads: Heads, target: Model, width: int) -> None:
    """Raise ValueError unless the heads fit the target and can guess so many tokens each."""
    weight, hidden = heads.blocks[0].biases[0], target.config.hidden_size
    if len(weight) != heads.num_heads * hidden or weight.dtype != target.dtype:
        raise ValueError(
            f"These heads are for hidden states of {len(weight) // heads.num_heads} in {weight.dtype}, but "
            f"the target's are {hidden} in {target.dtype}; load them for this target."
        )
    if heads.token_map is not None and width > len(heads.token_map):
        raise ValueError(
            f"tree_width={width} is more than the {len(heads.token_map)} tokens that the heads can guess."
        )
