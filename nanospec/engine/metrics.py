"""Counters of an engine: steps, drafts, acceptance, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..device.orders import Stopwatch
from ..outputs import SpecStats


@dataclass
class Metrics:
    """Engine-wide counters. Of the tokens of prompts `num_cached_tokens` were found in the prefix cache;
    `num_prefill_tokens` were computed, those of preempted requests again."""

    stages: dict[str, Stopwatch]
    spec: SpecStats = field(default_factory=SpecStats)
    num_forward_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0

    def to_dict(self) -> dict[str, object]:
        return {
            **self.spec.to_dict(),
            **{name: value for name, value in vars(self).items() if name.startswith("num_")},
            "stage_seconds": {k: round(v.seconds, 6) for k, v in self.stages.items()},
        }
