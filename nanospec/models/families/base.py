"""Translate a family's `config.json` into a `ModelConfig`, and its checkpoint into our tensors.

    class Mine(Family, architectures=("MineForCausalLM",)):
        def config(self, raw):
            return read(raw, qkv_bias=True)

is a complete family if `ModelConfig` can express it and its tensors have the names of
`ModelConfig.parameter_shapes`. `stored_name` maps other names; several of our tensors with one stored name
are its rows, one below the other. `convert` changes stored values into ours.
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
    """The place of one of our tensors in a checkpoint: rows `first` .. `first + rows - 1` of `name`."""

    name: str
    first: int
    rows: int


class Family:
    """Only `config` must be defined.

    Attributes:
        ignored: prefixes of tensors that text does not need, such as an image encoder's.
    """

    ignored: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, architectures: Collection[str] = (), **further: Any) -> None:
        super().__init_subclass__(**further)
        FAMILIES.update(dict.fromkeys(architectures, cls()))

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Translate a `config.json`. Raises ValueError for what the decoder cannot run."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that holds ours of this name."""
        return name

    def convert(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Return our tensor from its stored rows, a copy in the dtype to compute in."""
        return tensor

    def places(self, config: ModelConfig) -> dict[str, Place]:
        """Return the place of each of our tensors in a checkpoint."""
        filled: dict[str, int] = {}
        places = {}
        for name, (rows, *_) in config.parameter_shapes().items():
            whole = self.stored_name(name)
            places[name] = Place(whole, filled.get(whole, 0), rows)
            filled[whole] = places[name].first + rows
        return places

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Return whether a stored tensor is not needed: RoPE frequencies, a tied head, `ignored` ones."""
        tied_head = name.endswith("lm_head.weight") and config.tie_word_embeddings
        return tied_head or name.endswith("rotary_emb.inv_freq") or name.startswith(self.ignored)


def stored_shapes(config: ModelConfig, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the checkpoint must have, by its own name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in config.parameter_shapes().items():
        place = places[name]
        shapes[place.name] = (place.first + place.rows, *shape[1:])
    return shapes


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family that a `config.json` names. Raises ValueError if there is none."""
    import_all(__package__)
    names, supported = raw.get("architectures"), ", ".join(sorted(FAMILIES))
    if not isinstance(names, list) or not names:
        raise ValueError(f"'architectures' is missing or not a list; supported are {supported}.")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise ValueError(f"Architecture {shown(names[0])} is not supported; supported are {supported}.")
    return FAMILIES[names[0]]
