"""Is this checkout as fast as another? Whole processes of both, in turn, on the same prompts.

    python bench/before_after.py OTHER_CHECKOUT [--rounds 5] [--prompts 3] [--max-tokens 96] [--out FOLDER]

Each process loads the model and answers code edits, quotations and chat, greedily: plain and with n-gram
lookup and automatic K, one request at a time and all at once. Reported are medians over the rounds of this
checkout's tokens per second over the other's, the seconds that a start takes, and whether all outputs are
equal. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common

HERE = Path(__file__).resolve().parent.parent
CHILD = """
import json, sys, time
asked = json.load(sys.stdin)
start = time.perf_counter()
from nanospec import LLM, SamplingParams, SpecConfig
options = dict(dtype="bfloat16", enable_prefix_caching=False, max_model_len=2048, max_num_seqs=16)
found, params = {}, SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
for name, spec in (("plain", SpecConfig(method="none")), ("n-gram", SpecConfig())):
    llm = LLM(asked["model"], spec=spec, **options)
    found[name + " start"] = {"seconds": time.perf_counter() - start}
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in asked["texts"]]
    llm.generate(prompts[0], params)
    for kind, batches in (("one by one", [[prompt] for prompt in prompts]), ("at once", [prompts])):
        start = time.perf_counter()
        outputs = [output.token_ids for batch in batches for output in llm.generate(batch, params)]
        seconds = time.perf_counter() - start
        rate = sum(map(len, outputs)) / seconds
        found[name + ", " + kind] = {"tokens_per_second": rate, "outputs": outputs}
    start = time.perf_counter()
print(json.dumps(found))
"""


def run(checkout: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """One process of a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--model", default=str(HERE / "weights" / "smollm2-135m-instruct"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3, help="per kind of text")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    n = args.prompts
    texts = [*common.code_edits(n), *common.quotations(n), *common.spec_bench(n, "chat")]
    asked = {"model": args.model, "texts": texts, "max_tokens": args.max_tokens}
    rounds = []
    for i in range(args.rounds):  # in turn, and each first every other time
        order = [HERE, args.other.resolve()] if i % 2 else [args.other.resolve(), HERE]
        found = {checkout: run(checkout, asked) for checkout in order}
        rounds.append((found[HERE], found[args.other.resolve()]))
    table: dict[str, Any] = {}
    for what in rounds[0][0]:
        measure = "seconds" if what.endswith("start") else "tokens_per_second"
        mine, other = ([pair[i][what][measure] for pair in rounds] for i in (0, 1))
        ratio = common.spread([a / b for a, b in zip(mine, other, strict=True)])
        table[what] = {
            measure: round(statistics.median(mine), 2),
            f"other_{measure}": round(statistics.median(other), 2),
            "ratio": ratio,
        }
        if measure == "tokens_per_second":
            table[what]["outputs_equal"] = all(a[what]["outputs"] == b[what]["outputs"] for a, b in rounds)
        print(f"{what:24} {table[what]}")
    settings = {"rounds": args.rounds, "prompts": len(texts), "max_tokens": args.max_tokens}
    common.save(
        "before_after", {"machine": common.environment(), "settings": settings, "table": table}, args.out
    )


if __name__ == "__main__":
    main()
