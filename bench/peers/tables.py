"""What the rounds of the comparison on a CPU say: rates, ratios within a round, equal outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.common import spread

Json = dict[str, Any]
Round = dict[tuple[str, str], Json]
"""(label of system and way, name of the case): what its worker noted"""


def tokens(run: Json) -> int:
    return sum(map(len, run["outputs"]))


def rate(run: Json) -> float:
    """Tokens per second, prompts included."""
    return tokens(run) / run["seconds"]


def decode_rate(run: Json) -> float | None:
    """Tokens per second after each wave's first ones, where the time to those is known."""
    later = tokens(run) - len(run["outputs"])
    spent = run["seconds"] - run.get("first_seconds", run["seconds"])
    return later / spent if later and spent > 0 else None


def equal(outputs: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    """How many answers are the same."""
    return sum(a == b for a, b in zip(outputs, others, strict=True))


def ratios(rounds: Sequence[Round], ours: tuple[str, str], theirs: tuple[str, str]) -> list[float]:
    """Our rate over theirs, of each round that has both."""
    return [rate(r[ours]) / rate(r[theirs]) for r in rounds if ours in r and theirs in r]


def guess_name(guess: Any) -> str:
    """What was guessed: nothing, K, or K with the lengths of text that were looked up."""
    if guess is None:
        return "K = 0"
    return f"K = {guess[0]}, {guess[1]}–{guess[2]}" if isinstance(guess, tuple) else f"K = {guess}"


def rows(rounds: Sequence[Round], weight_bytes: int = 0) -> list[Json]:
    """One for each system, way and case. Where reading memory was timed beside a run (`read_rate`), with the
    share of that rate at which the run read the weights, once for each token."""
    found = []
    for label, case in rounds[0]:
        runs = [r[label, case] for r in rounds]
        system, way = label.split(" ", 1)
        row: Json = {"case": case, "system": system, "way": way}
        if way != "plain":
            row["guess"] = guess_name(runs[0]["guess"])
        row["tokens_per_second"] = spread([rate(run) for run in runs])
        later = [decode_rate(run) for run in runs]
        if all(later):
            row["decode_tokens_per_second"] = spread([value for value in later if value])
        if "read_rate" in runs[0] and all(later):
            shares = [value * weight_bytes / run["read_rate"] for value, run in zip(later, runs) if value]
            row["bandwidth_share"] = spread(shares)
            row["read_gb_per_s"] = spread([run["read_rate"] / 1e9 for run in runs])
        if "first_seconds" in runs[0]:
            row["first_token_seconds"] = spread([run["first_seconds"] / run["waves"] for run in runs])
        if system != "nanospec":
            row["nanospec_ratio"] = spread(ratios(rounds, (f"nanospec {way}", case), (label, case)))
        plain = (f"{system} plain", case)
        if way != "plain" and plain in rounds[0]:
            row["plain_ratio"] = spread(ratios(rounds, (label, case), plain))
            same = [equal(r[label, case]["outputs"], r[plain]["outputs"]) for r in rounds]
            row["equal_to_plain"] = [min(same), len(runs[0]["outputs"])]
        found.append(row)
    return found


def all_rows(result: Json) -> list[Json]:
    """The tables of all parts, in turn."""
    return [row for part in result.values() for row in part.get("table", [])]


def markdown(table: Sequence[Json]) -> str:
    """The table as docs/speed.md shows it: a line for each case and way, a column for each system."""
    systems = list(dict.fromkeys(row["system"] for row in table))
    peers = [system for system in systems if system != "nanospec"]
    lines = [
        "| | " + " | ".join([*systems, *(f"nanospec / {peer}" for peer in peers)]) + " |",
        "|---" * (1 + len(systems) + len(peers)) + "|",
    ]
    for case, way in dict.fromkeys((row["case"], row["way"]) for row in table):
        of = {row["system"]: row for row in table if (row["case"], row["way"]) == (case, way)}
        cells = [_cell(of[system], case) if system in of else "" for system in systems]
        cells += [_ratio(of[peer].get("nanospec_ratio")) if peer in of else "" for peer in peers]
        lines.append(f"| {way}, {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Json, case: str) -> str:
    if case.startswith("first token"):
        return f"{row['tokens_per_second']['median'] ** -1:.2f} s"
    said = f"{row['tokens_per_second']['median']:.0f}"
    if "guess" in row and row["system"] != "nanospec":
        said += f" ({row['guess']})"
    if "equal_to_plain" in row:
        said += ", equal {} of {}".format(*row["equal_to_plain"])
    return said


def _ratio(found: Json | None) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}–{found['max']:.2f})" if found else ""
