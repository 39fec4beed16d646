"""What a family of models is: its `config.json` as a `ModelConfig`, and its checkpoint as our tensors.

    class Mine(Family, architectures=("MineForCausalLM",)):
        def config(self, raw):
            return read(raw, qkv_bias=True)

is a whole one, if its maths is what `ModelConfig` can say and its tensors are called as
`ModelConfig.parameter_shapes` calls them. Where they are not, `stored_name` says what they are called;
several of ours with one stored name lie in it one below the other. `convert` makes ours of what is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...text.checks import shown
from ..config import ModelConfig
from ..plugins import import_all

FAMILIES: dict[str, Family] = {}


class Place(NamedTuple):
    """Where a tensor of ours lies in a checkpoint: rows `first` .. `first + rows - 1` of tensor `name`."""

    name: str
    first: int
    rows: int


class Family:
    """Only `config` must be defined.

    Attributes:
        ignored: how the names of tensors begin that a text does not need, such as an image encoder's.
    """

    ignored: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, architectures: Collection[str] = (), **further: Any) -> None:
        super().__init_subclass__(**further)
        FAMILIES.update(dict.fromkeys(architectures, cls()))

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Translate the content of a `config.json`; ValueError for what the decoder cannot run."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls the tensor that has ours of `ModelConfig.parameter_shapes` in it."""
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Our tensor `name` from the stored rows, which are in the dtype to compute in, and a copy."""
        return tensor

    def places(self, config: ModelConfig) -> dict[str, Place]:
        """Where each of our tensors lies in a checkpoint."""
        filled: dict[str, int] = {}
        places = {}
        for name, (rows, *_) in config.parameter_shapes().items():
            whole = self.stored_name(name)
            places[name] = Place(whole, filled.get(whole, 0), rows)
            filled[whole] = places[name].first + rows
        return places

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Whether a stored tensor carries nothing: RoPE frequencies, a tied head, what texts do not need."""
        tied_head = name.endswith("lm_head.weight") and config.tie_word_embeddings
        return tied_head or name.endswith("rotary_emb.inv_freq") or name.startswith(self.ignored)


def stored_shapes(config: ModelConfig, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must have, by its own name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in config.parameter_shapes().items():
        place = places[name]
        shapes[place.name] = (place.first + place.rows, *shape[1:])
    return shapes


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family that the content of a `config.json` names; ValueError if there is none."""
    import_all(__package__)
    names, supported = raw.get("architectures"), ", ".join(sorted(FAMILIES))
    if not isinstance(names, list) or not names:
        raise ValueError(f"'architectures' is missing or not a list; supported are {supported}.")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise ValueError(f"Architecture {shown(names[0])} is not supported; supported are {supported}.")
    return FAMILIES[names[0]]
