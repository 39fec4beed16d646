"""Chat templates: where they are found, what they may use, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_model_without_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template 'default' .*plain prompt"):
        Tokenizer(save(byte_level(), tmp_path)).apply_chat_template(HI)
