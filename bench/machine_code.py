"""Analyze the machine code of a kernel: the width of its loads, and how they overlap with computation.

Reads SASS (the output of `cuobjdump -sass`), not PTX, since ptxas moves, merges and drops instructions. The
*main loop* is an innermost loop (a backward branch) with tensor-core instructions. Copies to shared memory
(`cp.async`) are counted in groups, which LDGDEPBAR commits and DEPBAR waits for.

    in_flight     the minimum number of groups that may be in flight after a wait in the main loop. If 0,
                  every tile is awaited right after its copy was issued, so loads do not overlap computation
    per_step      groups issued per loop iteration: in_flight / per_step tiles load during a matmul
    order         the order of the first trigger (the next kernel may start), prefetch (to L2), wait (for the
                  previous kernel), read, write and exit. Programmatic dependent launch needs trigger,
                  prefetch and wait before write and exit

Order and loops are by address, so code that the compiler moved out of line counts at its new place.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "IGMMA", "QGMMA", "IMMA", "QMMA", "DMMA")
FIRSTS = {  # opcode -> its name in `order`
    "PREEXIT": "trigger", "CCTL.E.PF2": "prefetch", "ACQBULK": "wait", "LDG": "read", "LDGSTS": "read",
    "STG": "write", "ATOMG": "write", "REDG": "write", "EXIT": "exit",
}  # fmt: skip


class Instruction(NamedTuple):
    address: int
    name: str  # with all suffixes, such as LDGSTS.E.BYPASS.128
    operands: str

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bytes(self) -> int:
        """The width of a load or copy in bytes per thread."""
        width = re.search(r"\.(?:U|S)?(8|16|64|128)\b", self.name)
        return int(width[1]) // 8 if width else 4


@dataclass(frozen=True)
class Loop:
    """A main loop; see the module docstring.

    Attributes:
        loads, copies: bytes per thread of each global load to registers and of each cp.async, sorted.
    """

    loads: tuple[int, ...]
    copies: tuple[int, ...]
    in_flight: int
    per_step: int

    @property
    def narrowest(self) -> int | None:
        """The bytes per thread of the narrowest copy or, without copies, of the narrowest load."""
        return min(self.copies or self.loads, default=None)

    def __str__(self) -> str:
        """Return a summary such as "16 B; 9/3" (widths; in_flight/per_step)."""
        kinds = {f"{n} B" for n in self.copies} | {f"{n} B loads" for n in self.loads}
        how = ", ".join(sorted(kinds)) or "no loads"
        return f"{how}; {self.in_flight}/{self.per_step}"


@dataclass(frozen=True)
class MachineCode:
    """The properties of a kernel.

    Attributes:
        loop: the main loop with the fewest groups in flight; None if there is none, or it is fully unrolled.
        order: see the module docstring.
    """

    loop: Loop | None
    order: tuple[str, ...]


def read(sass: str) -> MachineCode:
    """Analyze the kernel in `sass`, which must contain exactly one."""
    code = [Instruction(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(sass)]
    if not code:
        raise ValueError("The machine code contains no instruction.")
    loops = [_loop(code, begin, end) for begin, end in _main_loops(code)]
    first: dict[str, None] = {}
    for instruction in code:
        what = FIRSTS.get(instruction.opcode) or FIRSTS.get(instruction.name)
        if what:
            first.setdefault(what)
    return MachineCode(min(loops, key=lambda loop: loop.in_flight, default=None), tuple(first))


def _main_loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """Return the indices (first, last) of the innermost loops with tensor-core instructions."""
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
    )


def _number(instruction: Instruction) -> int:
    """Return the count of `DEPBAR.LE SB0, 0x9`."""
    return int(instruction.operands.split(",")[1].split()[0], 16)
