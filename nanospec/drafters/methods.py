"""The drafters of an engine: those of a method such as "ngram+draft", or a user's own.

Several draft in turn, each for the rows for which those before it have nothing: lookup takes no time and is
right where it matches; a model always has something to say. So only the last drafter may take time that must
pay (`Drafter.runs_model`). In steps that are not captured that time is measured, and the policy decides for
how many drafts the last drafter is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import EngineConfig, SpecConfig
from ..kernels import NO_DRAFTER
from ..kernels.batch import Batch
from ..kernels.speculation import ngram
from ..kernels.speculation.proposal import Proposal, merge, room
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.decoder import Model
from ..models.weights import Split, load_model
from ..text import check_number, shown
from ..text.tokenizer import Tokenizer
from . import Drafter, Memory, Target, no_drafts
from .estimates import DraftTimes


class NgramDrafter(Drafter):
    """Looks the last tokens up in the row's own text: see `kernels/speculation/ngram.py`."""

    name = "ngram"
    makes_trees = True

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n, self.width = spec.prompt_lookup_max, spec.tree_width

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> NgramDrafter:
        return cls(spec)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        return ngram.propose(table, rows, k, self.max_n, self.width)


METHODS = {  # the class of each, imported when it is used
    "draft": "draft_model.ModelDrafter",
    "medusa": "medusa.MedusaDrafter",
    "ngram": "methods.NgramDrafter",
}
NAMES = (*METHODS, *(f"ngram+{name}" for name in METHODS if name != "ngram"), "none")
USED_BY = {"draft_model": "draft", "heads": "medusa"}  # fields of `SpecConfig`
PER_ROW = ("num_drafts", "match_len", "drafter", "sampled")  # parts of a `Proposal` of shape [B]
DTYPES = {"logits": torch.float32, "sampled": torch.bool}  # of the other parts: int32

Drafters = Drafter | str | Sequence[Drafter | str]
"""Who guesses: a drafter or the name of a method, or several, first come first."""


def resolve_drafters(spec: SpecConfig, given: Drafters | None) -> tuple[Drafter | type[Drafter], ...]:
    """Return the drafters `given`, or the classes of the methods of `spec` if None. Raises ValueError if they
    do not fit together, or have no use for what is set."""
    found: tuple[Drafter | type[Drafter], ...]
    if given is None:
        _check_method(spec)
        found = tuple(map(_class_of, spec.methods))
    else:
        found = tuple(map(_given, given if isinstance(given, list | tuple) else [given]))
        if not found or spec.method != SpecConfig.method:
            raise ValueError(
                f"drafter={shown(given)} and method={spec.method!r} do not go together: leave the method out "
                'and name all drafters, as in drafter=["ngram", MyDrafter()].'
            )
    if costly := [drafter.name for drafter in found[:-1] if drafter.runs_model]:
        raise ValueError(f"{costly[0]} takes time to guess, so it must come last.")
    if spec.tree_width > 1 and not any(drafter.makes_trees for drafter in found):
        names = "+".join(drafter.name for drafter in found) or "none"
        raise ValueError(f"tree_width={spec.tree_width} is of no use to {names}, which guesses chains.")
    return found


def _class_of(method: str) -> type[Drafter]:
    module, name = METHODS[method].split(".")
    found: type[Drafter] = getattr(import_module(f".{module}", __package__), name)
    return found


def _given(drafter: Any) -> Drafter | type[Drafter]:
    """Return what the user gave, a drafter or the name of a method without weights. Raises ValueError."""
    if isinstance(drafter, Drafter):
        check_number(f"{drafter.name}.max_drafts", drafter.max_drafts, 0)
        if not isinstance(drafter.memory, Memory):
            raise ValueError(f"{drafter.name}.memory={shown(drafter.memory)} must be a Memory.")
        return drafter
    if isinstance(drafter, type):
        raise ValueError(f"drafter={drafter.__name__} is a class; make one of it: {drafter.__name__}().")
    if not isinstance(drafter, str) or drafter not in METHODS:
        raise ValueError(f"drafter={shown(drafter)} is neither a Drafter nor one of {', '.join(METHODS)}.")
    if (found := _class_of(drafter)).runs_model:
        raise ValueError(f"{drafter!r} has weights of its own, so only method=... loads it; give drafters.")
    return found


def _check_method(spec: SpecConfig) -> None:
    """Raise ValueError unless the method exists and has a use for its settings."""
    if spec.method not in NAMES:
        turned = "+".join(reversed(spec.method.split("+")))
        meant = [turned] if turned in NAMES else get_close_matches(spec.method, NAMES, 1)
        hint = f"did you mean {meant[0]!r}? There are" if meant else "use one of"
        raise ValueError(f"method={shown(spec.method)} is unknown; {hint} {', '.join(NAMES)}.")
    for name, method in USED_BY.items():
        value = getattr(spec, name)
        if value is not None and method not in spec.methods:
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
    given: Drafters | None,
    tokenizer: Tokenizer,
    device: torch.device,
    split: Callable[[ModelConfig], Split] | None = None,
) -> tuple[Model, tuple[Drafter, ...]]:
    """Return the model in a folder, or this device's part of it if it is `split`, and the drafters: `given`,
    or those of `config.spec`."""
    model = load_model(folder, config.dtype, device, config.max_model_len, split)
    return model, load_drafters(config.spec, Target(model, folder, tokenizer), given)


