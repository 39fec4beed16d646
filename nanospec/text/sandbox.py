"""Jinja for chat templates, in bounds: what a template may use, for how long, and how much it may make.

Templates come with models, so nobody here has read them. Jinja's sandbox keeps them from Python; this adds
the limits of `budget.py`, which hold in any thread and need no other process. A template takes time only in
what it repeats, and memory only where values are made, and these places are few:

* passes of loops, macros and blocks: `Counted` puts a call of `tick` into each;
* operators, calls and filters: what they make is weighed, and beforehand where it may be much larger than
  what it is made of, as in 'x' * 10**10. Methods and filters that nobody needs and whose cost is hard to
  foretell are not there;
* lists, dicts and joined texts written out (`Counted` makes calls of them), and what is put out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .budget import BITS, LONGEST, Budget, TooMuch, check, check_format, now

METHODS = """
capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit islower
isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind
rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
TEXT = frozenset(METHODS.split())  # what texts have
WITHOUT = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")  # filters


class Names(Namespace):
    """Jinja's `namespace`, which would write out what it holds, itself too."""

    def __repr__(self) -> str:
        return "<namespace>"


class Counted(NodeTransformer):
    """Puts calls into the tree of a template wherever it repeats something or makes values by itself."""

    def _repeats(self, node: Any) -> Any:
        self.generic_visit(node)
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("tick", [nodes.Const(constant)], node), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = visit_Block = _repeats

    def _makes(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(n, nodes.Const) for n in _items(node)):
            return node  # names that are assigned to, or no more than what is written
        return _call("keep", [node], node)

    visit_List = visit_Tuple = visit_Dict = _makes

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("keep", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node)


def _call(name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name)
    return nodes.Call(function, arguments, [], None, None, lineno=node.lineno)


def _items(node: nodes.List | nodes.Tuple | nodes.Dict) -> Iterator[nodes.Node]:
    for item in node.items:
        yield from (item.key, item.value) if isinstance(item, nodes.Pair) else (item,)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, within the limits above."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=_written,
            optimized=False,  # or constants are computed, and written into the code as what Python calls them
        )
        kept = {name: function for name, function in self.filters.items() if name not in WITHOUT}
        self.filters = {name: _limited(name, f) for name, f in {**kept, "tojson": _tojson}.items()}
        del self.globals["lipsum"]
        self.globals |= {"namespace": Names, "raise_exception": _refuse, "strftime_now": _now_as}

    def compiled(self, source: str) -> jinja2.Template:
        """A template whose rendering is limited."""
        if len(source) > LONGEST:
            raise TooMuch(f"it has more than {LONGEST} characters")
        return self.from_string(Counted().visit(self.parse(source)))

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        now.budget = Budget()
        try:
            return template.render(variables)
        finally:
            now.budget = Budget()  # holds nothing

    def tick(self, written: int) -> None:
        now.budget.tick(written)

    def keep(self, value: Any) -> Any:
        return now.budget.keep(value)

    def concatenate(self, *parts: Any) -> Any:
        now.budget.fits(sum(map(now.budget.weight, parts)))
        return "".join(map(str, parts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in TEXT
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **named: Any) -> str:
            check_format(value.__self__, "{", (args, named))
            return wrapped(*args, **named)

        return limited

    def call(self, context: Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if owner is self:
            return obj(*args)  # put in by `Counted`
        if isinstance(owner, str):
            args = check(obj.__name__, (owner, *args), named)[1:]
        return now.budget.keep(super().call(context, obj, *args, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget, numbers = now.budget, isinstance(left, int) and isinstance(right, int)
        if operator == "+":  # mostly
            return budget.keep(left + right)
        if operator == "*" and not numbers:
            for one, other in ((left, right), (right, left)):
                budget.fits(budget.weight(one) * other if isinstance(other, int) else 0)
        if operator == "**" and numbers and left.bit_length() * right > BITS and abs(left) > 1:
            raise TooMuch(f"it makes an integer of more than {BITS} bits")
        if operator == "%" and isinstance(left, str):
            check_format(left, "%", right)
        return budget.keep(self.binop_table[operator](left, right))


@jinja2.pass_context
def _written(context: Context, value: Any) -> str:
    """What is put out for a value."""
    now.budget.fits(now.budget.weight(value))
    text = str(value)
    now.budget.tick(len(text))
    return text


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def limited(*args: Any, **named: Any) -> Any:
        args = (*args[:first], *check(name, args[first:], named))
        return now.budget.keep(function(*args, **named))

    return limited


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not HTML-escaped, as Jinja's own would be."""
    if len(str(indent)) > 4 or len(str(separators)) > 30:
        raise TooMuch("its tojson asks for too much space")
    now.budget.fits(now.budget.weight(value))
    style: Any = {"indent": indent, "separators": separators}
    return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **style)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now_as(form: str) -> str:
    now.budget.fits(len(form) << 10)  # a form of many characters takes many times as many
    return datetime.now().strftime(form)
