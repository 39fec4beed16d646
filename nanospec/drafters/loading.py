"""Load a model with the drafters that a `SpecConfig` names, or that the user has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import torch

from ..config import EngineConfig, SpecConfig
from ..models.config import ModelConfig
from ..models.decoder import Model
from ..models.families import read_config
from ..models.weights import Split, load_model, resolve_dtype
from ..text.checks import shown
from ..text.tokenizer import Tokenizer
from .base import Drafter, Target

METHODS = {  # the class of each, imported when it is used
    "draft": "draft_model.ModelDrafter",
    "medusa": "medusa.MedusaDrafter",
    "ngram": "ngram.NgramDrafter",
}
USED_BY = {"draft_model": "draft", "heads": "medusa"}  # by field

Guessers = Drafter | str | Sequence[Drafter | str]
"""Who guesses: a drafter or the name of a method, or several, first come first."""


def who_guesses(spec: SpecConfig, given: Guessers | None) -> tuple[Drafter | str, ...]:
    """Return the drafters `given`, or the methods of `spec` if None. Raises ValueError if they do not fit
    together, or have no use for what is set."""
    if given is None:
        check_method(spec)
        found: tuple[Drafter | str, ...] = spec.methods
    else:
        found = tuple(given) if isinstance(given, list | tuple) else (given,)  # type: ignore[assignment]
        check_given(spec, found)
    kinds = [drafter_class(who) if isinstance(who, str) else who for who in found]
    if costly := [kind for kind in kinds[:-1] if kind.runs_model]:
        raise ValueError(f"{costly[0].name} takes time to guess, so it must come last.")
    if spec.tree_width > 1 and not any(kind.makes_trees for kind in kinds):
        names = "+".join(kind.name for kind in kinds) or "none"
        raise ValueError(f"tree_width={spec.tree_width} is of no use to {names}, which guesses chains.")
    return found


def drafter_class(method: str) -> type[Drafter]:
    """Return the class of one of `METHODS`."""
    module, name = METHODS[method].split(".")
    found: type[Drafter] = getattr(import_module(f".{module}", __package__), name)
    return found


def check_given(spec: SpecConfig, given: Sequence[Drafter | str]) -> None:
    """Raise ValueError unless all that is given are drafters, or methods without weights."""
    for who in given:
        if isinstance(who, type):
            raise ValueError(f"drafter={who.__name__} is a class; make one of it: {who.__name__}().")
        if not isinstance(who, Drafter) and not (isinstance(who, str) and who in METHODS):
            raise ValueError(f"drafter={shown(who)} is neither a Drafter nor one of {', '.join(METHODS)}.")
        if isinstance(who, str) and drafter_class(who).runs_model:
            raise ValueError(f"{who!r} has weights of its own, so only method=... loads it; give drafters.")
    if not given or spec.method != SpecConfig.method:
        raise ValueError(
            f"drafter={shown([*given])} and method={spec.method!r} do not go together: leave the method out "
            'and name all drafters, as in drafter=["ngram", MyDrafter()].'
        )


def check_method(spec: SpecConfig) -> None:
    """Raise ValueError unless the method exists and has a use for its settings."""
    names = [*METHODS, *(f"ngram+{name}" for name in METHODS if name != "ngram"), "none"]
    if spec.method not in names:
        turned = "+".join(reversed(spec.method.split("+")))
        meant = [turned] if turned in names else get_close_matches(spec.method, names, 1)
        hint = f"did you mean {meant[0]!r}? There are" if meant else "use one of"
        raise ValueError(f"method={shown(spec.method)} is unknown; {hint} {', '.join(names)}.")
    for name, method in USED_BY.items():
        value = getattr(spec, name)
        if value != getattr(SpecConfig, name) and method not in spec.methods:
            said = f"{name}={shown(value)} is of no use to method={spec.method!r}"
            raise ValueError(f"{said}; use method={method!r}.")
        if value == "":
            raise ValueError(f"{name}='' must be the name of a folder or file.")


def captures_steps(config: EngineConfig, model: Model, drafters: Sequence[Drafter]) -> bool:
    """Return whether steps are captured. Raises ValueError if they are to be and a drafter cannot."""
    on_host = any(drafter.reads_on_host for drafter in drafters)
    if on_host and config.enforce_eager is False:
        raise ValueError(
            "enforce_eager=False asks for captured steps, in which no drafter can read texts on the host; "
            "leave it out, or give a Drafter that defines propose() instead of guess()."
        )
    on_gpu = model.device.type == "cuda"
    return on_gpu and not on_host if config.enforce_eager is None else not config.enforce_eager


def load_parts(
    config: EngineConfig,
    folder: Path,
    given: Guessers | None,
    tokenizer: Tokenizer,
    device: torch.device,
    split: Callable[[ModelConfig], Split] | None = None,
) -> tuple[Model, tuple[Drafter, ...]]:
    """Return the model in a folder, or this device's part of it if it is `split`, and the drafters: `given`,
    or those of `config.spec`."""
    dtype = resolve_dtype(config.dtype, read_config(folder), device)
    model = load_model(folder, dtype, device, config.max_model_len, split)
    return model, load_drafters(config.spec, Target(model, folder, tokenizer), given=given)


def load_drafters(
    spec: SpecConfig,
    target: Target,
    ready: Mapping[str, Drafter] | None = None,
    given: Guessers | None = None,
) -> tuple[Drafter, ...]:
    """Return the drafters of `spec.method`, or `given` ones in their place; none if nothing is ever drafted.
    `ready`: by method, those that need no loading. Raises ValueError or FileNotFoundError if something is
    missing or does not fit."""
    found, ready = who_guesses(spec, given), ready or {}
    if not spec.max_k:
        return ()
    return tuple(
        who if isinstance(who, Drafter) else ready.get(who) or drafter_class(who).load(spec, target)
        for who in found
    )
