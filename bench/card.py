"""The GPU of `bench/gpu.py`, and the shapes of models that fit in its memory."""

import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch

from bench.roofline import MODELS
from nanospec.kernels.launch import GPUS, Gpu, find_gpu

GIB = 1 << 30
EXTRA_BYTES = 4 * GIB  # bytes of K/V and steps, in addition to the weights
TEST_BYTES = 5 * GIB // 4  # bytes of a process that runs a GPU test, on average
SHAPES = ("qwen3-8b", "llama-3.2-1b", "qwen3-0.6b", "smollm2-135m")  # the largest first; all in bench/cases


class Card(NamedTuple):
    """A GPU. `arch` is its target for the compiler, such as "sm_86"; memory is in bytes."""

    name: str
    arch: str
    total: int
    free: int
    gpu: Gpu

    def why_skipped(self, shape: str) -> str:
        """Return the reason if a shape does not fit in the free memory, else an empty string."""
        needed = 2 * sum(map(math.prod, MODELS[shape].parameter_shapes().values())) + EXTRA_BYTES
        return f"needs {needed / GIB:.1f} GiB, {self.free / GIB:.1f} are free" if needed > self.free else ""

    def largest(self) -> str:
        """Return the largest shape that fits, or the smallest of all."""
        return next((shape for shape in SHAPES if not self.why_skipped(shape)), SHAPES[-1])

    def num_test_processes(self) -> int:
        """Return the number of test processes to run at the same time. Most of them compile on one core."""
        return max(min(os.cpu_count() or 1, self.free // TEST_BYTES), 1)

    def lines(self) -> list[str]:
        """Return a description: the properties, and whether kernels have been compiled for this target."""
        gpu, known = self.gpu, "among" if self.arch in GPUS else "not among"
        return [
            f"{self.name}: {self.arch}, {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free, "
            f"{gpu.multiprocessors} multiprocessors, {gpu.shared >> 10} KiB of shared memory per block",
            f"configured as {gpu.family}; {self.arch} is {known} the compiled targets {', '.join(GPUS)}",
        ]


def find_card() -> Card:
    """Return the current GPU. Raises ValueError if there is none or it is not supported."""
    if not torch.cuda.is_available():
        raise ValueError("No GPU was found.")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its CUDA context, which takes memory, ends
        return pool.submit(current_card).result()


def current_card() -> Card:
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    return Card(torch.cuda.get_device_name(), f"sm_{major}{minor}", total, free, find_gpu(0))
