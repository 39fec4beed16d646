"""The table of `bench/compile.py`: a row per kernel, target and triton; what no row may have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Bytes that a known row may spill. Here two registers, once, in attention of prompts with heads of 96: half
# the columns mend it and read the cache twice as often.
SPILLED = {
    ("_attend", "phi-3-mini-B1-q2048-L4096", "sm_90", "3.9"): 8,
}


@dataclass
class Result:
    """One kernel of one case on one target. A case may launch several kernels.

    Attributes:
        triton: the version that compiled it.
        spills: bytes of local memory per thread.
        shared: bytes per program.
        mma: tensor-core instructions; with needs_mma there must be some.
        source, fingerprint: of what was compiled, see `compile.py`.
        loop, narrowest, in_flight, per_step, early, order: of NVIDIA's machine code, see `machine_code.py`.
    """

    kernel: str
    case: str
    function: str
    constants: str
    target: str
    triton: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared: int
    mma: str
    needs_mma: bool
    source: str = ""
    fingerprint: str = ""
    loop: str = ""
    narrowest: int | None = None
    in_flight: int | None = None
    per_step: int | None = None
    early: bool = False
    order: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What distinguishes rows of one triton."""
        return self.kernel, self.function, self.case, self.constants, self.target

    def __str__(self) -> str:
        return (
            f"{self.function} of {self.kernel} {self.case} on {self.target} ({self.constants}) "
            f"by triton {self.triton}"
        )


def problems(results: Iterable[Result]) -> list[str]:
    """What no production configuration may have."""
    found = []
    keys = defaultdict(set)
    for r in results:
        keys[r.triton].add(r.key)
        known = SPILLED.get((r.function, r.case, r.target, r.triton.rpartition(".")[0]), 0)
        if r.spills > known and r.target.startswith("sm"):
            found.append(f"{r} spills {r.spills} bytes per thread.")
        if r.shared > SHARED_LIMIT[r.target]:
            limit = SHARED_LIMIT[r.target]
            found.append(f"{r} needs {r.shared} bytes of shared memory; the limit is {limit}.")
        if r.needs_mma and not r.mma:
            found.append(f"{r} has no tensor-core instruction.")
    if len({frozenset(one) for one in keys.values()}) > 1:
        versions = " and ".join(sorted(keys))
        found.append(f"The rows of triton {versions} are of different kernels: run both again.")
    return found


def load(folder: Path) -> list[Result]:
    """The table in `folder`; of one written by an older version of this file, nothing."""
    path = folder / "compile.json"
    rows = json.loads(path.read_text()) if path.is_file() else []
    names = {field.name for field in fields(Result)}
    return [Result(**row) for row in rows if set(row) == names]


def save(results: list[Result], folder: Path) -> list[Result]:
    """Write the table, keeping the rows of other versions of triton; returns all its rows."""
    versions = {r.triton for r in results}
    kept = [r for r in load(folder) if r.triton not in versions]
    table = sorted([*results, *kept], key=lambda r: (*r.key, r.triton))
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(asdict(r)) for r in table)
    (folder / "compile.json").write_text(f"[\n{rows}\n]\n")
    return table
