"""Every production configuration compiles for every target, without spills and within its limits.

In a process of its own: here, triton is the interpreter.
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

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table of `bench/compile.py` and its last line."""
    folder = tmp_path_factory.mktemp("compile")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "compile.py"), "--out", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert process.returncode in (0, 1), process.stderr[-3000:]
    assert (folder / "compile.json").is_file(), process.stderr[-3000:]
    return json.loads((folder / "compile.json").read_text()), json.loads(process.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_no_spills_within_limits_on_tensor_cores(
    compiled: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    results, summary = compiled
    assert summary["compiled"] == len(results) > 100
    assert not summary["problems"], "\n".join(summary["problems"])


@pytest.mark.timeout(600)
def test_one_instruction_per_weight_whatever_the_number_of_rows(
    compiled: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    """Only the instruction's width, which is that of the tile of tokens, may vary: see gemm.py."""
    shapes = defaultdict(set)
    for result in compiled[0]:
        if result["function"] == "_gemm":
            family, _, shape = result["mma"].partition(" ")
            if family == "wgmma":  # m64n16k16: n counts tokens
                shape = shape[: shape.index("n")] + shape[shape.index("k") :]
            shapes[result["target"]].add((family, shape))
    assert shapes["sm_80"] == {("mma", "m16n8k16")}
    assert shapes["sm_90"] == {("wgmma", "m64k16")}
    assert shapes["sm_100"] == {("tcgen05", "")}
    assert shapes["gfx942"] == {("mfma", "16x16x16")}
