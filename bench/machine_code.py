"""Read what the compiler made of a kernel: whether loads are wide, overlap the products and start early.

Only machine code (SASS, the output of `cuobjdump -sass`) is read: ptxas moves, merges and drops what PTX asks
for. The *main loop* is an innermost loop (a backward branch) with tensor-core instructions. Copies to shared
memory (`cp.async`) are counted in groups, each committed by LDGDEPBAR and waited for by DEPBAR.

    in_flight     the least number of groups that may still be under way after a wait in the main loop. 0:
                  every tile is waited for as soon as it is asked for: loading and computing take turns
    per_step      groups that one turn of the loop asks for: in_flight / per_step tiles load during a product
    early         copies are issued while the loop's own products (wgmma) run, too, and not only after them
    order         what a kernel does first of each: trigger (the next kernel may start), prefetch (to L2),
                  wait (for the kernel before), read, write, exit. Programmatic dependent launch asks for
                  trigger, prefetch and wait before write and exit

Order and loops are by address, so code that the compiler moved out of line counts where it lies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "IGMMA", "QGMMA", "IMMA", "QMMA", "DMMA")
FIRSTS = {  # opcode -> what it does, for `order`
    "PREEXIT": "trigger",
    "CCTL.E.PF2": "prefetch",
    "ACQBULK": "wait",
    "LDG": "read",
    "LDGSTS": "read",
    "STG": "write",
    "ATOMG": "write",
    "REDG": "write",
    "EXIT": "exit",
}


class Instruction(NamedTuple):
    address: int
    name: str  # with all its suffixes: LDGSTS.E.BYPASS.128
    operands: str

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Of a load or copy, per thread."""
        width = re.search(r"\.(?:U|S)?(8|16|64|128)\b", self.name)
        return int(width[1]) // 8 if width else 4


@dataclass(frozen=True)
class Loop:
    """A main loop; see the module docstring.

    Attributes:
        loads, copies: bytes per thread of each global load to registers and each cp.async, ascending.
    """

    loads: tuple[int, ...]
    copies: tuple[int, ...]
    in_flight: int
    per_step: int
    early: bool

    @property
    def narrowest(self) -> int | None:
        """Bytes per thread of the smallest copy, or load where there are no copies."""
        return min(self.copies or self.loads, default=None)

    def __str__(self) -> str:
        """What a table shows: "16 B, 9/3 in flight, early"."""
        kinds = {f"{n} B" for n in self.copies} | {f"{n} B loads" for n in self.loads}
        how = ", ".join(sorted(kinds)) or "no loads"
        return f"{how}; {self.in_flight}/{self.per_step}" + ("; early" if self.early else "")


@dataclass(frozen=True)
class MachineCode:
    """
    Attributes:
        loop: the main loop with least in flight, None without tensor cores or where it is unrolled whole.
        order: see the module docstring.
    """

    loop: Loop | None
    order: tuple[str, ...]


def read(sass: str) -> MachineCode:
    """Read the one kernel in `sass`."""
    code = [Instruction(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(sass)]
    if not code:
        raise ValueError("There is no instruction in this machine code.")
    loops = [_loop(code, begin, end) for begin, end in _main_loops(code)]
    first: dict[str, None] = {}
    for instruction in code:
        what = FIRSTS.get(instruction.opcode) or FIRSTS.get(instruction.name)
        if what:
            first.setdefault(what)
    return MachineCode(min(loops, key=lambda loop: loop.in_flight, default=None), tuple(first))


def _main_loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """Return (first, last) instruction of the innermost loops with tensor-core instructions."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for end, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)\s*$", instruction.operands)
        if instruction.opcode == "BRA" and target:
            begin = index.get(int(target[1], 16), end)
            if begin < end and any(i.opcode in TENSOR for i in code[begin:end]):
                found.append((begin, end))
    return [one for one in found if not any(o != one and one[0] <= o[0] and o[1] <= one[1] for o in found)]


def _loop(code: list[Instruction], begin: int, end: int) -> Loop:
    body = code[begin : end + 1]
    return Loop(
        loads=tuple(sorted(i.bytes for i in body if i.opcode == "LDG")),
        copies=tuple(sorted(i.bytes for i in body if i.opcode == "LDGSTS")),
        in_flight=min((_number(i) for i in body if i.name == "DEPBAR.LE"), default=0),
        per_step=sum(i.opcode == "LDGDEPBAR" for i in body),
        early=_early(body),
    )


def _number(instruction: Instruction) -> int:
    """Return the count of `DEPBAR.LE SB0, 0x9`."""
    return int(instruction.operands.split(",")[1].split()[0], 16)


def _early(body: list[Instruction]) -> bool:
    """Return whether a copy is issued between a group of wgmma and the wait for it."""
    running = 0
    for instruction in body * 2:  # the second turn begins with what the first left running
        if instruction.opcode == "HGMMA" and "gsb0" in instruction.operands:
            running += 1
        elif instruction.name.startswith("WARPGROUP.DEPBAR"):
            running = min(running, _number(instruction))
        elif instruction.opcode == "LDGSTS" and running:
            return True
    return False
