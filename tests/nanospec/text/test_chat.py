"""Chat templates: where they are found, their features, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanospec.text import chat
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
    text = tokenizer.apply_chat_template(HI)
    assert text == "<s>\n[user] hi[assistant]"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == "<s>\n[user] hi"
    for ids in (tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("hi")):
        assert ids.count(0) == 1  # one BOS


def test_template_file_takes_precedence(tmp_path: Path) -> None:
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


def test_unused_template_variables_are_rejected(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE + "{{ thinking }}")
    assert tokenizer.apply_chat_template(HI, thinking="!", tools=None).endswith("!")
    assert tokenizer.apply_chat_template(HI, chat_template_kwargs={"thinking": "!"}).endswith("!")
    unused: list[dict[str, Any]] = [{"tools": [{}]}, {"params": 1}]
    for given in (*unused, {"chat_template_kwargs": {"thinkign": True}}):
        with pytest.raises(ValueError, match="does not use '(tools|params|thinkign)'; omit it"):
            tokenizer.apply_chat_template(HI, **given)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx{% endif %}", "x"),
        ("{{ tools is none }}{{ pad_token is defined }}", "TrueFalse"),
    ],
    ids=["tojson", "indented", "strftime_now", "loopcontrols", "generation", "blocks-trimmed", "variables"],
)
def test_template_features(tmp_path: Path, template: str, text: str) -> None:
    assert with_template(tmp_path, template).apply_chat_template(HI) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 + 'a' }}", "TypeError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        ("{{ raise_exception('x' * 10**6) }}", "x{97}[.]{3}"),
        ("{{ none.x.y }}", "'None' has no attribute 'x'"),
        ("{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}", "the prompt has more than 1000000"),
        ("x" * 10**5, "the template has more than 65536 characters"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_template_errors_are_reported_in_one_line(
    tmp_path: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_PROMPT", 10**6)
    with pytest.raises(ValueError, match=f"^the chat template cannot render these messages: {words}.*\\.$"):
        with_template(tmp_path, template).apply_chat_template(HI)


@pytest.mark.parametrize("template", [5, [5], [{"name": "a"}], {"a": 5}])
def test_template_of_wrong_type_is_rejected(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ValueError, match=r"_config\.json: chat_template=.* must be a template or a list"):
        with_template(tmp_path, template)


def test_missing_or_unreadable_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template 'default' .*plain prompt"):
        Tokenizer(save(byte_level(), tmp_path)).apply_chat_template(HI)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not valid UTF-8 at byte 1; download"):
        Tokenizer(tmp_path)
