"""The result of all rounds: a row for each load and server, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arrivals import Load
from .figures import best, equal, over_rounds, ratios
from .servers import Lane

Json = dict[str, Any]
Runs = Mapping[tuple[Load, Lane], list[Json]]
COLUMNS = (
    "load", "server", "first token, ms", "a token, ms", "longest gap, ms", "whole answer, s", "tokens/s",
    "goodput", "refused, failed",
)  # fmt: skip
TIMES = (  # in the order of the columns; factor, digits
    ("first_token_seconds", 1e3, 0), ("token_seconds", 1e3, 1), ("longest_gap_seconds", 1e3, 0),
    ("end_to_end_seconds", 1, 2),
)  # fmt: skip


def rows(runs: Runs) -> list[Json]:
    """One for each load and lane; those of nanospec with ratios to the best of the others."""
    loads = list(dict.fromkeys(load for load, _ in runs))
    lanes = list(dict.fromkeys(lane for _, lane in runs))
    found = []
    for load in loads:
        of = {lane: [run["figures"] for run in runs[load, lane]] for lane in lanes}
        said = {lane: over_rounds(of[lane]) for lane in lanes}
        peer = best({lane: said[lane] for lane in lanes if lane.system != "nanospec"})
        for lane in lanes:
            row: Json = {"load": load.name, "server": lane.name, "figures": said[lane]}
            row["errors"] = [run["errors"] for run in runs[load, lane]]
            row["equal_to_first_load"] = _equal(runs[load, lane], runs[loads[0], lane])
            plain = next((o for o in lanes if o.system == lane.system and o.guess is None), lane)
            if lane != plain:
                row["equal_to_plain"] = _equal(runs[load, lane], runs[load, plain])
            if lane.system != "nanospec":
                row["threads"] = lane.threads
            elif peer:
                row["peer"] = {"server": peer.name, "ratios": ratios(of[lane], of[peer])}
            found.append(row)
    return found


def _equal(runs: Sequence[Json], others: Sequence[Json]) -> list[int]:
    """Equal texts, and how many were compared, of all rounds together."""
    counts = [equal(a["requests"], b["requests"]) for a, b in zip(runs, others, strict=True)]
    return [sum(column) for column in zip(*counts)]


def markdown(table: Sequence[Json]) -> str:
    """Medians over the rounds; times are p50 / p99."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in table:
        of = row["figures"]
        cells = [row["load"], row["server"]]
        cells += [_times(of.get(name), by, digits) for name, by, digits in TIMES]
        cells += [f"{of['tokens_per_second']['median']:.0f}", f"{of['goodput_share']['median']:.0%}"]
        cells += [f"{of['refused']['median']:g}, {of['failed']['median']:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(found: Json | None, by: float, digits: int) -> str:
    if not found:  # no request was answered
        return ""
    return " / ".join(f"{found[part]['median'] * by:.{digits}f}" for part in ("p50", "p99"))


def remarks(table: Sequence[Json]) -> str:
    """How many texts are equal, and how much faster nanospec is within a round."""
    lines = []
    for row in table:
        counts = {name.replace("_", " "): row[name] for name in row if name.startswith("equal_")}
        same = ", ".join(f"{of[0]} of {of[1]} {name}" for name, of in counts.items())
        lines.append(f"{row['load']}, {row['server']}: {same}")
        if "peer" in row:
            lines.append(f"  as fast as {row['peer']['server']}:")
            for name, found in row["peer"]["ratios"].items():
                lines.append(f"    {name}: {found['median']:.2f}x ({found['min']:.2f} to {found['max']:.2f})")
    return "\n".join(lines)
