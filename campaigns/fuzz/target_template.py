"""Fuzz chat templates: every template must give a prompt or an error message.

Jinja's sandbox limits neither time nor memory, so expressions are small: no powers, short ranges.
"""

from __future__ import annotations

from random import Random
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanospec.text.chat import MAX_PROMPT, render

from .mutation import mutate_bytes
from .refusal import answer

INSTRUMENTED = ("nanospec.text", "jinja2.sandbox", "jinja2.filters")
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "héllo <|im_end|> {{ x }}"}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]
SEEDS = [
    b"{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content }}<|im_end|>{% endfor %}",
    b"{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m] %}{% endfor %}{{ n.x }}",
    b"{% macro f(x) %}{{ x ~ 2 }}{% endmacro %}{{ f(messages[0].content) }}{{ f([1, 2])|length }}",
    b"{% set y %}{{ '%s' % 1 }}{{ '{}'.format(2) }}{% endset %}{{ y ~ y }}{{ y|replace('1', 'y') }}",
    b"{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'].split(' ')[-1] }}{% endif %}",
    b"{{ range(50)|map('string')|join(', ') }}{{ (7, 2)|sum }}{{ [3, 1]|sort|batch(1)|tojson }}",
]
VALUES = (  # noqa: SIM905
    "1 0 -1 2.5 'x' '' 'ab' '{}' '%s' '%d' '\\\\n' messages n n.x y loop f true none [1] [] {} (1,2) {'a':1} "
    "range(9) messages[0] messages[0].role self caller x.y"
).split()
OPERATORS = [*"+-/%~<|.", "//", "and", "or", "in", "not in", "=="]
FILTERS = sorted(ImmutableSandboxedEnvironment().filters)
METHODS = ["strip", "split", "upper", "items", "keys", "encode", "format", "__class__", "append"]


def expression(rng: Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(VALUES)
    one, other = (expression(rng, depth - 1) for _ in range(2))
    match rng.randrange(5):
        case 0:
            return f"({one} {rng.choice(OPERATORS)} {other})"
        case 1:
            return f"({one}|{rng.choice(FILTERS)}({rng.choice(('', other, f'{other}, {one}'))}))"
        case 2:
            return f"({one}).{rng.choice(METHODS)}({rng.choice(('', other, f'{other}, {one}'))})"
        case 3:
            return rng.choice((f"[{one}, {other}]", f"{{'a': {one}, 'b': {other}}}", f"({one}, {other})"))
        case _:
            return rng.choice((f"({one})[{other}]", f"({one})[:{other}]", f"({one} if {other})", f"f({one})"))


def mutate(data: bytes, rng: Random) -> bytes:
    """Mutate bytes, or insert an expression into the template."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    text = data.decode(errors="replace")
    at = rng.randrange(len(text) + 1)
    return f"{text[:at]}{{{{ {expression(rng)} }}}}{text[at:]}"[:4000].encode()


def one(data: bytes) -> None:
    text = answer(render, {"default": data.decode(errors="replace")}, MESSAGES, add_generation_prompt=True)
    assert text is None or (isinstance(text, str) and len(text) <= MAX_PROMPT)
