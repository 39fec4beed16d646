"""The mutations of `mutants.py`: typical slips and off-by-one errors.

A mutation replaces the source of one expression or statement. Strings, annotations, decorators, `strict=` and
hints to the compiler are not mutated. In C++, operators, integers and assignments are found by pattern, in
lines that are compiled for this processor.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
OPPOSITES = (
    ("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"),
    ("floor", "ceil"), ("zeros", "ones"),
)  # fmt: skip
NAMES = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}
CPP = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " + ": " - ",
    " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " && ": " || ", " || ": " && ", " << ": " >> ",
    " >> ": " << ", " += ": " = ", "min(": "max(", "max(": "min(", "if (!": "if (",
    "continue;": ";", "break;": ";",
}  # fmt: skip
CPP_TOKEN = re.compile(
    "|".join(map(re.escape, CPP)) + r"|(?<![\w.\"])\d+(?![\w.\"])|(?<=^ )[\w.\[\]>-]+ = [^;{]*;", re.M
)
CPP_SKIPPED = re.compile(
    r"//.*|^\s*(#|template|static_assert|using|asm).*|\"[^\"\n]*\"|<\w+>|operator.*", re.M
)
HINTS = {"strict", "num_warps", "num_stages", "sem", "cache_modifier", "eviction_policy", "input_precision"}


class Mutation(NamedTuple):
    """Replaces bytes `start` to `end` of a source file by `after`."""

    start: int
    end: int
    kind: str
    after: str

    def described(self, source: str) -> dict[str, object]:
        data = source.encode()
        begin, stop = data.rfind(b"\n", 0, self.start) + 1, data.find(b"\n", self.end)
        return {
            "line": data.count(b"\n", 0, self.start) + 1,
            "column": self.start - begin,
            "kind": self.kind,
            "before": data[self.start : self.end].decode(),
            "after": self.after,
            "text": data[begin:stop].decode().strip(),
        }


def apply(source: str, mutation: Mutation) -> str:
    data = source.encode()
    return (data[: mutation.start] + mutation.after.encode() + data[mutation.end :]).decode()


def mutations(path: Path) -> list[Mutation]:
    """Return all mutations of a Python or C++ source file, in order."""
    source = path.read_text()
    return sorted(set(_Finder(source).found if path.suffix == ".py" else _cpp_mutations(path, source)))


def _cpp_mutations(path: Path, source: str) -> Iterator[Mutation]:
    compiled = _compiled_lines(path)
    skipped = {i for match in CPP_SKIPPED.finditer(source) for i in range(*match.span())}
    for match in CPP_TOKEN.finditer(source):
        if match.start() not in skipped and source.count("\n", 0, match.start()) + 1 in compiled:
            text, start, end = match[0], *(len(source[:i].encode()) for i in match.span())
            after = str(int(text) + 1) if text.isdigit() else CPP.get(text, ";")
            yield Mutation(start, end, "C++", after)


@cache
def _compiled_lines(path: Path) -> set[int]:
    """Return the lines of a C++ file that are compiled for this processor."""
    command = ["g++", "-E", "-march=native", *map(str, path.parent.glob("*.cpp"))]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    lines, inside, number = set(), False, 0
    for line in text.splitlines():
        if mark := re.match(r'# (\d+) "(.*)"', line):
            inside, number = Path(mark[2]) == path, int(mark[1])
        else:
            lines |= {number} if inside and line.strip() else set()
            number += 1
    return lines


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.lines = [0]
        for line in source.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.found: list[Mutation] = []
        self.bound: set[str] = set()  # names that the function has assigned so far
        self.visit(ast.parse(source))

    def note(self, node: ast.expr | ast.stmt, kind: str, after: ast.expr | str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        self.found.append(Mutation(start, end, kind, text))

    def visit(self, node: ast.AST) -> None:
        for kind, after in _changed(node):
            assert isinstance(node, ast.expr)
            self.note(node, kind, after)
        if isinstance(node, ast.stmt) and self._is_deletable(node):
            self.note(node, "deleted", "pass")
        super().visit(node)

    def _is_deletable(self, node: ast.stmt) -> bool:
        """Return whether a statement can be deleted without obviously breaking the code."""
        if isinstance(node, ast.Expr):
            return not isinstance(node.value, (ast.Constant, ast.Yield))
        if isinstance(node, ast.Assign):
            first = node.targets[0]
            return not isinstance(first, ast.Name | ast.Tuple) or _names(first) <= self.bound
        return isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Raise, ast.Delete, ast.Assert))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.bound = self.bound, {arg.arg for arg in node.args.args}
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.bound = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.bound = self.bound, set()
        for statement in node.body:
            self.visit(statement)
        self.bound = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bound |= _names(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        self.bound |= _names(node.target)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._test(node.test, True, False)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._test(node.test, True, False)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._test(test, True)
        self.generic_visit(node)

    def _test(self, test: ast.expr, *instead: bool) -> None:
        for value in () if ast.unparse(test) == "TYPE_CHECKING" else instead:
            self.note(test, "condition", str(value))

    def visit_Call(self, node: ast.Call) -> None:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in HINTS]
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Do not mutate error messages."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Do not mutate f-strings."""

    def visit_Import(self, node: ast.Import) -> None:
        """Do not mutate imports."""

    visit_ImportFrom = visit_Import  # type: ignore[assignment]


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.expr | str]]:
    """Yield (kind, replacement) for an expression."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            ops = [*node.ops[:i], COMPARE[type(operator)](), *node.ops[i + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "operator", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "unary", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (("constant", str(n)) for n in (node.value + 1, node.value - 1) if n >= 0)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", str(node.value * 2 or 1.0)
    elif isinstance(node, ast.Call):
        yield from _changed_call(node)


def _changed_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield calls of another function, or with other arguments."""
    name = node.func
    if isinstance(name, ast.Name) and name.id in NAMES:
        yield "function", ast.Call(ast.Name(NAMES[name.id]), node.args, node.keywords)
    if isinstance(name, ast.Attribute) and name.attr in NAMES:
        yield "function", ast.Call(ast.Attribute(name.value, NAMES[name.attr]), node.args, node.keywords)
    if isinstance(name, ast.Attribute) and name.attr == "where" and len(node.args) == 3:
        yield "branches", ast.Call(name, [node.args[0], node.args[2], node.args[1]], node.keywords)
