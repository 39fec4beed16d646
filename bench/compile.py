"""Compile every production configuration of every kernel for several GPU architectures. Needs no GPU.

    python bench/compile.py [--only attention] [--targets sm_90 gfx942] [--jobs 2]
                            [--known bench/results] [--out bench/results]

The cases of `bench/cases` run on `meta` tensors with a recorder in place of Triton's launcher. Kernels are
therefore compiled with the same types, alignment hints, constants, warps and stages as in a real launch. Each
distinct kernel is compiled to machine code for each target, and analyzed:

    registers, spills   per thread; spills in bytes of local memory (NVIDIA: stack frame plus local memory
                        from cuobjdump; AMD: spilled registers, from the metadata of the assembly)
    shared              bytes of shared memory per program
    mma                 the tensor-core instructions
    main loop, order    NVIDIA only: how it loads, and when it waits for the previous kernel
                        (`machine_code.py`)
    fingerprint         hash of the options and of Triton's IR after inlining and simplification, without the
                        order of constants and source lines
    source              hash of the options, the source of the kernel and its callees, and the types and
                        constants of the launch

`--known` reuses rows with the same source or fingerprint from a table written by the same Triton version, and
compiles only the other kernels: 15 seconds instead of 10 minutes. Omit it after changes to the analysis.

`--out` writes the table to `compile.json` and keeps the rows of other Triton versions. The committed table
covers several versions. Before committing a change to a kernel, run it in an environment of each version:

    python bench/compile.py --known bench/results --out bench/results          (triton 3.9)
    OTHER/bin/python bench/compile.py --known bench/results --out bench/results  (triton 3.6, torch 2.11)

Problems of any version, including rows of different kernels, make the run fail. They are printed one per
line, and the last line is JSON with their number.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the caller may have set it
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from bench import machine_code  # noqa: E402
from bench.card import find_card  # noqa: E402
from bench.cases import Case, all_cases  # noqa: E402
from bench.compile_table import Result, load, problems, save  # noqa: E402
from nanospec.kernels import launch  # noqa: E402

TARGETS = {
    name: GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)
    for name in launch.GPUS
}
MMA = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma\.|mma\.sync|v_mfma)[\w.:]*")
CONSTANT, VALUE = re.compile(r"^\s*(%\w+) = arith\.constant (.*)$", re.M), re.compile(r"%\w+")
SHAPE = re.compile(r"m\d+n\d+k\d+|\d+x\d+x\d+")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class _Recorded:
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_Job = tuple[Case, _Recorded, str]  # case, launch, target
_work: list[_Job] = []
_known: dict[str, Result] = {}  # by source and by fingerprint


@contextmanager
def recording() -> Iterator[list[_Recorded]]:
    """Record launches instead of running them, in the context."""
    recorded: list[_Recorded] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorded.append(_Recorded(self, args, kwargs))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield recorded
    finally:
        JITFunction.run = run


def launches(case: Case, target: str) -> list[_Recorded]:
    """Return the launches of `case` on `target`."""
    with launch.forced("triton", launch.GPUS[target]), recording() as recorded:
        case.build("meta").run()
    if not recorded:
        raise RuntimeError(f"{case.kernel} {case.label} launches no kernel on {target}.")
    return recorded


def _source(item: _Recorded, target: str) -> tuple[Any, dict[str, Any]]:
    """Return the arguments (source, options) that Triton's launcher would pass to its compiler."""
    backend = make_backend(TARGETS[target])
    kwargs = dict(item.kwargs, debug=False, instrumentation_mode="")
    binder = create_function_from_signature(item.fn.signature, item.fn.params, backend)
    bound, specialization, extra = binder(*item.args, **kwargs)
    options, signature, constexprs, attrs = item.fn._pack_args(backend, kwargs, bound, specialization, extra)
    return ASTSource(item.fn, signature, constexprs, attrs), options.__dict__


def _fingerprint(source: ASTSource, options: dict[str, Any], target: str) -> str:
    """Return a hash of the compiled code that does not depend on functions, files and folders."""
    backend = make_backend(TARGETS[target])
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(TARGETS[target], parsed, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    return _digest(target, vars(parsed), _canonical(stages["ttir"](module, {}).str_nodebug()))


def _canonical(code: str) -> str:
    """Inline constants, and number all other values in order."""
    constants, names = dict(CONSTANT.findall(code)), dict[str, str]()
    return VALUE.sub(
        lambda value: constants.get(value[0]) or names.setdefault(value[0], f"%{len(names)}"),
        CONSTANT.sub("", code),
    )


def _source_key(source: ASTSource, options: dict[str, Any], target: str) -> str:
    return _digest(target, options, source.hash())


def _digest(target: str, options: dict[str, Any], code: str) -> str:
    chosen = {k: v for k, v in options.items() if k != "extern_libs"}  # paths
    return hashlib.sha256(f"{target} {sorted(chosen.items())} {code}".encode()).hexdigest()[:16]


def compile_one(case: Case, item: _Recorded, target: str) -> Result:
    source, options = _source(item, target)
    constants: dict[str, Any] = {}
    for path, value in source.constants.items():
        name = item.fn.arg_names[path[0]]
        if name.isupper() and value is not None:
            constants |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    constants = {name: getattr(value, "value", value) for name, value in constants.items()}
    label = {
        "kernel": case.kernel,
        "case": case.label,
        "function": item.fn.__name__,
        "constants": " ".join(f"{k}={v}" for k, v in constants.items()),
        "source": _source_key(source, options, target),
    }
    if label["source"] in _known:
        return replace(_known[label["source"]], **label)
    fingerprint = _fingerprint(source, options, target)
    if fingerprint in _known:
        return replace(_known[fingerprint], **label)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    code: dict[str, Any] = {}
    if TARGETS[target].backend == "cuda":
        registers, spills = _nvidia_usage(compiled.asm["cubin"])
        text = compiled.asm["ptx"]
        code = _in_table(machine_code.read(sass(compiled.asm["cubin"])))
    else:
        text = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
        spills = 4 * int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)[0])
    return Result(
        **label,
        target=target,
        triton=triton.__version__,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        mma=", ".join(sorted({_short(name) for name in MMA.findall(text)})),
        fingerprint=fingerprint,
        needs_mma=case.dots and "tt.dot" in compiled.asm["ttir"],
        **code,
    )


