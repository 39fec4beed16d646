"""At what share of the memory's rate does a step of one request read the weights?

    python bench/reading.py [--model smollm2-135m-instruct] [--steps 300] [--out bench/results]

A step without drafts and a sum of 256 MiB by PyTorch, which lie on large pages as the weights do, take turns
in one process, so that both meet the same neighbours; after each sum a pause lets PyTorch's threads go to
sleep. The share is taken pair by pair: bytes of bf16 weights by the time of the whole step, host included,
over the rate of the sum beside it. It would be 1 if a step did nothing but read weights as fast as that.
The other limit is measured after that: products of square matrices, by what the engine uses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.kernels.layer.linear import linear, pack
from nanospec.models.kv_cache import zeros_on_demand

SUMMED = 256 << 20  # bytes
PAUSE = 0.01  # seconds
PROMPT = 200  # tokens
REQUEST = 300  # steps
SQUARE = 1024  # rows and columns of both matrices of a product


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 1}
    llm = LLM(args.model, spec=SpecConfig(method="none"), **options)
    weights = common.streamed_bytes(llm.engine.worker.model.config)
    block = zeros_on_demand((SUMMED // 4,), torch.float32, torch.device("cpu"), large_pages=True).fill_(1)
    steps: list[float] = []
    sums: list[float] = []
    while len(steps) < args.steps:
        if not llm.engine.has_work:
            params = SamplingParams(temperature=0, max_tokens=REQUEST, ignore_eos=True)
            llm.engine.add(list(range(1000, 1000 + PROMPT)), params)
            llm.engine.step()  # reads the prompt
        start = time.perf_counter()
        llm.engine.step()
        middle = time.perf_counter()
        block.sum()
        end = time.perf_counter()
        steps.append(weights / (middle - start) / 1e9)
        sums.append(SUMMED / (end - middle) / 1e9)
        time.sleep(PAUSE)
    shares = [step / read for step, read in zip(steps, sums)]
    products = product_rates(args.steps)
    lists = {"step, GB/s": steps, "sum, GB/s": sums, "share": shares, "product, GFLOP/s": products}
    for name, found in lists.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:16} {middle:.3g} (a quarter below {low:.3g}, a quarter above {high:.3g})")
    result = {"step_gb_per_s": steps, "sum_gb_per_s": sums, "share": shares, "product_gflop_per_s": products}
    rounded = {name: [round(x, 3) for x in found] for name, found in result.items()}
    common.save("reading", {"environment": common.environment(), **rounded}, args.out)


def product_rates(count: int) -> list[float]:
    """GFLOP/s of so many products in bf16."""
    matrix = torch.randn(SQUARE, SQUARE).bfloat16()
    weight, rates = pack(matrix), []
    for _ in range(count):
        start = time.perf_counter()
        linear(matrix, weight)
        rates.append(2e-9 * SQUARE**3 / (time.perf_counter() - start))
    return rates


if __name__ == "__main__":
    main()
