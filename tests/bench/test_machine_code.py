"""Reading machine code, on short listings in the format of cuobjdump. `tests/kernels/test_compile.py` checks
what it finds in real kernels."""

from __future__ import annotations

import pytest

from bench.machine_code import Loop, MachineCode, read

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
COPY = "LDGSTS.E.BYPASS.128 [R7], desc[UR8][R2.64]"
LOAD = "LDG.E.128 R8, desc[UR8][R2.64]"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PIPELINE = ("@!P1 PREEXIT", "CCTL.E.PF2 [R2.64]", "ACQBULK")


def machine_code(*instructions: str) -> MachineCode:
    lines = (f"        /*{16 * i:04x}*/    {text} ;   /* 0x0 */" for i, text in enumerate(instructions))
    return read("\n".join(lines))


def waits(count: int) -> str:
    return f"DEPBAR.LE SB0, {count:#x}"


def test_pipelined_loop() -> None:
    """Two tiles are copied while a product runs."""
    copies = (COPY, "LDGDEPBAR", "LDGSTS.E [R9], desc[UR8][R4.64]", "LDGDEPBAR")
    body = (waits(9), PRODUCT, *copies, WAIT, "@P0 BRA 0x50")
    code = machine_code(*PIPELINE, COPY, "LDGDEPBAR", *body, "STG.E.64 [R2.64], R4", LOAD, "EXIT")
    assert code.loop == Loop(loads=(), copies=(4, 16), in_flight=9, per_step=2, early=True)
    assert (str(code.loop), code.loop.narrowest) == ("16 B, 4 B; 9/2; early", 4)
    assert code.order == ("trigger", "prefetch", "wait", "read", "write", "exit")


def test_loop_without_stages() -> None:
    body = (LOAD, "LDG.E.U16 R9, [R2.64]", "LDG.E R9, [R2.64]", PRODUCT, WAIT, "@P0 BRA 0x0", "EXIT")
    code = machine_code(*body)
    assert code.loop == Loop(loads=(2, 4, 16), copies=(), in_flight=0, per_step=0, early=False)
    assert code.order == ("read", "exit")
    after = machine_code(PRODUCT, WAIT, COPY, "LDGDEPBAR", "@P0 BRA 0x0", "EXIT")
    assert after.loop is not None
    assert not after.loop.early


def test_innermost_loop_with_fewest_in_flight_counts() -> None:
    def loop(at: int, left: int) -> tuple[str, ...]:
        return waits(left), PRODUCT, "LDGDEPBAR", f"@P0 BRA {16 * at:#x}"

    without_product = ("IADD3 R1, R1, 0x1", "@P0 BRA 0xc0")
    worst = machine_code(*loop(0, 4), *loop(4, 1), *loop(8, 3), *without_product, "EXIT").loop
    inner = machine_code(waits(0), *loop(1, 2), "@P1 BRA 0x0", "EXIT").loop
    assert worst is not None
    assert inner is not None
    assert (worst.in_flight, inner.in_flight) == (1, 2)
    assert machine_code(*without_product, "EXIT").loop is None
    with pytest.raises(ValueError, match="no instruction"):
        read("")
