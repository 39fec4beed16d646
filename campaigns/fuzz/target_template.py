"""Chat templates: a prompt or one sentence, soon and in bounded memory, whatever the template is."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

from nanospec.text import budget, sandbox
from nanospec.text.chat import render

from .mutation import mutate_bytes
from .refusal import answer

__all__ = ["SEEDS", "mutate", "one"]

INSTRUMENTED = ("nanospec.text", "jinja2.sandbox", "jinja2.filters")
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "héllo <|im_end|> {{ x }}"}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]
SEEDS = [
    b"{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content }}<|im_end|>{% endfor %}",
    b"{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m] %}{% endfor %}{{ n.x }}",
    b"{% macro f(x) %}{{ x * 2 }}{% endmacro %}{{ f(messages[0].content) }}{{ f([1, 2])|length }}",
    b"{% set y %}{{ '%s' % 1 }}{{ '{}'.format(2) }}{% endset %}{{ y ~ y }}{{ y|replace('1', 'y') }}",
    b"{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'].split(' ')[-1] }}{% endif %}",
    b"{{ range(50)|map('string')|join(', ') }}{{ (7, 2)|sum }}{{ 2 ** 5 }}{{ [3, 1]|sort|batch(1)|tojson }}",
]
VALUES = (  # noqa: SIM905
    "1 0 -1 2.5 99999 10**9 10**30 1e308 'x' '' 'ab' '{}' '%s' '%d' '\\\\n' messages n n.x y loop f true "
    "none [1] [] {} (1,2) {'a':1} range(9) range(99999) messages[0] messages[0].role self caller x.y "
    "'%9999999d' '{:9999999}' 'x'*9999"
).split()
OPERATORS = [*"+-*/%~<|.", "//", "**", "and", "or", "in", "not in", "=="]
FILTERS = sorted(sandbox.Sandbox().filters)
METHODS = [*sorted(sandbox.TEXT), "items", "keys", "encode", "format_map", "__class__", "translate"]
AROUND = [
    "{{% for i in {a} %}}{b}{{% endfor %}}",
    "{{% set n = namespace(x={a}) %}}{b}",
    "{{% for i in range(99) %}}{{% set n.x = {a} %}}{{% endfor %}}{b}",
    "{{% macro f(x) %}}{b}{{% endmacro %}}{{{{ f({a}) }}}}",
    "{{% if {a} %}}{b}{{% endif %}}",
    "{{% set y %}}{b}{{% endset %}}{{{{ {a} }}}}",
    "{{% filter {f} %}}{b}{{% endfilter %}}",
    "{{% for i in {a} recursive %}}{{{{ loop(i) }}}}{b}{{% endfor %}}",
    "{{% call f({a}) %}}{b}{{% endcall %}}",
    "{b}{{{{ {a} }}}}",
]


def expression(rng: Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(VALUES)
    one, other = (expression(rng, depth - 1) for _ in range(2))
    match rng.randrange(6):
        case 0 | 1:
            return f"({one} {rng.choice(OPERATORS)} {other})"
        case 2:
            return f"({one}|{rng.choice(FILTERS)}({rng.choice(('', other, f'{other}, {one}'))}))"
        case 3:
            return f"({one}).{rng.choice(METHODS)}({rng.choice(('', other, f'{other}, {one}'))})"
        case 4:
            return rng.choice((f"[{one}, {other}]", f"{{'a': {one}, 'b': {other}}}", f"({one}, {other})"))
        case _:
            return rng.choice((f"({one})[{other}]", f"({one})[:{other}]", f"({one} if {other})", f"f({one})"))


def mutate(data: bytes, rng: Random) -> bytes:
    """Any bytes, or what lies around an expression that may be heavy."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    text = data.decode(errors="replace")
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        return f"{text[:at]}{{{{ {expression(rng)} }}}}{text[at:]}".encode()
    inner = rng.choice((text, "{{ n.x }}", "{{ i }}"))[:4000]
    return rng.choice(AROUND).format(a=expression(rng), b=inner, f=rng.choice(FILTERS)).encode()


def one(data: bytes) -> None:
    template = data.decode(errors="replace")
    with patch.object(budget, "SECONDS", 0.2):
        text = answer(render, {"default": template}, MESSAGES, add_generation_prompt=True)
    assert text is None or (isinstance(text, str) and len(text) <= 2 * budget.WRITTEN)
