"""One model split among several processes of this machine: are the texts those of one, and what does it cost?

    python bench/parallel.py [--sizes 1 2 3] [--dtypes float32 bfloat16] [--prompts 20] [--max-tokens 96]
                             [--out bench/results]

Greedy and seeded, every size writes all prompts with lookup and without, one size after another. Reported are
how many texts with guesses equal those without, and how many equal those of one process; what each rank
takes; and what ranks exchange, counted and timed. On a CPU, whose cores they share, splitting can only cost:
nothing here says anything about GPUs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

from bench import common
from bench.peers.texts import short_prompts
from nanospec import LLM, SamplingParams
from nanospec.models.hub import resolve_model
from nanospec.text.prompts import as_message
from nanospec.text.tokenizer import Tokenizer

Texts = list[list[int]]


class Exchange:
    """Counts and times what a rank exchanges."""

    def __init__(self, llm: LLM) -> None:
        self.count, self.bytes, self.seconds = 0, 0, 0.0
        group = getattr(llm.engine.worker, "group", None)
        if group is not None:
            self._group, group._group = group._group, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _allgather_base(self, out: Tensor, given: Tensor, *options: Any) -> Any:
        start = time.perf_counter()
        work = self._group._allgather_base(out, given, *options)
        work.wait()
        self.seconds += time.perf_counter() - start
        self.count, self.bytes = self.count + 1, self.bytes + out.nbytes - given.nbytes
        return work


def write(folder: Path, size: int, dtype: str, prompts: Texts, max_tokens: int) -> dict[str, Any]:
    """All prompts, with lookup and without, in one engine."""
    params = [
        SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "device": "cpu", "seed": 0}
    start = time.perf_counter()
    with LLM(folder, dtype=dtype, tensor_parallel_size=size, **options) as llm:
        found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - start, 1)}
        exchange, metrics = Exchange(llm), llm.engine.metrics
        for name, k in (("without", 0), ("with", None)):
            asked = [replace(p, num_speculative_tokens=k) for p in params]
            steps, start = metrics.num_forward_steps, time.perf_counter()
            found[name] = [output.token_ids for output in llm.generate(prompts, asked)]
            seconds = time.perf_counter() - start
            found[f"ms_per_step_{name}"] = round(1e3 * seconds / (metrics.num_forward_steps - steps), 2)
            found[f"tokens_per_second_{name}"] = round(sum(map(len, found[name])) / seconds, 1)
        found["memory"] = [plan._asdict() for plan in llm.engine.worker.memory]
        found["exchanged"] = {
            "per_step": round(exchange.count / metrics.num_forward_steps, 1),
            "bytes_per_exchange": round(exchange.bytes / max(exchange.count, 1)),
            "ms_per_exchange": round(1e3 * exchange.seconds / max(exchange.count, 1), 3),
        }
    return found


def equal(a: Texts, b: Texts) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def show(row: dict[str, Any], count: int) -> None:
    print(
        f"{row['dtype']}, {row['ranks']} rank(s): {row['with_equal_without']} of {count} with guesses as "
        f"without, {row['equal_to_first']} as the first; {row['tokens_per_second_without']} -> "
        f"{row['tokens_per_second_with']} tokens/s; {row['exchanged']}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2, 3), help="the first is compared with")
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    folder = resolve_model(args.model)
    tokenizer = Tokenizer(folder)

    def chat(text: str) -> list[int]:
        return tokenizer.encode(tokenizer.apply_chat_template(as_message(text)), add_special_tokens=False)

    prompts, rows = short_prompts(chat, args.prompts), []
    for dtype in args.dtypes:
        reference: Texts = []
        for size in args.sizes:
            found = write(folder, size, dtype, prompts, args.max_tokens)
            texts, guessed = found.pop("without"), found.pop("with")
            reference = reference or texts
            found |= {"with_equal_without": equal(guessed, texts), "equal_to_first": equal(texts, reference)}
            rows.append({"dtype": dtype, "ranks": size, **found})
            show(rows[-1], len(prompts))
    settings = {"model": args.model, "prompts": len(prompts), "max_tokens": args.max_tokens}
    common.save("parallel", {"environment": common.environment(), **settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
