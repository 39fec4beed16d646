"""The table of `bench/compile.py`, with a row per kernel, target and Triton version, and its checks."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from nanospec.kernels.launch import GPUS

# Known spills in bytes. Prefill attention with head dimension 96 spills two registers once; tiles of half the
# width would avoid it, but read the cache twice as often.
SPILLED = {
    ("_attend", "phi-3-mini-B1-q2048-L4096", "sm_90", "3.9"): 8,
}


CHOSEN = 80  # bytes that ptxas may spill with registers left, so that a multiprocessor fits another program


@dataclass
class Result:
    """One kernel of one case on one target. A case may launch several kernels.

    Attributes:
        triton: the version that compiled it.
        spills: bytes of local memory per thread.
        shared: bytes of shared memory per program.
        mma: the tensor-core instructions; must not be empty if `needs_mma`.
        source, fingerprint: hashes of the kernel, see `compile.py`.
        loop, narrowest, in_flight, per_step, order: see `machine_code.py`; NVIDIA only.
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
    order: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of a row among those of one Triton version."""
        return self.kernel, self.function, self.case, self.constants, self.target

    def __str__(self) -> str:
        return (
            f"{self.function} of {self.kernel} {self.case} on {self.target} ({self.constants}) "
            f"by triton {self.triton}"
        )


def problems(results: Iterable[Result]) -> list[str]:
    """Return a message for each row that spills more than is known or chosen by ptxas, exceeds shared memory
    or lacks tensor-core instructions."""
    found = []
    keys = defaultdict(set)
    for r in results:
        keys[r.triton].add((r.kernel, r.function, r.case, r.target))  # constants may depend on the version
        known = SPILLED.get((r.function, r.case, r.target, r.triton.rpartition(".")[0]), 0)
        if r.registers < min(65536 // (32 * r.num_warps), 255):
            known = CHOSEN
        if r.spills > known and r.target.startswith("sm"):
            found.append(f"{r} spills {r.spills} bytes per thread.")
        if r.shared > (limit := GPUS[r.target].shared):
            found.append(f"{r} needs {r.shared} bytes of shared memory; the limit is {limit}.")
        if r.needs_mma and not r.mma:
            found.append(f"{r} has no tensor-core instructions.")
    if len({frozenset(one) for one in keys.values()}) > 1:
        versions = " and ".join(sorted(keys))
        found.append(f"The rows of triton {versions} have different kernels; run all versions again.")
    return found


def load(folder: Path) -> list[Result]:
    """Return the rows in `folder`, without those that lack fields of `Result`. Ignores other fields."""
    path = folder / "compile.json"
    rows = json.loads(path.read_text()) if path.is_file() else []
    names = [field.name for field in fields(Result)]
    return [Result(**{name: row[name] for name in names}) for row in rows if set(names) <= set(row)]


def save(results: list[Result], folder: Path) -> list[Result]:
    """Write the table, keeping the rows of other Triton versions. Returns all rows."""
    versions = {r.triton for r in results}
    kept = [r for r in load(folder) if r.triton not in versions]
    table = sorted([*results, *kept], key=lambda r: (*r.key, r.triton))
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(asdict(r)) for r in table)
    (folder / "compile.json").write_text(f"[\n{rows}\n]\n")
    return table
