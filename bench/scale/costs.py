"""What the steps of a replica take: the account (`nanospec/apps/cli/account.py`), read quickly.

A step of B rows with K drafts takes a + b x (cached positions of all rows) ms, if no layer has a window: a
and b are taken from two accounts and kept. A prompt's pass takes what its tokens cost besides attention, and
attention over all pairs of a token and what it sees. Both are the account's figures, not an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from nanospec.apps.cli.account import Machine, Work, account, count, kv_tokens
from nanospec.models.config import ModelConfig

FAR = 1 << 20  # tokens: where the second account is taken


class Costs:
    """Of a replica of so many GPUs. `slices`: whether sums over them are added in slices, None: as the engine
    decides by the number of tokens."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine | None = None,
        gpus: int = 1,
        slices: bool | None = None,
    ) -> None:
        if any(config.windows):
            raise ValueError("With sliding windows, steps do not grow in proportion to the text.")
        self.config, self.machine, self.gpus = config, machine or Machine(), gpus
        self.slices = slices
        self.kv_tokens = kv_tokens(config, self.machine, gpus)
        self.kv_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token, bf16
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}
        self._passes: dict[int, float] = {}

    def step(self, rows: int, k: int, context: float) -> float:
        """ms of a step of so many rows, with `context` cached positions together and k drafts each."""
        line = self._lines.get((rows, k))
        if line is None:
            near, far = (
                account(self.config, rows, k, at, gpus=self.gpus, slices=self.slices).estimate(self.machine)
                for at in (1, FAR)
            )
            slope = (far - near) / (rows * (FAR - 1))
            line = self._lines[rows, k] = near - rows * slope, slope
        return line[0] + line[1] * context

    def prompts(self, chunks: Sequence[tuple[int, int]]) -> float:
        """ms of one pass over pieces of prompts: (tokens, cached ones before them) of each."""
        tokens = sum(n for n, _ in chunks)
        if tokens not in self._passes:
            step = count(self.config, Work(tokens, 1, 0, 0), gpus=self.gpus, slices=self.slices)
            self._passes[tokens] = step.estimate(self.machine)
        read, pair = self._attention
        moved = read * sum(n + start for n, start in chunks)
        computed = pair * sum(n * start + n * (n + 1) / 2 for n, start in chunks)
        return self._passes[tokens] + max(moved, computed)

    def prompt(self, tokens: int, start: int = 0, chunk: int = 2048) -> float:
        """ms of a prompt by itself, in pieces."""
        ends = range(start, start + tokens, chunk)
        return sum(self.prompts([(min(chunk, start + tokens - at), at)]) for at in ends)

    @cached_property
    def _attention(self) -> tuple[float, float]:
        """ms that attention takes for each cached position, and for each pair, over all layers."""
        layers = self.config.num_layers
        step = count(self.config, Work(0, 0, layers, layers), gpus=self.gpus)
        kernel = next(kernel for kernel in step.kernels if kernel.name == "attention")
        return self.machine.ms(kernel.bytes, 0), self.machine.ms(0, kernel.flops)
