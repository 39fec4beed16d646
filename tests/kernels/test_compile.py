"""Every production configuration compiles for every target, without spills and within its limits, and its
machine code has the expected structure.

Compilation runs in subprocesses, since this process uses Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bench import compile_table

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"

Row = dict[str, Any]  # a row of the table of `bench/compile.py`

PRODUCTS = ("norm_linear", "linear_add", "norm_swiglu")  # the kernels with products of a layer


def run_compile(folder: Path, *arguments: str) -> tuple[list[Row], Row]:
    """Run `bench/compile.py` and return its table and last line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "compile.py"), "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert process.returncode in (0, 1), process.stderr[-3000:]
    print("\n".join(line for line in process.stdout.splitlines() if not line.startswith("|")))
    assert (folder / "compile.json").is_file(), process.stderr[-3000:]
    return json.loads((folder / "compile.json").read_text()), json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Row]:
    """The whole table, reusing committed rows of unchanged kernels; compiling all of them takes minutes."""
    return run_compile(tmp_path_factory.mktemp("compile"), "--known", str(RESULTS))


@pytest.mark.timeout(1500)
def test_no_spills_within_limits_on_tensor_cores(compiled: tuple[list[Row], Row]) -> None:
    results, summary = compiled
    assert summary["rows"] == len(results) > 100
    assert {row["function"] for row in results if row["needs_mma"]} == {"_gemm", "_attend", "_attend_tree"}
    assert summary["problems"] == 0


def test_mma_instruction_is_independent_of_number_of_rows(compiled: tuple[list[Row], Row]) -> None:
    """Only the instruction's width, that of the tile of tokens, may vary: see product.py."""
    shapes = defaultdict(set)
    for result in compiled[0]:
        if result["function"] == "_gemm":
            family, _, shape = result["mma"].partition(" ")
            if family == "wgmma":  # m64n16k16: n counts tokens
                shape = shape[: shape.index("n")] + shape[shape.index("k") :]
            shapes[result["target"]].add((family, shape))
    assert shapes == {
        "sm_80": {("mma", "m16n8k16")},
        "sm_90": {("wgmma", "m64k16")},
        "sm_100": {("tcgen05", "")},
        "gfx942": {("mfma", "16x16x16")},
    }


def test_loads_overlap_with_products_and_launches(compiled: tuple[list[Row], Row]) -> None:
    """On sm_90, for a layer of Qwen3-0.6B and attention of 8B. With programmatic dependent launch, no program
    exits or writes before it has waited."""
    attention = [f"attention-qwen3-{case}" for case in ("0.6b-B1-q1-L1024", "8b-B64-q5-L4096", "8b-B1-q2048")]
    parts = [*(f"{kernel}-qwen3-0.6b" for kernel in PRODUCTS), *attention, "embed", "rope_cache-qwen3-0.6b"]
    seen, with_products = set(), set()
    for row in compiled[0]:
        name = "{kernel}-{case}".format(**row)
        if row["target"] != "sm_90" or not any(part in name for part in parts):
            continue
        what = "{function} of {kernel} {case} ({constants}): {loop}; {order}".format(**row)
        seen.add(row["kernel"])
        if row["needs_mma"]:
            with_products.add(row["kernel"])
            assert row["loop"], what
            assert row["mma"].startswith("wgmma"), what
            assert row["narrowest"] in (None, 16), what
            assert row["in_flight"] >= row["per_step"] > 0, what
        order = row["order"].split()
        if row["function"] == "_rope_cache":  # the attention kernel after it reads before it waits
            assert order.index("wait") < order.index("trigger") < order.index("read"), what
        else:
            assert order[0] == "trigger", what
        assert order.index("wait") < min(order.index("write"), order.index("exit")), what
        if row["kernel"] in PRODUCTS:
            assert order.index("prefetch") < order.index("wait"), what
    assert seen == {*PRODUCTS, "attention", "embed", "rope_cache"}
    assert with_products == {*PRODUCTS, "attention"}


@pytest.mark.timeout(900)
def test_recompiled_rows_match_the_table(compiled: tuple[list[Row], Row], tmp_path: Path) -> None:
    cases = ("qwen3-0.6b-o-T1", "rope_cache-qwen3-0.6b-B1")
    rows, summary = run_compile(tmp_path, "--targets", "sm_90", "gfx942", "--only", *cases)
    assert {row["function"] for row in rows} >= {"_gemm", "_rope_cache"}
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    assert summary["known"] == 0
    table = {row["fingerprint"]: row for row in compiled[0]}
    for row in rows:  # the table may list another case of the same kernel
        assert row == {**table[row["fingerprint"]], **{k: row[k] for k in ("kernel", "case")}}


# ---- the table of several Triton versions -------------------------------------------------------


def row(**changes: Any) -> compile_table.Result:
    one = {"kernel": "k", "case": "c", "function": "f", "constants": "", "target": "sm_90", "triton": "3.7.1"}
    numbers = {"num_warps": 4, "num_stages": 3, "registers": 32, "spills": 0, "shared": 0}
    return compile_table.Result(**{**one, **numbers, "mma": "wgmma", "needs_mma": True, **changes})


def test_save_keeps_rows_of_other_triton_versions(tmp_path: Path) -> None:
    compile_table.save([row(registers=1), row(function="gone")], tmp_path)
    compile_table.save([row(triton="3.6.0", registers=5)], tmp_path)
    table = compile_table.save([row(registers=7)], tmp_path)
    assert [(r.triton, r.registers) for r in table] == [("3.6.0", 5), ("3.7.1", 7)]
    assert compile_table.load(tmp_path) == table


def test_problems_of_any_triton_version_are_found() -> None:
    (function, case, target, version), known = next(iter(compile_table.SPILLED.items()))
    own = {"function": function, "case": case, "target": target, "triton": f"{version}.0"}
    old = row(triton="3.6.0")
    cases: list[tuple[Row, str | None]] = [
        ({}, None),
        ({"spills": 8}, "spills 8 bytes"),
        ({"shared": 1 << 20}, "shared memory"),
        ({"mma": ""}, "no tensor-core"),
        ({"function": "g"}, "different kernels"),
        ({**own, "spills": known}, None),
        ({**own, "spills": known + 4}, f"spills {known + 4} bytes"),
        ({**own, "triton": "3.7.1", "spills": known}, f"spills {known} bytes"),
    ]
    for changes, what in cases:
        others = [old] if "case" not in changes else []
        found = compile_table.problems([row(**changes), *others])
        assert [what in text for text in found] == [True] if what else not found


def test_committed_table_has_several_triton_versions_without_problems() -> None:
    table = compile_table.load(RESULTS)
    assert len({r.triton.rpartition(".")[0] for r in table}) >= 2
    assert not compile_table.problems(table)
