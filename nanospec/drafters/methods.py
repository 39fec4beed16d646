"""Select and load the drafters of an engine: those of a method such as "ngram+draft", or a user's own."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from ..config import EngineConfig, SpecConfig
from ..models.config import ModelConfig
from ..models.decoder import Model
from ..models.weights import Split, load_model
from ..text.tokenizer import Tokenizer
from ..text.validation import check_number, shown
from . import Drafter, Target
from .dflash import DFlashDrafter
from .draft_model import ModelDrafter
from .eagle3 import Eagle3Drafter
from .ngram import NgramDrafter

METHODS: dict[str, type[Drafter]] = {
    "dflash": DFlashDrafter,
    "draft": ModelDrafter,
    "eagle3": Eagle3Drafter,
    "ngram": NgramDrafter,
}
NAMES = (*METHODS, *(f"ngram+{name}" for name in METHODS if name != "ngram"), "none")

Drafters = Drafter | str | Sequence[Drafter | str]
"""A drafter, the name of a method, or a sequence of these in the order in which they run."""


def resolve_drafters(spec: SpecConfig, given: Drafters | None) -> tuple[Drafter | type[Drafter], ...]:
    """Return the drafters `given`, or the classes of the methods of `spec` if None. Raises ValueError if they
    cannot be combined or do not support the settings of `spec`."""
    resolved: tuple[Drafter | type[Drafter], ...]
    if given is None:
        _check_method(spec)
        resolved = tuple(METHODS[name] for name in spec.methods)
    else:
        resolved = tuple(map(_check_drafter, given if isinstance(given, list | tuple) else [given]))
        if not resolved or spec.method != SpecConfig.method:
            raise ValueError(
                f"drafter={shown(given)} cannot be combined with method={spec.method!r}; omit the method and "
                'list all drafters, as in drafter=["ngram", MyDrafter()].'
            )
    if costly := [drafter.name for drafter in resolved[:-1] if drafter.runs_model]:
        raise ValueError(f"{costly[0]} has runs_model=True, so it must be the last drafter.")
    if spec.tree_width > 1 and not any(drafter.makes_trees for drafter in resolved):
        names = "+".join(drafter.name for drafter in resolved) or "none"
        raise ValueError(f"tree_width={spec.tree_width} is not supported by {names}; use tree_width=1.")
    return resolved


def _check_drafter(drafter: Any) -> Drafter | type[Drafter]:
    """Check an entry of `Drafters`: a drafter, or a method without weights, whose class is returned."""
    if isinstance(drafter, Drafter):
        check_number(f"{drafter.name}.max_drafts", drafter.max_drafts, 0)
        return drafter
    if isinstance(drafter, type):
        raise ValueError(f"drafter={drafter.__name__} is a class; pass an instance: {drafter.__name__}().")
    if not isinstance(drafter, str) or drafter not in METHODS:
        raise ValueError(f"drafter={shown(drafter)} must be a Drafter or 'ngram'.")
    if METHODS[drafter].runs_model:
        raise ValueError(f"drafter={drafter!r} needs weights; use SpecConfig(method=...), or pass a Drafter.")
    return METHODS[drafter]


def _check_method(spec: SpecConfig) -> None:
    """Raise ValueError if the method of `spec` is unknown or does not use a setting that is given."""
    if spec.method not in NAMES:
        turned = "+".join(reversed(spec.method.split("+")))
        meant = [turned] if turned in NAMES else get_close_matches(spec.method, NAMES, 1)
        hint = f"did you mean {meant[0]!r}? Available:" if meant else "use one of"
        raise ValueError(f"method={shown(spec.method)} is unknown; {hint} {', '.join(NAMES)}.")
    model, users = spec.draft_model, [name for name in METHODS if METHODS[name].runs_model]
    if model is not None and not set(users) & set(spec.methods):
        unused = f"draft_model={shown(model)} is not used by method={spec.method!r}"
        raise ValueError(f"{unused}; use method={' or '.join(map(repr, users))}.")
    if model == "":
        raise ValueError("draft_model='' must be the name of a folder.")


def captures_steps(config: EngineConfig, model: Model, drafters: Sequence[Drafter]) -> bool:
    """Return whether steps are captured. Raises ValueError if a drafter forbids enforce_eager=False."""
    on_host = any(drafter.reads_on_host for drafter in drafters)
    if on_host and config.enforce_eager is False:
        raise ValueError(
            "enforce_eager=False captures steps, which is not supported for drafters that run on the host; "
            "omit it, or use a Drafter that defines propose() instead of a SimpleDrafter."
        )
    on_gpu = model.device.type == "cuda"
    return on_gpu and not on_host if config.enforce_eager is None else not config.enforce_eager


def load_model_and_drafters(
    config: EngineConfig,
    folder: Path,
    given: Drafters | None,
    tokenizer: Tokenizer,
    device: torch.device,
    split: Callable[[ModelConfig], Split] | None = None,
) -> tuple[Model, tuple[Drafter, ...]]:
    """Load the model in a folder (with `split`, only the shard that it returns) and its drafters: those
    `given`, or those of `config.spec`."""
    model = load_model(folder, config.dtype, device, config.max_model_len, split, config.quantization)
    return model, load_drafters(config.spec, Target(model, folder, tokenizer), given)


def load_drafters(spec: SpecConfig, target: Target, given: Drafters | None = None) -> tuple[Drafter, ...]:
    """Return the drafters `given`, or load those of `spec.method`; none if K is always 0. Raises ValueError
    for settings or weights that do not fit, FileNotFoundError for missing files."""
    resolved = resolve_drafters(spec, given) if spec.max_k else ()
    return tuple(each if isinstance(each, Drafter) else each.load(spec, target) for each in resolved)
