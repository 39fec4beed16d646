"""Chat templates: where they are found, what they may use, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanospec.text import budget
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.text.conftest import byte_level, save

TEMPLATE = (
    "{{ bos_token }}\n{% for m in messages %}[{{ m['role'] }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: Any, **files: str) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    save(byte_level(), folder, tokenizer_config=config)
    for name, content in files.items():
        (folder / f"{name}.jinja").write_text(content)
    return Tokenizer(folder)


def test_template_in_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    assert tokenizer.apply_chat_template(HI) == "<s>\n[user] hi[assistant]"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == "<s>\n[user] hi"


def test_template_file_wins(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE, chat_template="{{ messages | length }}{{ x }}")
    assert tokenizer.apply_chat_template(HI, x="!") == "1!"


def test_named_templates(tmp_path: Path) -> None:
    templates = {"default": "D", "tool_use": "{{ 'T' if tools else 'U' }}"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    tokenizer = with_template(tmp_path, named)
    assert tokenizer.apply_chat_template(HI) == "D"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "T"
    assert tokenizer.apply_chat_template(HI, chat_template="tool_use") == "U"
    assert tokenizer.apply_chat_template(HI, chat_template="{{ 'new' }}") == "new"


def test_what_a_template_has_no_use_for_is_not_dropped(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE + "{{ thinking }}")
    assert tokenizer.apply_chat_template(HI, thinking="!", tools=None).endswith("!")
    assert tokenizer.apply_chat_template(HI, chat_template_kwargs={"thinking": "!"}).endswith("!")
    unused: list[dict[str, Any]] = [{"tools": [{}]}, {"params": 1}]
    for given in (*unused, {"chat_template_kwargs": {"thinkign": True}}):
        with pytest.raises(ValueError, match="has no use for '(tools|params|thinkign)'; leave it out"):
            tokenizer.apply_chat_template(HI, **given)


def test_rendered_chat_has_one_bos(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    text = tokenizer.apply_chat_template(HI)
    assert tokenizer.encode(text, add_special_tokens=False).count(0) == 1
    assert tokenizer.encode("hi").count(0) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx{% endif %}", "x"),
        ("{{ tools is none }}{{ pad_token is defined }}", "TrueFalse"),
    ],
    ids=["tojson", "strftime_now", "loopcontrols", "generation", "blocks-trimmed", "variables"],
)
def test_template_features(tmp_path: Path, template: str, text: str) -> None:
    assert with_template(tmp_path, template).apply_chat_template(HI) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 + 'a' }}",
    ],
    ids=["raise_exception", "syntax", "immutable", "sandbox", "type"],
)
def test_template_errors_are_one_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses these messages: "):
        with_template(tmp_path, template).apply_chat_template(HI)


@pytest.mark.parametrize(
    "template", [5, True, [5], [{"name": "a"}], {"a": 5}, ["ab"], [{"name": [], "template": ""}]]
)
def test_template_of_a_wrong_type_is_one_sentence(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ValueError, match=r"_config\.json: chat_template=.* must be a template, or several"):
        with_template(tmp_path, template)


def test_template_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is no text in UTF-8, at byte 1; fetch"):
        Tokenizer(tmp_path)


LOOP = "{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
DOUBLED = "{%% set n = namespace(x=%s) %%}" + LOOP + "{{ n.x %s }}"
HEAVY = {
    "times": "{{ 'x' * 10**10 }}",
    "times-list": "{{ 10**10 * [1] }}",
    "power": "{{ 10**(10**10) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format-star": "{{ '%*d' % (10**9, 1) }}",
    "format-braces": "{{ '{:1000000000}'.format(1) }}",
    "format-computed": "{{ '{:{}}'.format(1, 10**9) }}",
    "format-again": "{% set x = 'x' * 10**6 %}{{ ('%(a)s' * 10**5) % {'a': x} }}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "join": "{{ ('x' * 10**6).join(range(10000)|map('string')) }}",
    "join-filter": "{{ range(10000)|join('x' * 10**6) }}",
    "replace": "{{ ('x' * 10**6).replace('', 'y' * 10**6) }}",
    "replace-filter": "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "indent": "{{ ('\n' * 10**6)|indent(10**6) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|length }}",
    "slice": "{{ [1]|slice(10**9)|length }}",
    "round": "{{ 5|round(-10**9) }}",
    "tojson": "{{ [1]|tojson(indent=10**9) }}",
    "search": "{{ ('a' * 8 * 10**6).rfind('b' ~ 'a' * 4 * 10**6) }}",
    "doubled": DOUBLED % ("'x'", "n.x ~ n.x", ""),
    "doubled-in-a-block": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubled-list": DOUBLED % ("[1]", "[n.x, n.x]", ""),
    "doubled-dict": DOUBLED % ("1", "{'a': n.x, 'b': n.x}", "|tojson"),
    "doubled-key": DOUBLED % ("(1,)", "(n.x, n.x)", "in {n.x: 1}"),
    "hoarded": DOUBLED % ("[]", "n.x + ['x' * 10**6]", ""),
    "slices": "{% set n = namespace() %}{% set x = 'x' * 8 * 10**6 %}"
    "{% for i in range(99) %}{% set n.x = x[1:] %}{% endfor %}",
    "put-out": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "long": "x" * 10**5,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HEAVY)
def test_heavy_template_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"^the chat template refuses these messages: .*\.$"):
        with_template(tmp_path, HEAVY[name]).apply_chat_template(HI)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
        "{% block a %}{% for i in range(99999) %}{{ self.b() }}{% endfor %}{% endblock %}"
        "{% block b %}{% for i in range(99999) %}{% endfor %}{% endblock %}",
    ],
    ids=["loops", "macro", "filter", "block"],
)
def test_endless_template_ends_in_any_thread(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "SECONDS", 0.1)
    tokenizer = with_template(tmp_path, template)
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(tokenizer.apply_chat_template, HI).exception()
    assert isinstance(error, ValueError)
    assert str(error) == "the chat template refuses these messages: it takes more than 0.1 seconds."


def test_time_in_which_others_have_the_processor_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    clock = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(budget.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(budget.time, "thread_time", lambda: 1.0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}] * 9) == "x" * 9


def test_renderings_in_threads_have_a_limit_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "WRITTEN", 1000)
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    many = [{"role": "user", "content": "x" * 9}] * 100
    with ThreadPoolExecutor(4) as pool:
        assert {len(text) for text in pool.map(tokenizer.apply_chat_template, [many] * 40)} == {900}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError: maximum recursion depth"),
        ("{{ 1e308 ** 10 }}", "OverflowError: "),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        ("{{ raise_exception('x' * 10**6) }}", "x{97}[.]{4}$"),
        ("{{ 'abc'[::0] }}", "ValueError: slice step cannot be zero"),
        ("{{ none.x.y }}", "'None' has no attribute 'x'"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested blocks"),
    ],
    ids=["zero", "recursion", "depth", "overflow", "include", "long", "value", "undefined", "python-syntax"],
)
def test_any_error_of_a_template_is_one_sentence(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"refuses these messages: {words}"):
        with_template(tmp_path, template).apply_chat_template(HI)


def test_limits_leave_alone_what_templates_do(tmp_path: Path) -> None:
    """A conversation of a million characters, gathered in lists and texts."""
    many = [{"role": "user", "content": "x" * 1000}] * 1000
    for template in (
        "{% for m in messages %}{{ '[' + m.role + ']' ~ m['content'].strip() | trim }}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m] %}{% endfor %}"
        "{{ n.x|tojson }}",
        "{% macro say(m) %}{% set y %}{{ m.role }}{% endset %}{{ y }}{{ m.content[1:] }}{% endmacro %}"
        "{% for m in messages[::-1] %}{{ say(m) }}{% endfor %}"
        "{{ messages|map(attribute='content')|join('\\n') }}",
    ):
        assert len(with_template(tmp_path, template).apply_chat_template(many)) > 10**6


def test_model_without_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template 'default' .*plain prompt"):
        Tokenizer(save(byte_level(), tmp_path)).apply_chat_template(HI)
