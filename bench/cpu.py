"""Decoding speed on a CPU against HF transformers, plain and with n-gram speculation.

    python bench/cpu.py [--repeats 5] [--prompts 4] [--max-tokens 96] [--out bench/results]

One process, every system on every prompt in turn, repeated; ratios are taken within a repeat, and the
median over repeats is reported with its spread. HF and nanospec run the same bf16 weights greedily on
one request at a time, prefill included. "novel" is text sampled at temperature 1 (seeded), which hardly
repeats itself: the worst case for lookup. Only nanospec is compared there, as samplers differ.

Needs transformers (`pip install '.[test]'`) and the evaluation text; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.models.hub import resolve_model

FIXED = (4, 8, 16)
Run = Callable[[list[int]], tuple[list[int], float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="per workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--no-peers", action="store_true", help="leave HF transformers out")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()

    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_model_len": 2048, "max_num_seqs": 4}
    plain = LLM(args.model, spec=SpecConfig(method="none"), **options)
    spec = LLM(args.model, spec=SpecConfig(), **options)
    systems: dict[str, Run] = {"plain": ours(plain, args), "ngram auto": ours(spec, args)}
    for k in FIXED:
        systems[f"ngram K={k}"] = ours(
            LLM(args.model, spec=SpecConfig(num_speculative_tokens=k), **options), args
        )
    if not args.no_peers:
        hf = load_hf(args.model)
        systems["hf plain"] = theirs(hf, args)
        systems["hf lookup"] = theirs(hf, args, prompt_lookup_num_tokens=10)

    workloads = {
        "code edits": common.code_edits(args.prompts),
        "quotation": common.quotations(args.prompts),
        "chat": common.spec_bench(args.prompts, "chat"),
    }
    result: dict[str, Any] = {
        "machine": common.environment(),
        "model": args.model,
        "settings": {"repeats": args.repeats, "prompts": args.prompts, "max_tokens": args.max_tokens},
        "workloads": {},
    }
    for name, messages in workloads.items():
        prompts = [plain.chat_prompt([{"role": "user", "content": text}]) for text in messages]
        result["workloads"][name] = compare(name, prompts, systems, args.repeats)
    prompts = [plain.chat_prompt([{"role": "user", "content": text}]) for text in workloads["chat"]]
    sampled = {
        "plain": ours(plain, args, temperature=1.0, seed=7, ignore_eos=True),
        "ngram auto": ours(spec, args, temperature=1.0, seed=7, ignore_eos=True),
    }
    result["workloads"]["novel"] = compare("novel", prompts, sampled, 2 * args.repeats)
    result["bandwidth"] = bandwidth(plain)
    result["stage_ms_per_step"] = {name: stage_times(llm) for name, llm in (("plain", plain), ("auto", spec))}
    common.save(args.name, result, args.out)


def ours(llm: LLM, args: argparse.Namespace, **params: Any) -> Run:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": args.max_tokens, **params})

    def run(prompt: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        output = llm.generate(prompt, asked)[0]
        return output.token_ids, time.perf_counter() - start

    return run


def load_hf(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.bfloat16).eval()


def theirs(model: Any, args: argparse.Namespace, **options: Any) -> Run:
    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=args.max_tokens,
            pad_token_id=0,
            **options,
        )
        return out[0, len(prompt) :].tolist(), time.perf_counter() - start

    return run


def compare(name: str, prompts: list[list[int]], systems: dict[str, Run], repeats: int) -> dict[str, Any]:
    """Tokens per second of each system, and its ratio to "plain" within each repeat."""
    outputs: dict[str, list[list[int]]] = {}
    rates: dict[str, list[float]] = {system: [] for system in systems}
    for run in systems.values():
        run(prompts[0])  # warm up
    for _ in range(repeats):
        tokens, seconds = dict.fromkeys(systems, 0), dict.fromkeys(systems, 0.0)
        for system in systems:
            outputs[system] = []
        for prompt in prompts:
            for system, run in systems.items():
                output, took = run(prompt)
                outputs[system].append(output)
                tokens[system] += len(output)
                seconds[system] += took
        for system in systems:
            rates[system].append(tokens[system] / seconds[system])
    print(f"\n{name}: {len(prompts)} prompts of {sum(map(len, prompts)) // len(prompts)} tokens on average")
    table: dict[str, Any] = {}
    for system in systems:
        ratios = [a / b for a, b in zip(rates[system], rates["plain"], strict=True)]
        differing = sum(a != b for a, b in zip(outputs[system], outputs["plain"], strict=True))
        table[system] = {
            "tokens_per_second": common.spread(rates[system]),
            "ratio_to_plain": common.spread(ratios),
            "outputs_differing_from_plain": differing,
        }
        rate, ratio = table[system]["tokens_per_second"]["median"], table[system]["ratio_to_plain"]
        print(
            f"  {system:12} {rate:7.1f} tok/s  {ratio['median']:5.2f}x "
            f"({ratio['min']:.2f}-{ratio['max']:.2f})  {differing} outputs differ"
        )
    for ratio_name, (a, b) in {
        "plain_to_hf_plain": ("plain", "hf plain"),
        "ngram_to_hf_lookup": ("ngram auto", "hf lookup"),
        "auto_to_best_fixed": ("ngram auto", _best_fixed(rates)),
    }.items():
        if a in rates and b in rates:
            values = [x / y for x, y in zip(rates[a], rates[b], strict=True)]
            table[ratio_name] = {**common.spread(values), "against": b}
            print(f"  {a} / {b}: {statistics.median(values):.2f}")
    texts = outputs["plain"]
    table["looping_outputs"] = sum(map(common.is_looping, texts))
    table["distinct_4grams"] = round(statistics.mean(map(common.distinct_ratio, texts)), 3)
    return table


def _best_fixed(rates: dict[str, list[float]]) -> str:
    fixed = [system for system in rates if system.startswith("ngram K=")] + ["plain"]
    return max(fixed, key=lambda system: statistics.median(rates[system]))


def bandwidth(llm: LLM) -> dict[str, float]:
    """How near plain decoding is to reading the weights once per token at the measured read rate."""
    model = llm.engine.worker.model
    weights = model.config.num_parameters * model.dtype.itemsize
    block = torch.ones(256 << 20, dtype=torch.float32)  # 1 GiB, beyond any cache
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    metrics = llm.engine.metrics
    step = metrics.stages.seconds["forward"] / max(metrics.num_forward_steps, 1)
    shown = {
        "read_gb_per_s": round(best / 1e9, 1),
        "weight_mb": round(weights / 1e6, 1),
        "limit_ms_per_step": round(weights / best * 1e3, 2),
        "forward_ms_per_step": round(step * 1e3, 2),
        "share_of_limit": round(weights / best / step, 3),
    }
    print(f"\nbandwidth: {shown}")
    return shown


def stage_times(llm: LLM) -> dict[str, float]:
    """Mean ms per decoding step by stage (prefill: per prompt token)."""
    metrics = llm.engine.metrics
    times = {k: round(v / metrics.num_forward_steps * 1e3, 3) for k, v in metrics.stages.seconds.items()}
    prefill = metrics.stages.seconds["prefill"] / max(metrics.num_prefill_tokens, 1)
    return {**times, "prefill": round(prefill * 1e3, 4)}


if __name__ == "__main__":
    main()
