"""Every production configuration compiles for every target, without unexpected spills and within its limits,
and its machine code has the expected structure.

Compilation runs in a subprocess, since this process uses Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bench import compile_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"

Row = dict[str, Any]  # a row of the table of `bench/compile.py`

PRODUCTS = ("norm_linear", "linear_add", "norm_swiglu")  # the kernels with products of a layer


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Row]:
    """Return the table and last line of `bench/compile.py`, which reuses committed rows of unchanged kernels,
    as compiling all of them takes minutes."""
    folder = tmp_path_factory.mktemp("compile")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, f"{ROOT}/bench/compile.py", "--out", str(folder), "--known", str(RESULTS)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode in (0, 1), process.stderr[-3000:]
    print("\n".join(line for line in process.stdout.splitlines() if not line.startswith("|")))
    return json.loads((folder / "compile.json").read_text()), json.loads(process.stdout.splitlines()[-1])


@pytest.mark.timeout(1500)
def test_no_spills_within_limits_on_tensor_cores(compiled: tuple[list[Row], Row]) -> None:
    results, summary = compiled
    assert summary["rows"] == len(results) > 100
    assert {row["function"] for row in results if row["needs_mma"]} == {"_gemm", "_attend", "_attend_tree"}
    assert summary["problems"] == 0


def test_mma_instruction_is_independent_of_number_of_rows(compiled: tuple[list[Row], Row]) -> None:
    """Only the instruction's width, which is that of the token tile, may vary; see product.py."""
    shapes = defaultdict(set)
    for result in compiled[0]:
        if result["function"] == "_gemm":
            family, _, shape = result["mma"].partition(" ")
            if family == "wgmma":  # m64n16k16: n counts tokens
                shape = shape[: shape.index("n")] + shape[shape.index("k") :]
            shapes[result["target"]].add((family, shape))
    assert shapes == {
        **{target: {("mma", "m16n8k16")} for target in ("sm_80", "sm_86", "sm_89", "sm_120")},
        "sm_90": {("wgmma", "m64k16")},
        "sm_100": {("tcgen05", "")},
        "gfx942": {("mfma", "16x16x16")},
    }


def test_loads_overlap_with_products_and_launches(compiled: tuple[list[Row], Row]) -> None:
    """Check the sm_90 code of a layer of Qwen3-0.6B and of attention of Qwen3-8B. With programmatic dependent
    launch, no program exits or writes before it has waited."""
    attention = [f"attention-qwen3-{case}" for case in ("0.6b-B1-q1-L1024", "8b-B64-q5-L4096", "8b-B1-q2048")]
    parts = [*(f"{kernel}-qwen3-0.6b" for kernel in PRODUCTS), *attention, "embed", "rope_cache-qwen3-0.6b"]
    parts.append("quantized-")
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
            assert row["narrowest"] in ((4, 8) if row["kernel"] == "quantized" else (None, 16)), what
            assert row["in_flight"] >= row["per_step"] > 0, what
        order = row["order"].split()
        if "PDL=False" in row["constants"]:
            assert not {"wait", "trigger"} & {*order}, what
            continue
        if row["function"] == "_rope_cache":  # the attention kernel after it reads before it waits
            assert order.index("wait") < order.index("trigger") < order.index("read"), what
        else:
            assert order[0] == "trigger", what
        assert order.index("wait") < min(order.index("write"), order.index("exit")), what
        if row["function"] == "_gemm":
            assert order.index("prefetch") < order.index("wait"), what
    assert seen == {*PRODUCTS, "quantized", "attention", "embed", "rope_cache"}
    assert with_products == {*PRODUCTS, "quantized", "attention"}


def test_dequantized_weights_do_not_pass_through_shared_memory(compiled: tuple[list[Row], Row]) -> None:
    """On sm_90, it only has the stages of x, and one less of the weight, which is copied to registers."""
    rows = [
        r for r in compiled[0] if r["kernel"] == "quantized" and r["target"] == "sm_90" and r["needs_mma"]
    ]
    for row in rows:
        constants = dict(part.split("=") for part in row["constants"].split())
        names = "BLOCK_T", "BLOCK_N", "BLOCK_K", "BITS", "SCALES"
        tokens, weights, columns, bits, scales = (int(constants[name]) for name in names)
        weight_bytes = weights * columns * bits // 8 + weights * columns // 64 * scales * 4
        x_bytes, stages = tokens * columns * 2, row["num_stages"]
        assert row["shared"] == stages * x_bytes + (stages - 1) * weight_bytes, row["case"]
    assert rows


def test_committed_table_has_several_triton_versions_without_problems() -> None:
    table = compile_table.load(RESULTS)
    assert len({r.triton.rpartition(".")[0] for r in table}) >= 2
    assert not compile_table.problems(table)
