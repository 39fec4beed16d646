"""`--explain`: byte and FLOP counts agree with the weights, and the report is printed."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nanospec import LLM, SpecConfig
from nanospec.apps.cli import explain
from nanospec.apps.cli.console import Console
from nanospec.models.config import DTYPES
from nanospec.models.families import read_config
from tests.tiny import num_parameters


def test_step_reads_weights_and_cache_once(smollm2: Path) -> None:
    _, config = read_config(smollm2)
    for tie in (True, False):
        shape = replace(config, tie_word_embeddings=tie)
        read = 2 * (num_parameters(shape) - (0 if tie else config.vocab_size * config.hidden_size))
        cache = 1000 * config.kv_bytes_per_token(DTYPES[shape.dtype])
        for tokens in (1, 5):
            parts = explain.parts(shape, tokens, 1000, 2)
            assert sum(part.bytes for part in parts) == read + cache
            products = sum(part.flops for part in parts if part.name != "attention")
            assert products == 2 * tokens * read / 2
    windows = explain.parts(replace(config, windows=(10,) * config.num_layers), 3, 1000, 2)
    assert windows == explain.parts(config, 3, 10, 2)


def test_report_is_printed(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_TOKENS", 12)
    monkeypatch.setattr(explain, "BLOCK", 1 << 20)
    written = io.StringIO()
    spec = SpecConfig(num_speculative_tokens=4)
    llm = LLM(smollm2, spec=spec, dtype="float32", max_num_seqs=1, kv_cache_memory=100 << 20)
    explain.explain(llm, Console(written))
    text = written.getvalue()
    assert "GB/s read" in text
    assert re.search(r"^layers +424\.\d +0\.21 ", text, re.MULTILINE)  # MB in fp32, GFLOP
    assert re.search(r"^1 +\d+\.\d\d +\d+\.\d\d +1\.00x$", text, re.MULTILINE)
    assert "4 drafts break even at" in text
    assert re.search(r"speedup \d+\.\d\dx predicted, \d+\.\d\dx measured\n$", text)
