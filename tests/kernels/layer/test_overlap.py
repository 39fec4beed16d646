"""Attention loads the next tile while it works on this one: seen in the code compiled for sm_90.

In a process of its own: here, triton is the interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PTX = """
import triton
from bench import compile as compiler
from bench.cases.layer import QWEN3_8B, attention_case
item = compiler.launches(attention_case(QWEN3_8B, {B}, {Q}, 4096), "sm_90")[0]
source, options = compiler._source(item, "sm_90")
print(triton.compile(source, target=compiler.TARGETS["sm_90"], options=options).asm["ptx"])
"""
EVENTS = (
    r"cp\.async\.wait_group\s+(\d+)|(wgmma\.mma_async|mma\.sync)|(cp\.async\.cg)|^(\$L\w+):|bra\S*\s+(\$L\w+)"
)


def main_loop(ptx: str) -> list[tuple[str, str]]:
    """What happens in the innermost loop that multiplies: ("wait", copies that may still be on their way),
    ("product", ""), ("copy", "")."""
    labels: dict[str, int] = {}
    events: list[tuple[str, str]] = []
    for wait, product, _, label, target in re.findall(EVENTS, ptx, re.MULTILINE):
        if label:
            labels[label] = len(events)
        elif target in labels:  # a branch back
            body = events[labels[target] :]
            if any(kind == "product" for kind, _ in body):
                return body
        elif not target:
            events.append(("wait", wait) if wait else ("product", "") if product else ("copy", ""))
    raise ValueError("No loop has a matrix product.")


def loads_overlap(ptx: str) -> bool:
    """Whether the main loop multiplies while copies for later tiles are on their way: it starts copies, waits
    for some of them, and nowhere for all."""
    body = main_loop(ptx)  # perhaps from its middle on
    waits = [number for kind, number in body if kind == "wait"]
    return bool(waits) and "0" not in waits and ("copy", "") in body


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("B", "Q"), [(64, 5), (1, 2048)], ids=["verification", "prefill"])
def test_loads_overlap_products(B: int, Q: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    ptx = subprocess.run(
        [sys.executable, "-c", PTX.format(B=B, Q=Q)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    ).stdout
    assert "griddepcontrol.wait" in ptx
    assert "griddepcontrol.launch_dependents" in ptx
    assert loads_overlap(ptx)


def test_a_loop_that_waits_for_all_is_told() -> None:
    loop = "$L1:\n cp.async.wait_group {};\n wgmma.mma_async;\n cp.async.cg x;\n @%p1 bra $L1;"
    assert loads_overlap(loop.format(2))
    assert not loads_overlap(loop.format(0))
