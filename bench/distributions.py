"""Are outputs distributed as they must be, whoever guesses, whatever is asked?

    python bench/distributions.py [--samples 40] [--seed 0] [--ways "draft" ...] [--out bench/results]

Every way of guessing, rule of acceptance that loses nothing, sampling parameter and temperature of
`tests/ways.py`: so many outputs of each are drawn, half of them in steps as on a GPU if they can be, and
compared with the probabilities of all outputs, counted by `tests/exact.py` from the logits of transformers.
Ends with status 1 if Pearson's test finds a chance below `BOUND`, corrected for how often it was asked, for
one cell of the grid, for a way, for what is asked, or for all together; or if a way guesses hardly ever right
or hardly ever wrong.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from tests.drive import MODES
from tests.exact import Fit, Output, fit, joint, least_p, logits_by_output, together
from tests.ways import (
    ASKED,
    LENGTH,
    LOSSLESS,
    PROMPT,
    TEMPERATURES,
    VOCAB,
    WAYS,
    Drawn,
    Likely,
    World,
    asked,
    draw,
    engine_for,
    make_world,
    rules,
)

BOUND = 1e-4


class Cell(NamedTuple):
    """One of the grid."""

    way: str
    rule: str
    asked: str
    temperature: float


def draw_all(world: World, ways: Sequence[str], samples: int, seed: int) -> dict[Cell, Drawn]:
    found: dict[Cell, Drawn] = {}
    for way in ways:
        cells = [Cell(way, *rest) for rest in itertools.product(rules(way), ASKED, TEMPERATURES)]
        modes = ["plain"] if WAYS[way].own is Likely else MODES  # what guesses on the host cannot be recorded
        engines = [engine_for(world, way, **MODES[mode]) for mode in modes]
        params = [asked(cell.asked, cell.temperature, cell.rule) for cell in cells]
        start = time.perf_counter()
        first = seed + list(WAYS).index(way) * 10**9
        found |= dict(zip(cells, draw(engines, params, samples, first), strict=True))
        print(f"{way}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def shown(one: Fit) -> dict[str, Any]:
    p = {"x2": round(one.x2, 1), "freedom": one.freedom, "p": float(f"{one.p:.3g}")}
    return {**p, "tv": round(one.tv, 4), "tv_over_expected": round(one.ratio, 3)}


def by_way(found: dict[Cell, Drawn], fits: dict[Cell, Fit]) -> list[dict[str, Any]]:
    """What was guessed and accepted, and how well all that it was asked fits; ratios are means over cells."""
    rows = []
    for way, rule in dict.fromkeys((cell.way, cell.rule) for cell in found):
        own = [cell for cell in found if (cell.way, cell.rule) == (way, rule)]
        drafted = sum(found[cell].drafted for cell in own)
        accepted = sum(found[cell].accepted for cell in own)
        rate = round(accepted / drafted, 3) if drafted else None
        guesses = {"drafted": drafted, "accepted": rate}
        rows.append({"way": way, "rule": rule, **guesses, **shown(together([fits[cell] for cell in own]))})
    return rows


def by_asked(found: dict[Cell, Drawn], expected: dict[Cell, dict[Output, float]]) -> list[dict[str, Any]]:
    """The outputs of all ways as one sample, and of a sixteenth and a quarter of it; `least_p`: the least
    chance of whole outputs and of their beginnings."""
    rows = []
    for key in dict.fromkeys(cell[1:] for cell in found):
        own = [cell for cell in found if cell[1:] == key]
        samples = zip(*(found[cell].outputs for cell in own))
        counts = [sum(sizes, Counter[Output]()) for sizes in samples]
        parts = [{"outputs": c.total(), **shown(fit(c, expected[own[0]]))} for c in counts]
        least = least_p(counts[-1], expected[own[0]])
        rows.append({**dict(zip(Cell._fields[1:], key)), "least_p": float(f"{least:.3g}"), "fits": parts})
    return rows


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        logits = logits_by_output(world.folder, PROMPT, VOCAB, LENGTH)
        found = draw_all(world, args.ways, args.samples, args.seed)
    expected = {cell: joint(logits, PROMPT, asked(cell.asked, cell.temperature, cell.rule)) for cell in found}
    fits = {cell: fit(drawn.outputs[-1], expected[cell]) for cell, drawn in found.items()}
    worst = min(fits, key=lambda cell: fits[cell].p)
    ways, pooled, whole = by_way(found, fits), by_asked(found, expected), together([*fits.values()])
    never = [row["way"] for row in ways if row["drafted"] and not 0.05 < row["accepted"] < 0.95]
    chances = {
        "cell": fits[worst].p * len(fits),
        "way": min(row["p"] for row in ways) * len(ways),
        "asked": min(row["least_p"] for row in pooled) * len(pooled),
        "all": whole.p,
    }
    grid = {"ways": args.ways, "rules": LOSSLESS, "asked": ASKED, "temperatures": TEMPERATURES}
    result = {
        "environment": common.environment(),
        "seconds": round(time.perf_counter() - start),
        "samples": args.samples,
        "seed": args.seed,
        "vocabulary": VOCAB,
        "length": LENGTH,
        "grid": grid,
        "outputs": sum(drawn.outputs[-1].total() for drawn in found.values()),
        "cells": len(fits),
        "all": shown(whole),
        "worst_cell": {**worst._asdict(), **shown(fits[worst])},
        "largest_tv_over_expected": round(max(row["fits"][-1]["tv_over_expected"] for row in pooled), 3),
        "corrected_p": {name: float(f"{min(p, 1.0):.3g}") for name, p in chances.items()},
        "by_way": ways,
        "by_asked": pooled,
    }
    common.write("distributions", result, args.out)
    print(result["all"], result["worst_cell"], result["corrected_p"], never)
    return int(min(chances.values()) < BOUND or bool(never))


if __name__ == "__main__":
    sys.exit(main())
