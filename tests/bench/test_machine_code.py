"""Reading machine code of small kernels with known properties."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.machine_code import read

HERE = Path(__file__).resolve().parent
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Results by name of the kernels of `machine_code_kernels.py`, for sm_90."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(HERE / "machine_code_kernels.py")
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def test_three_stages_load_two_tiles_during_each_product(compiled: dict[str, Any]) -> None:
    loop = compiled["three stages"]["loop"]
    assert (loop["in_flight"], loop["per_step"]) == (2, 2)  # tiles of x and w, minus the one waited for
    assert loop["early"]
    assert set(loop["copies"]) == {16}
    assert not loop["loads"]


def test_one_stage_has_nothing_in_flight(compiled: dict[str, Any]) -> None:
    loop = compiled["one stage"]["loop"]
    assert (loop["in_flight"], loop["copies"]) == (0, [])
    assert set(loop["loads"]) == {16}
    assert not loop["early"]


def test_address_lookup_uses_up_the_stages(compiled: dict[str, Any]) -> None:
    """The index is copied ahead, and every tile is waited for before the next is requested."""
    loop = compiled["gathered"]["loop"]
    assert loop["in_flight"] == 0
    assert loop["copies"][0] == 4  # the index


def test_order_of_instructions(compiled: dict[str, Any]) -> None:
    start = {name: kernel["order"] for name, kernel in compiled.items()}
    assert start["three stages"] == ["trigger", "prefetch", "wait", "read", "write", "exit"]
    assert start["one stage"] == ["trigger", "wait", "prefetch", "read", "write", "exit"]
    assert start["gathered"] == start["narrow"] == ["read", "write", "exit"]


def test_no_main_loop_without_tensor_cores(compiled: dict[str, Any]) -> None:
    assert compiled["narrow"]["loop"] is None


def assembled(*instructions: str) -> str:
    lines = enumerate(instructions)
    return "\n".join(f"        /*{16 * i:04x}*/    {text} ;   /* 0x0 */" for i, text in lines)


def test_worst_of_several_main_loops_counts() -> None:
    def loop(at: int, left: int) -> list[str]:
        return [f"DEPBAR.LE SB0, {left:#x}", PRODUCT, "LDGDEPBAR", f"@P0 BRA {16 * at:#x}"]

    code = read(assembled(*loop(0, 4), *loop(4, 1), *loop(8, 3), "EXIT"))
    assert code.loop is not None
    assert code.loop.in_flight == 1


def test_outer_loop_is_not_the_main_loop() -> None:
    inner = ("DEPBAR.LE SB0, 0x2", PRODUCT, "@P0 BRA 0x10")
    code = read(assembled("DEPBAR.LE SB0, 0x0", *inner, "@P1 BRA 0x0", "EXIT"))
    assert code.loop is not None
    assert code.loop.in_flight == 2


def test_empty_machine_code_is_rejected() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        read("")
