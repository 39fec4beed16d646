"""How much faster an output came than without guessing: an estimate, from measured times of steps.

Known are how many steps there were, what they scored, and what steps of such sizes take on this machine
(`costs.py`, measured when the engine starts if K is automatic). Without guessing there would have been a step
for each token. What both have in common (prompts, the host's work) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...drafters.costs import StepCosts

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import Completion, RequestOutput


def faster(llm: LLM, done: Completion, num_prompt: int) -> float | None:
    """How many times as fast a single output was decoded as without guessing; None if it is not known."""
    if done.record is not None:  # as the page of the trace has it
        [lane] = done.trace().lanes
        return None if lane.plain_seconds is None else lane.plain_seconds / max(lane.seconds, 1e-9)
    costs = llm.engine.policy.costs
    if costs is None or not done.stats.num_steps:
        return None
    context = num_prompt + done.stats.num_tokens // 2
    return _ratio(costs, [done], done.stats.num_steps, context)


def saved_seconds(
    llm: LLM, outputs: Sequence[RequestOutput], num_forward_steps: int, seconds: float
) -> float | None:
    """Seconds that guessing saved in a batch that took `seconds` and so many steps; None if not known."""
    costs, stages = llm.engine.policy.costs, llm.engine.worker.stages.seconds
    every = [done for output in outputs for done in output.outputs]
    if costs is None or not every or not num_forward_steps:
        return None
    sizes = [len(o.prompt_token_ids) + len(done.token_ids) // 2 for o in outputs for done in o.outputs]
    ratio = _ratio(costs, every, num_forward_steps, sum(sizes) // len(sizes))
    decoding = 1 - stages["prefill"] / max(sum(stages.values()), 1e-9)
    return seconds * decoding * (ratio - 1)


def _ratio(costs: StepCosts, outputs: Sequence[Completion], num_steps: int, length: int) -> float:
    """Time without guessing / time with it, for outputs that took `num_steps` steps together; `length` is
    that of a text on average. Each step counts as the average one."""
    stats = [done.stats for done in outputs]
    row_steps = sum(each.num_steps for each in stats)
    rows = max(round(row_steps / num_steps), 1)
    drafted = sum(each.num_drafted for each in stats) / row_steps
    context = rows * length
    if costs.captured:
        by_k = costs.by_k(rows)
        plain, spec = by_k[0], by_k[min(by_k, key=lambda k: abs(k - drafted))]
    else:
        plain = costs.cost(rows, rows, context)
        spec = costs.cost(rows, rows + round(rows * drafted), context)
    with_drafts = sum(each.num_steps_with_drafts for each in stats)
    if with_drafts:
        passes = round(sum(each.num_drafted for each in stats) / with_drafts)
        spec += costs.propose(rows, passes) * with_drafts / row_steps
    return sum(each.num_tokens for each in stats) / row_steps * plain / spec
