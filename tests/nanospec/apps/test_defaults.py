"""Sampling parameters that a request does not set come from the model's generation_config.json."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec.apps.cli import generate
from nanospec.apps.cli.main import main
from nanospec.apps.openai_format import CHAT, COMPLETIONS
from nanospec.apps.serve.requests import read_request
from nanospec.config import SamplingParams
from nanospec.models.generation_config import default_params
from tests.alphabet import make

SETTINGS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 99}
EXPECTED = SamplingParams(temperature=0.6, top_k=20, top_p=0.9)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {"temperature": 0}),
        ({"eos_token_id": 2, "temperature": None}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1, "min_p": 0.1}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 0.6, "repetition_penalty": 1.1}),
        ({"top_p": 2}, "top_p=2 must be a number from 1e-45 to 1."),
        ({"do_sample": "yes"}, "do_sample='yes' must be true or false."),
    ],
    ids=["no-file", "no-sampling", "greedy", "sampling", "temperature-alone", "top_p-2", "do_sample-text"],
)
def test_generation_config_gives_the_defaults(tmp_path: Path, content: Any, expected: Any) -> None:
    path = tmp_path / "generation_config.json"
    if content is not None:
        path.write_text(json.dumps(content))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(f"{path}: {expected}")):
            default_params(tmp_path)
    else:
        assert default_params(tmp_path) == SamplingParams(**expected)


def test_all_entry_points_have_the_same_defaults(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(SETTINGS))
    llm, message = make(model), {"role": "user", "content": "ab"}
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "check_params", check := Mock(wraps=llm.engine.check_params))
        llm.generate("ab")
        llm.chat([message])
        list(llm.stream("ab"))
        llm.generate("ab", SamplingParams())
    own = [call.args[0] for call in check.call_args_list]
    assert own == [EXPECTED] * 3 + [SamplingParams()]
    chat = {"messages": [message]}
    assert read_request(llm, CHAT, chat).params == replace(EXPECTED, max_tokens=None)
    assert read_request(llm, COMPLETIONS, {"prompt": "ab", "top_k": 3}).params == replace(EXPECTED, top_k=3)

    lines = [{"prompt": "ab"}, {"url": CHAT, "body": chat}, {"url": COMPLETIONS, "body": {"prompt": "ab"}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(generate, "run", run := Mock())
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    for options, temperature in ([], 0.6), (["--temperature", "0.5"], 0.5):
        assert main(["--model", str(model), *files, *options]) == 0
        _, params, batch = run.call_args.args
        expected = replace(EXPECTED, temperature=temperature)
        assert params == replace(expected, max_tokens=256)
        limits = [256, None, 16]
        assert [task.params for task in batch.tasks] == [replace(expected, max_tokens=n) for n in limits]
