"""Do n-gram trees pay? Tokens per step of chains and trees of the same number of drafts, on real text.

    python bench/trees.py [--texts 16] [--out bench/results]

The reference texts of `traces.py` stand for the output, and the engine's own matcher drafts after each
of their tokens. "up to m" branches only where the longest match has at most m tokens, and drafts a chain
elsewhere; the engine does so with m = `ngram_tree.LONG_MATCH`. No model runs, so this counts tokens, not
time; for a given K the time of a step is the same, but for how the drafts are found and for moving what
a branch has accepted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import common, traces
from bench.traces import Text, after_each_token
from nanospec.kernels.speculation import ngram_tree
from nanospec.models.hub import resolve_model
from nanospec.text.tokenizer import Tokenizer

KS, WIDTHS, UP_TO = (4, 8, 16), (2, 4), (1, 2, 3, 8)
MAX_N = 8


def accepted(text: Text, k: int, width: int) -> tuple[list[int], list[int]]:
    """After each token of the reference: the length of the match, and how many drafts are right."""
    reference = text[1]
    table = after_each_token(text, k, min_n=1, max_n=MAX_N, width=width)
    found = ngram_tree.naive(table, torch.arange(len(reference)), k, MAX_N, width)
    assert found.parents is not None
    columns = (found.drafts.tolist(), found.parents.tolist(), found.num_drafts.tolist())
    runs = [walk(*row, reference[i:]) for i, row in enumerate(zip(*columns))]
    return found.match_len.tolist(), runs


def walk(drafts: list[int], parents: list[int], count: int, text: list[int]) -> int:
    """How far a tree follows the text."""
    node, depth = 0, 0
    while depth < len(text):
        matching = (i for i in range(node, count) if parents[i] == node and drafts[i] == text[depth])
        child = next(matching, None)
        if child is None:
            break
        node, depth = child + 1, depth + 1
    return depth


def tokens_per_step(runs: Sequence[list[int]]) -> float:
    """Decoding each reference: a step emits what is accepted and one more."""
    tokens = steps = 0
    for run in runs:
        at = 0
        while at < len(run):
            at += min(run[at], len(run) - at - 1) + 1
            steps += 1
        tokens += len(run)
    return tokens / steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--texts", type=int, default=16, help="per workload")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(argv)
    ngram_tree.LONG_MATCH = MAX_N  # branch everywhere
    texts = traces.workloads(Tokenizer(resolve_model(args.tokenizer)), args.texts)
    rows: list[dict[str, Any]] = []
    print(" " * 22 + "".join(f"{name[:12]:>14}" for name in texts))
    for k in KS:
        chains = {name: [accepted(text, k, 1) for text in group] for name, group in texts.items()}
        shapes: dict[str, dict[str, float]] = {
            "chain": {name: tokens_per_step([run for _, run in found]) for name, found in chains.items()}
        }
        for width in WIDTHS:
            trees = {name: [accepted(text, k, width)[1] for text in group] for name, group in texts.items()}
            for up_to in UP_TO:
                shapes[f"width {width} up to {up_to}"] = {
                    name: tokens_per_step(
                        [
                            [t if n <= up_to else c for n, c, t in zip(match, chain, tree, strict=True)]
                            for (match, chain), tree in zip(chains[name], trees[name], strict=True)
                        ]
                    )
                    for name in texts
                }
        for shape, values in shapes.items():
            rounded = {name: round(value, 3) for name, value in values.items()}
            rows.append({"k": k, "shape": shape, "tokens_per_step": rounded})
            print(f"K={k:<3} {shape:16}" + "".join(f"{value:14.3f}" for value in values.values()), flush=True)
    common.save("trees", {"environment": common.environment(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