def _in_table(code: machine_code.MachineCode) -> dict[str, Any]:
    """Return the fields of `Result` that are derived from machine code."""
    fields: dict[str, Any] = {"order": " ".join(code.order)}
    if code.loop is not None:
        found = {name: getattr(code.loop, name) for name in ("in_flight", "per_step")}
        fields |= {"loop": str(code.loop), "narrowest": code.loop.narrowest, **found}
    return fields


def _short(instruction: str) -> str:
    """Abbreviate wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 to wgmma m64n16k16."""
    family = "mfma" if instruction.startswith("v_mfma") else instruction.split(".")[0]
    shape = SHAPE.search(instruction)
    return f"{family} {shape[0]}" if shape else family


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack frame and local memory) per thread."""
    values = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump("-res-usage", cubin))}
    return values["REG"], values["STACK"] + values["LOCAL"]


def sass(cubin: bytes) -> str:
    """Return the machine code of a kernel for NVIDIA GPUs as text."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unmatched(parts: Sequence[str]) -> list[str]:
    """Return the members of `parts` that no case name contains."""
    cases = [f"{case.kernel}-{case.label}" for case in all_cases()]
    return [part for part in parts if not any(part in name for name in cases)]


def distinct(targets: list[str], only: Sequence[str] = ("",)) -> list[_Job]:
    """Return the distinct kernels per target, for the cases whose name contains one of `only`."""
    found: dict[str, _Job] = {}
    for target in targets:
        for case in all_cases():
            if any(part in f"{case.kernel}-{case.label}" for part in only):
                for item in launches(case, target):
                    key = _source_key(*_source(item, target), target)
                    found.setdefault(key, (case, item, target))
    return list(found.values())


def _compile_nth(n: int) -> Result | str:
    """Return the row, or an error message."""
    case, item, target = _work[n]
    try:
        return compile_one(case, item, target)
    except Exception as error:  # compiler errors of any type; continue with the other kernels
        what = f"{item.fn.__name__} of {case.kernel} {case.label} on {target}"
        return f"{what} does not compile: {cause(error)}"


def cause(error: BaseException) -> str:
    """Return the root cause of a compiler error on one line, without the call stack and source excerpts that
    Triton puts before it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)  # Triton's message without the excerpt
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])}"[:400]


def compile_all(targets: list[str], only: Sequence[str], jobs: int) -> tuple[list[Result], list[str]]:
    """Compile all distinct kernels of the cases whose name contains one of `only`. Return the rows and the
    error messages."""
    torch.set_num_threads(1)
    _work[:] = distinct(targets, only)  # inherited by the processes, since launches cannot be pickled
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        results = list(pool.map(_compile_nth, range(len(_work))))
    rows = [r for r in results if isinstance(r, Result)]
    return sorted(rows, key=lambda r: r.key), [r for r in results if isinstance(r, str)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="substrings of case names")
    local = "local: compile for the current GPU, into Triton's cache"
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS, "local"], help=local)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--known", type=Path, help="folder of a compile.json whose rows are reused")
    parser.add_argument("--out", type=Path, help="output folder of compile.json")
    arguments = parser.parse_args()
    if missing := unmatched(arguments.only):
        parser.error(f"no case matches {', '.join(missing)}.")
    if "local" in arguments.targets:
        try:
            card = find_card()
        except ValueError as error:
            parser.error(f"--targets local: {error}")
        arguments.targets, launch.GPUS[card.arch] = [card.arch], card.gpu
        TARGETS[card.arch] = GPUTarget("cuda", int(card.arch[3:]), 32)
    else:  # Triton hashes a function's first line number with its source; make it constant
        JITFunction.starting_line_number = property(lambda self: 0, lambda self, line: None)
    if arguments.known:
        rows = load(arguments.known)
        rows = [r for r in rows if r.triton == triton.__version__]
        _known.update({key: r for r in rows for key in (r.source, r.fingerprint)})
    begin = time.perf_counter()
    results, failures = compile_all(arguments.targets, arguments.only, arguments.jobs)
    for r in results:
        print(f"{r}: {r.registers} registers, {r.spills} bytes spilled, {r.shared} bytes shared")
    found = failures + problems(save(results, arguments.out) if arguments.out else results)
    for problem in found:
        print(problem)
    seconds = round(time.perf_counter() - begin, 1)
    known = sum(r.fingerprint in _known for r in results)
    print(json.dumps({"rows": len(results), "known": known, "problems": len(found), "seconds": seconds}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
