"""What tests of training share: texts that count, small targets with a tokenizer, small rounds of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nanospec.apps.training import corpus, data
from nanospec.apps.training.corpus import Text
from tests.tiny import checkpoint

SPECIAL = ["<e>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def target(folder: Path, variant: str, **changes: Any) -> Path:
    """A random checkpoint with a tokenizer of bytes and a chat template."""
    ends = [LETTERS.index("<e>"), LETTERS.index("<|im_end|>")]
    changes = {"vocab_size": len(LETTERS), "bos_token_id": None, "eos_token_id": ends, **changes}
    checkpoint(folder, variant, max_position_embeddings=512, **changes)
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def counting(number: int, length: int = 30, user: int = 2) -> list[Text]:
    """Texts that count upwards, modulo 40, from anywhere, of several lengths: easy to foresee."""
    texts = []
    for i in range(number):
        ids = [(7 * i + j) % 40 for j in range(length + i % 5)]
        texts.append(Text(ids, user, 6, 0.0 if i % 3 == 0 else 0.8, "chat"))
    return texts


def stop(*_: Any) -> Any:
    """As Ctrl-C would."""
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is quick to run."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    return target(tmp_path_factory.mktemp("targets") / "quick", "llama", **sizes)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a few short texts."""
    monkeypatch.setattr(corpus, "ROUND", 12)
    monkeypatch.setattr(corpus, "MESSAGE_TOKENS", 10)
    monkeypatch.setattr(corpus, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(corpus, "QUOTE", 30)
    monkeypatch.setattr(data, "HELD_OUT", 4)
