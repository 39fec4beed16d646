"""Chat templates: where they are found, their features, and their errors."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec.text import chat
from nanospec.text.tokenizer import Tokenizer
from tests.nanospec.text.conftest import byte_level, save

TEMPLATE = (
    "{{ bos_token }}\n{% for m in messages %}[{{ m['role'] }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ thinking }}{{ padding_side }}"
)
HI = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: Any, **files: str) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "padding_side": "left", "chat_template": template}
    save(byte_level(), folder, tokenizer_config=config)
    for name, content in files.items():
        (folder / f"{name}.jinja").write_text(content)
    return Tokenizer(folder)


def test_template_in_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    text = tokenizer.apply_chat_template(HI)
    assert text == "<s>\n[user] hi[assistant]"
    assert tokenizer.apply_chat_template(HI, tokenize=True) == tokenizer.encode(text, False)
    assert tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=False) == "<s>\n[user] hi"
    for ids in (tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("hi")):
        assert ids.count(0) == 1  # one BOS
    assert tokenizer.apply_chat_template(HI, thinking="!", tools=None).endswith("!")
    assert tokenizer.apply_chat_template(HI, chat_template_kwargs={"thinking": "!"}).endswith("!")
    unused: list[dict[str, Any]] = [{"tools": [{}]}, {"chat_template_kwargs": {"thinkign": True}}]
    for given in unused:
        with pytest.raises(ValueError, match="does not use '(tools|thinkign)'; omit it"):
            tokenizer.apply_chat_template(HI, **given)


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<assistant>{% endif %}"
TRIM = "{% for m in messages %}{{ m.content | trim }}{{ ';' if m.content else '!' }}{% endfor %}"
LAST = "{{ messages[-1].content }}|{{ messages[0].content }}"  # the content is not at the end


def test_final_message_is_continued() -> None:
    """The text ends with the final message's content, as it was written."""
    for template, content, text in (
        (CHATML, "One, ", "<user>hi</>\n<assistant>One, "),
        (CHATML, "", "<user>hi</>\n<assistant>"),
        (CHATML, "</>\n", "<user>hi</>\n<assistant></>\n"),
        (TRIM, " \n hi; \n", "hi;hi; \n"),
        (TRIM, "", "hi;"),
        (LAST, "hi", "hi"),
    ):
        templates, messages = {"default": template}, [*HI, {"role": "assistant", "content": content}]
        for options in ({}, {"continue_final_message": True}, {"chat_template_kwargs": {"verbosity": "low"}}):
            assert chat.render(templates, messages, **options) == text
        ended = chat.render(templates, messages, continue_final_message=False)
        assert ended == chat.render(templates, messages, add_generation_prompt=True) != text
        assert chat.render(templates, HI, continue_final_message=True).endswith("hi")
    refused: list[tuple[dict[str, Any], Any, str]] = [
        ({"continue_final_message": True, "add_generation_prompt": True}, "", "set only one of them"),
        ({"continue_final_message": True}, [{}], "a string as content"),
        ({"continue_final_message": True, "chat_template": "{{ 1 }}"}, "", "omits the final message"),
    ]
    for given, content, words in refused:
        with pytest.raises(ValueError, match=words):
            chat.render({"default": CHATML}, [{"role": "user", "content": content}], **given)


def test_named_templates(tmp_path: Path) -> None:
    templates = {"default": "D", "tool_use": "{{ 'T' if tools else 'U' }}"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    tokenizer = with_template(tmp_path, named)
    given: list[tuple[dict[str, Any], str]] = [({}, "D"), ({"tools": [{}]}, "T")]
    given += [({"chat_template": name}, text) for name, text in (("tool_use", "U"), ("{{ 'new' }}", "new"))]
    for options, text in given:
        assert tokenizer.apply_chat_template(HI, **options) == text
    by_file = with_template(tmp_path, named, chat_template="{{ messages | length }}{{ x }}")
    assert by_file.apply_chat_template(HI, x="!") == "1!"


FEATURES = {
    "{{ {'a': 'é<'} | tojson }}": '{"a": "é<"}',
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "1",
    "{% generation %}a{% endgeneration %}b": "ab",
    "  {% if true %}\nx{% endif %}": "x",
    "{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}": "TrueTrueFalse",
    "x" * chat.MAX_TEMPLATE: "x" * chat.MAX_TEMPLATE,
}


def test_template_features(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    for template, text in FEATURES.items():
        assert chat.render({"default": template}, HI) == text
    with pytest.raises(ValueError, match="no chat template 'default' .*plain prompt"):
        tokenizer.apply_chat_template(HI)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        ("{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}", "the prompt has more than 1000000"),
        ("x" * (chat.MAX_TEMPLATE + 1), "the template has more than 65536 characters"),
    ],
    ids=lambda value: value[:30],
)
def test_template_errors_are_reported_in_one_line(template: str, words: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(chat, "MAX_PROMPT", 10**6)
    with pytest.raises(ValueError, match=f"^the chat template cannot render these messages: {words}.*\\.$"):
        chat.render({"default": template}, HI)


def test_time_in_template_changes_with_the_hour(monkeypatch: Any) -> None:
    """A template that writes the time must not change the start of each prompt."""
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %H:%M') }}{% endif %}"
    for minute in (0, 59):
        now = datetime(2026, 11, 27, 23, minute, 5)
        monkeypatch.setattr(chat, "datetime", SimpleNamespace(now=lambda now=now: now))
        assert chat.render({"default": source}, HI) == "27 23:00"


def test_invalid_template_files_are_rejected(tmp_path: Path) -> None:
    for template in (5, [5], [{"name": "a"}], {"a": 5}):
        with pytest.raises(
            ValueError, match=r"_config\.json(: chat_template must be a template| has invalid)"
        ):
            with_template(tmp_path, template)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja has invalid content .* byte 0xff in"):
        Tokenizer(tmp_path)
