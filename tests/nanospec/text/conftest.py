"""Two small tokenizers of different types, and the default model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from nanospec.text.tokenizer import Tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer with 256 bytes, merges that split UTF-8 characters, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "he"), ("Ġhe", "ll"), ("ð", "Ł"), ("ł", "Ġ")]
    texts = ["<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<call>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a tokenizer with ▁ for a space and byte fallback."""
    pieces = ["▁", "▁▁", "a", "b", "▁a", "ab", "é", "▁ab"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁", "ab")]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(list(parts))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(backend: tokenizers.Tokenizer, folder: Path, **configs: dict[str, Any]) -> Path:
    """Write a model folder without weights; `configs` are its JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def default(smollm2: Path) -> Tokenizer:
    """Return the default model's tokenizer."""
    return Tokenizer(smollm2)


@pytest.fixture(scope="session", params=["byte-level", "byte-fallback", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    """Return each of the tokenizers in turn."""
    if request.param == "smollm2":
        result: Tokenizer = request.getfixturevalue("default")
        return result
    backend = byte_level() if request.param == "byte-level" else byte_fallback()
    return Tokenizer(save(backend, tmp_path_factory.mktemp(request.param)))
