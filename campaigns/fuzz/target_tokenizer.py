"""Fuzz tokenizer files: they must give a working tokenizer or an error message."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from nanospec.apps.openai_format import token_bytes
from nanospec.text.tokenizer import Detokenizer, Tokenizer

from .mutation import mutate_bytes, mutate_json
from .refusal import answer
from .target_weights import files_of, folder_of

INSTRUMENTED = ("nanospec.text",)
NAMES = [f"{name}.json" for name in ("tokenizer", "tokenizer_config", "generation_config", "config")]
NAMES += ["chat_template.jinja"]


def stored() -> bytes:
    """Return a small tokenizer.json with all kinds of components."""
    texts = ["<s>", "</s>", *"abĠ", "ab", *(f"<0x{byte:02X}>" for byte in (0x41, 0xC3, 0xA9))]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend.to_str().encode()


TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
CONFIG = json.dumps({**TOKENS, "chat_template": "{{ messages[0].content }}"}).encode()
TEMPLATES = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
NAMED = json.dumps({"chat_template": TEMPLATES}).encode()
IDS = b'{"eos_token_id": [1, 2], "bos_token_id": 0}'
SEEDS = [
    folder_of({NAMES[0]: stored(), NAMES[1]: CONFIG, NAMES[2]: IDS, NAMES[3]: b"{}"}),
    folder_of({NAMES[0]: stored(), NAMES[1]: NAMED, NAMES[2]: IDS, NAMES[4]: b"{{ 1 }}"}),
]


def mutate(data: bytes, rng: Random) -> bytes:
    files = files_of(data)
    if not files or rng.random() < 0.05:
        return mutate_bytes(data, rng)
    name = rng.choice(list(files))
    files[name] = (mutate_json if name.endswith("json") else mutate_bytes)(files[name], rng)
    return folder_of({name: content for name, content in files.items() if len(name.encode()) < 256})


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path:
        for name, content in files_of(data).items():
            if name in NAMES:
                (Path(path) / name).write_bytes(content)
        tokenizer = answer(Tokenizer, path)
    if tokenizer is not None:
        ids = answer(tokenizer.encode, "ab a\n é")
        answer(tokenizer.decode, list(range(12)) + (ids or []))
        stream = Detokenizer(tokenizer)
        for i in (*range(12), *(ids or [])):
            assert isinstance(stream.push([i]) + tokenizer.text_of(i), str)
            assert isinstance(token_bytes(tokenizer, i, tokenizer.text_of(i)), bytes)
        assert isinstance(stream.flush(), str)
        ids = [*tokenizer.eos_token_ids, 0]
        assert all(type(i) is int and 0 <= i < 2**31 for i in ids)
        answer(tokenizer.apply_chat_template, [{"role": "user", "content": "a"}])
