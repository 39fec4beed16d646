"""What do more guesses cost and bring, and how many does the automatic choice take?

    python bench/over_k.py [--batches 1 16] [--prompts 8] [--rounds 3] [--max-tokens 96] [--out bench/results]

One process and one copy of the weights, an engine for each fixed K and one that chooses. They take turns
after every step, so that whatever else happens on the machine slows all. Lookup, greedy, EOS honoured; of
each kind of text the same prompts, so many at once. ms are those of steps without prompts. Speed-ups are
taken within a round, until the last request is done (`speedup`) and until a request is done, on average
(`sooner`); their median and range over the rounds is reported. What is guessed and accepted is the same in
every round. `python -m bench.pictures` draws it. Needs the evaluation text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.automatic import STAGES, chat, make_engines
from nanospec import SamplingParams
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request

KINDS: dict[str, Callable[[int], list[str]]] = {
    "quotations": common.quotations,
    "code edits": common.code_edits,
    "chat": lambda count: common.spec_bench(count, "chat"),
}
KS: dict[str, Any] = {**{str(k): k for k in (0, 1, 2, 3, 4, 6, 8, 12, 16)}, "auto": "auto"}
CACHE = 512 << 20  # bytes for each engine: 16 requests of a thousand tokens


class Run(NamedTuple):
    """Some requests on one engine. A row is one request in one step."""

    ms: float
    done_ms: list[float]  # by request: when it was done
    steps: int
    rows: int
    tokens: int
    drafted: list[int]  # rows with more than so many guesses


def race(engines: dict[str, Engine], prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Run]:
    """All prompts at once on every engine, one step of each at a time."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    before = {name: _spent(engine) for name, engine in engines.items()}
    requests = {name: [engine.add(prompt, params) for prompt in prompts] for name, engine in engines.items()}
    done: dict[str, list[float]] = {name: [] for name in engines}
    while any(engine.has_work for engine in engines.values()):
        for name, engine in engines.items():
            if engine.has_work:
                engine.step()
                new = sum(request.is_finished for request in requests[name]) - len(done[name])
                done[name] += [_spent(engine)[0] - before[name][0]] * new
    found = {}
    for name, engine in engines.items():
        ms, steps = (after - at for after, at in zip(_spent(engine), before[name]))
        found[name] = _run(ms, done[name], int(steps), requests[name])
    return found


def _spent(engine: Engine) -> tuple[float, float]:
    """ms and number of its steps so far, but for prompts."""
    seconds = engine.worker.stages.seconds
    return 1e3 * sum(seconds[stage] for stage in STAGES), engine.metrics.num_forward_steps


def _run(ms: float, done_ms: list[float], steps: int, requests: Sequence[Request]) -> Run:
    stats = [request.stats for request in requests]
    drafted = [sum(at) for at in zip_longest(*(s.drafted_by_position for s in stats), fillvalue=0)]
    return Run(ms, done_ms, steps, sum(s.num_steps for s in stats), sum(s.num_tokens for s in stats), drafted)


def together(runs: Sequence[Run]) -> Run:
    """As if they were one."""
    ms, done, steps, rows, tokens, drafted = zip(*runs)
    by_number = [sum(at) for at in zip_longest(*drafted, fillvalue=0)]
    return Run(sum(ms), [*chain(*done)], sum(steps), sum(rows), sum(tokens), by_number)


def summary(rounds: Sequence[dict[str, Run]]) -> Iterator[dict[str, Any]]:
    """One for each K, of the same prompts in every round; `guesses` counts rows by their guesses."""
    for name in rounds[0]:
        runs = [found[name] for found in rounds]
        last = runs[-1]
        more = [last.rows, *last.drafted, 0]
        yield {
            "k": name,
            "tokens_per_step": round(last.tokens / last.rows, 3),
            "guesses_per_step": round(sum(last.drafted) / last.rows, 3),
            "guesses": {k: n - m for k, (n, m) in enumerate(pairwise(more)) if n > m},
            "ms_per_step": common.spread([run.ms / run.steps for run in runs]),
            "tokens_per_second": common.spread([1e3 * run.tokens / run.ms for run in runs]),
            "speedup": common.spread(
                [run.tokens / run.ms / (r["0"].tokens / r["0"].ms) for run, r in zip(runs, rounds)]
            ),
            "sooner": common.spread([sum(r["0"].done_ms) / sum(run.done_ms) for run, r in zip(runs, rounds)]),
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="requests at once")
    parser.add_argument("--prompts", type=int, default=8, help="at least, of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    engines, tokenizer = make_engines(args.model, KS, max_model_len=2048, kv_cache_memory=CACHE)
    rows = []
    for kind, texts in KINDS.items():
        for B in args.batches:
            prompts = [chat(tokenizer, text)[-1500:] for text in texts(-(-args.prompts // B) * B)]
            waves = [prompts[i : i + B] for i in range(0, len(prompts), B)]
            rounds = []
            for _ in range(args.rounds):
                ran = [race(engines, wave, args.max_tokens) for wave in waves]
                rounds.append({name: together([found[name] for found in ran]) for name in engines})
            for row in summary(rounds):
                rows.append({"kind": kind, "batch": B, **row})
                show(rows[-1])
    settings = {name: getattr(args, name) for name in ("batches", "prompts", "rounds", "max_tokens")}
    result = {"environment": common.environment(), "model": Path(args.model).name, "settings": settings}
    common.save("over_k", {**result, "rows": rows}, args.out)


def show(row: dict[str, Any]) -> None:
    ms, speedup, sooner = row["ms_per_step"], row["speedup"], row["sooner"]
    print(
        f"{row['kind']:10} B={row['batch']:<3} K={row['k']:4} {row['tokens_per_step']:6.2f} tokens per step, "
        f"{row['guesses_per_step']:5.2f} guesses, {ms['median']:6.2f} ms ({ms['min']:.2f}-{ms['max']:.2f}), "
        f"{speedup['median']:5.2f}x ({speedup['min']:.2f}-{speedup['max']:.2f}), "
        f"sooner {sooner['median']:.2f}x",
        flush=True,
    )


if __name__ == "__main__":
    main()
