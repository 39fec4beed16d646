"""A sampling parameter of one's own: its name and limits, and what it does to the logits.

All there is to write is a subclass of `SamplingParameter`, in a file of this folder or in any program:

    class Halved(SamplingParameter, name="halved", help="by how much logits are divided"):
        default, low, high = 1.0, 0.5, 2.0

        def change(self, logits, value):
            return logits / value

`SamplingParams(extra_args={"halved": 2})` then asks for it; so do, if it stands in this folder, `--halved 2`
on the command line and `"halved": 2` in a line of JSONL. Requests that do not ask keep their logits to the
bit, and steps in which none asks do nothing for it (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from ..config import SamplingParams
from ..models.plugins import import_all
from ..text.checks import check_number, shown


class SamplingParameter:
    """What a request may set beside the fields of `SamplingParams`. Only `change` must be defined.

    Attributes:
        name, help: what the user knows it by.
        default: the value that changes nothing.
        low, high: the least and the largest value.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    default: float = 0.0
    low: float = 0.0
    high: float = 1.0

    def __init_subclass__(cls, name: str, help: str, **further: Any) -> None:
        super().__init_subclass__(**further)
        taken = {field.name for field in fields(SamplingParams)} | {"prompt", "messages"}
        if not name.isidentifier() or name in taken:
            raise ValueError(f"name={shown(name)} of a sampling parameter must be a word that is not in use.")
        if not cls.low <= cls.default <= cls.high:
            raise ValueError(f"{name}: default={cls.default} must lie between {cls.low} and {cls.high}.")
        cls.name, cls.help = name, help
        PARAMETERS[name] = cls()

    def change(self, logits: Tensor, value: Tensor) -> Tensor:
        """Logits [N, V] float32 of N positions as this parameter wants them, -inf for what may not be drawn.

        `value` [N, 1] float32 is what each position's request asks for. A row of the result must depend on
        its row of logits and its value alone: so it is the same with guessing on and off. It must not read
        tensors on the host, since steps are recorded on a GPU. Stop tokens that `min_tokens` bars are given
        the least logit.
        """
        raise NotImplementedError(f"{type(self).__name__} must define change(self, logits, value).")


PARAMETERS: dict[str, SamplingParameter] = {}


def registered() -> Mapping[str, SamplingParameter]:
    """All parameters in the order of their names, those of this folder included."""
    import_all(__package__)
    return dict(sorted(PARAMETERS.items()))


def check_extra_args(asked: Mapping[str, float]) -> None:
    """Raise ValueError unless all these parameters exist and have values within their limits."""
    known = registered()
    for name, value in asked.items():
        if name not in known:
            raise ValueError(f"extra_args={shown(asked)} names {shown(name)}; known are {', '.join(known)}.")
        check_number(f"extra_args: {name}", value, known[name].low, known[name].high, float)


def gather(options: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Fields of `SamplingParams`, where `options` may name registered parameters beside them."""
    own = {name: options[name] for name in registered() if name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    extra = rest.get("extra_args", defaults)
    if not own or not isinstance(extra, Mapping | None):  # which `SamplingParams` refuses
        return rest
    return {**rest, "extra_args": {**(extra or {}), **own}}
