"""What happened: steps, drafts, acceptance, and where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

LOSSY = ("typical",)  # rules of acceptance that change what comes out
STAGES = ("prefill", "propose", "forward", "verify", "wait", "host")


@dataclass
class SpecStats:
    """Counters of speculation, for one request or for the whole engine.

    A *step* is one row in one forward pass; tokens per step are over all of them, also those without
    drafts. Drafts behind a stop or the length limit count as drafted, not as accepted. In trees a
    draft's position is its place in the order they were made in, and the accepted ones are counted as if
    they were the first; `by_drafter` has steps, drafted and accepted of each. `acceptance` is the rule.
    """

    acceptance: str = "exact"
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps_with_drafts: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)

    def record(self, drafted: int, accepted: int, emitted: int, drafter: str) -> None:
        """Add one step of one row; `drafter` is the method that guessed."""
        self.num_steps += 1
        self.num_tokens += emitted
        if not drafted:
            return
        self.num_steps_with_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        before = self.by_drafter.get(drafter, (0, 0, 0))
        self.by_drafter[drafter] = [a + b for a, b in zip(before, (1, drafted, accepted))]
        for counts, count in (self.drafted_by_position, drafted), (self.accepted_by_position, accepted):
            counts += [0] * (drafted - len(counts))
            for i in range(count):
                counts[i] += 1

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens over all steps; 1 without speculation."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def efficiency(self) -> float:
        """Emitted / possible tokens, where a step with d drafts could have emitted d + 1."""
        return self.num_tokens / max(self.num_drafted + self.num_steps, 1)

    @property
    def coverage(self) -> float:
        """Share of the steps that had drafts."""
        return self.num_steps_with_drafts / max(self.num_steps, 1)

    def to_dict(self) -> dict[str, object]:
        counts = ("num_steps", "num_tokens", "num_drafted", "num_accepted")
        ratios = ("tokens_per_step", "acceptance_rate", "efficiency", "coverage")
        of_drafter = ("num_steps", "num_drafted", "num_accepted")
        return {
            **({"acceptance": self.acceptance} if self.acceptance != "exact" else {}),
            **({"lossy": True} if self.acceptance in LOSSY else {}),
            **{name: getattr(self, name) for name in counts},
            **{name: round(getattr(self, name), 4) for name in ratios},
            "drafted_by_position": self.drafted_by_position,
            "accepted_by_position": self.accepted_by_position,
            "by_drafter": {name: dict(zip(of_drafter, own)) for name, own in self.by_drafter.items()},
        }


class Stopwatch:
    """Splits the time of all steps by what was done; a captured step is one piece, "wait" is the time until
    its results arrive. `with stopwatch("forward"): ...` adds to `seconds`."""

    def __init__(self) -> None:
        self._stages = {name: _Stage(self, name) for name in STAGES}
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def __call__(self, stage: str) -> _Stage:
        return self._stages[stage]


class _Stage:
    """The time of a `with` block, one at a time: `contextmanager` would take some 10 us of a step."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._watch.seconds[self._name] += time.perf_counter() - self._start


@dataclass
class Metrics:
    """Engine-wide counters. Of the tokens of prompts `num_cached_tokens` were found in the prefix cache;
    `num_prefill_tokens` were computed, those of preempted requests again."""

    stages: Stopwatch
    spec: SpecStats = field(default_factory=SpecStats)
    num_forward_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    simulated: str | None = None  # what made the output up, in a benchmark

    def to_dict(self) -> dict[str, object]:
        return {
            **({"simulated": self.simulated} if self.simulated else {}),
            **self.spec.to_dict(),
            **{name: value for name, value in vars(self).items() if name.startswith("num_")},
            "stage_seconds": {k: round(v, 6) for k, v in self.stages.seconds.items()},
        }