def load_drafters(spec: SpecConfig, target: Target, given: Drafters | None = None) -> tuple[Drafter, ...]:
    """Return the drafters `given`, or those of `spec.method`; none if nothing is ever drafted. Raises
    ValueError or FileNotFoundError if something is missing or does not fit."""
    found = resolve_drafters(spec, given) if spec.max_k else ()
    return tuple(who if isinstance(who, Drafter) else who.load(spec, target) for who in found)


def propose(
    drafters: Sequence[Drafter], table: Table, rows: Tensor, k: int, last_k: int, times: DraftTimes | None
) -> Proposal:
    """Return up to `k` drafts for each of the rows [B], in k columns, of the last drafter up to `last_k`.
    `times`: what to tell the time of the last one if it runs a model; None in captured steps."""
    found: Proposal | None = None
    if times is not None:
        times.fade()
    for code, drafter in enumerate(drafters):
        most = last_k if drafter is drafters[-1] else k
        if not most:
            continue
        left = rows if found is None else torch.where(found.num_drafts > 0, -1, rows)
        if times is None or not drafter.runs_model:
            made = _proposal(drafter, table, left, most)
        else:
            made = _timed(drafter, table, left, most, times)
        if most < k:
            pad = 0, k - most
            drafts, source = F.pad(made.drafts, pad), F.pad(made.source, pad)
            parents = None if made.parents is None else F.pad(made.parents, pad)
            made = made._replace(drafts=drafts, source=source, parents=parents)
        if found is not None:
            codes = torch.where(made.num_drafts > 0, code, no_drafts(rows, 1).drafter)
            made = merge(found.num_drafts > 0, found, made._replace(drafter=codes))
        found = made
    return no_drafts(rows, k) if found is None else found


def learn(
    drafters: Sequence[Drafter],
    table: Table,
    proposal: Proposal,
    batch: Batch,
    verdict: Verdict,
    hidden: Tensor,
) -> None:
    """Have each drafter learn, with the rows that it drafted for."""
    for code, drafter in enumerate(drafters):
        own = proposal
        if len(drafters) > 1:
            own = proposal._replace(drafter=torch.where(proposal.drafter == code, 0, NO_DRAFTER))
        drafter.learn(table, own, batch, verdict, hidden)


def _timed(drafter: Drafter, table: Table, rows: Tensor, k: int, times: DraftTimes) -> Proposal:
    """Return what a drafter proposes for those of the rows [B] that have room, and count the time."""
    has_room = room(table, rows, k) > 0
    if not (number := int(has_room.sum())):
        return no_drafts(rows, k)
    drafter.catch_up(rows[has_room].tolist())
    start = time.perf_counter()
    made = _proposal(drafter, table, torch.where(has_room, rows, -1), k)
    fraction = int(made.num_drafts.count_nonzero()) / number  # waits for the drafts
    times.add(len(rows), k, (time.perf_counter() - start) * 1e3, fraction)
    return made


def _proposal(drafter: Drafter, table: Table, rows: Tensor, k: int) -> Proposal:
    """Return what a drafter proposes for rows [B], as kernels read it. Raises errors with its name."""
    try:
        made = drafter.propose(table, rows, k)
    except Exception as error:  # keeps its type, by which memory that ran out is known
        if drafter.name not in str(error):
            error.args = (f"{drafter.name}.propose failed: {error}", *error.args[1:])
        raise
    if not isinstance(made, Proposal):
        raise TypeError(f"{drafter.name}.propose returned {shown(made)}; it must return a Proposal.")
    for name, part in made._asdict().items():
        dims, dtype = 1 if name in PER_ROW else 3 if name == "logits" else 2, DTYPES.get(name, torch.int32)
        shape = torch.Size((len(rows), k, table.vocab_size)[:dims])
        kind: list[Any] = [getattr(part, what, None) for what in ("shape", "device", "layout", "dtype")]
        fits = kind[:3] == [shape, rows.device, rows.layout] and torch.can_cast(kind[3], dtype)
        if not fits and not (part is None and name in made._field_defaults):
            given = " ".join(str(each) for each in (type(part).__name__, *kind) if each is not None)
            wanted = f"Tensor {shape} {rows.device} {rows.layout} {dtype}"
            raise ValueError(f"{drafter.name}.propose gave {name} of {given}; it must be {wanted}.")
    parts = zip(made._fields[:6], made)
    return made._replace(**{name: part.int().contiguous() for name, part in parts if part is not None})
