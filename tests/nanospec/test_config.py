"""Settings reject invalid values with a message that names the value and the limit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanospec import LLM
from nanospec.config import EngineConfig, SpecConfig, check_names
from nanospec.device.resources import resolve_device
from nanospec.drafters.methods import resolve_drafters

BAD_SPEC = [
    ({"method": "draft+ngram"}, "'draft+ngram' is unknown; did you mean 'ngram+draft'? Available:"),
    ({"method": "ngrm"}, "method='ngrm' is unknown; did you mean 'ngram'? Available: draft, medusa,"),
    ({"method": "tree"}, "method='tree' is unknown; use one of draft, medusa, ngram, ngram+draft,"),
    ({"num_speculative_tokens": -1}, "=-1 must be 'auto' or an integer from 0 to 63."),
    ({"num_speculative_tokens": 64}, "=64 must be 'auto' or an integer from 0 to 63."),
    ({"num_speculative_tokens": "5"}, "='5' must be 'auto' or an integer from 0 to 63."),
    ({"num_speculative_tokens": True}, "=True must be 'auto' or an integer from 0 to 63."),
    ({"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be an integer from 1 to 32."),
    ({"prompt_lookup_max": 33}, "prompt_lookup_max=33 must be an integer from 1 to 32."),
    ({"prompt_lookup_max": 2.5}, "prompt_lookup_max=2.5 must be an integer from 1 to 32."),
    (
        {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
        "prompt_lookup_min=4 must not exceed prompt_lookup_max=3.",
    ),
    ({"max_speculative_tokens": 0}, "max_speculative_tokens=0 must be an integer from 1 to 63."),
    ({"num_speculative_tokens": np.arange(3)}, "=array([0, 1, 2]) must be 'auto' or an integer from 0 to "),
    ({"acceptance": []}, "acceptance=[] must be a string."),
    ({"method": ["ngram"]}, "method=['ngram'] must be a string."),
    ({"heads": Path("x")}, "must be a string."),
    ({"method": "ngram", "draft_model": "x"}, "draft_model='x' is not used by method='ngram'"),
    ({"method": "draft", "heads": "x"}, "heads='x' is not used by method='draft'"),
    ({"tree_width": 0}, "tree_width=0 must be"),
    ({"method": "draft", "tree_width": 2}, "tree_width=2 is not supported by draft; use tree_width=1."),
    ({"acceptance": "lossy"}, "acceptance='lossy'"),
]
BAD_ENGINE = [
    ({"spec": "ngram"}, "spec='ngram' must be a SpecConfig"),
    ({"max_num_seqs": 0}, "max_num_seqs=0 must be an integer from 1 to 65536."),
    ({"max_num_seqs": "4"}, "max_num_seqs='4' must be an integer from 1 to 65536."),
    ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000 must be an integer from 1 to 65536."),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be an integer from 1 to 16777216."),
    ({"dtype": []}, "dtype=[] must be a string."),
    ({"device": 5}, "device=5 must be a string."),
    ({"kv_cache_memory": 10**40}, "0 must be an integer from 1 to 9223372036854775807."),
    ({"distributed_timeout": 10**18}, "must be an integer from 1 to 10000000."),
    ({"trace": np.arange(3)}, "trace=array([0, 1, 2]) must be True or False."),
    ({"seed": np.arange(3)}, "seed=array([0, 1, 2]) must be an integer from"),
    ({"max_model_len": 1}, "max_model_len=1 must be an integer of at least 2."),
    ({"block_size": 8}, "block_size=8 must be an integer of at least 16."),
    ({"block_size": 24}, "block_size=24 must be a power of two and at least 16."),
    ({"block_size": 16.0}, "block_size=16.0 must be an integer of at least 16."),
    ({"kv_cache_memory": 0}, "kv_cache_memory=0 must be an integer of at least 1."),
    ({"kv_cache_memory": 1e9}, "kv_cache_memory=1000000000.0 must be an integer"),
    ({"kv_cache_memory": "4 gigs"}, "kv_cache_memory='4 gigs' must be a number of bytes, such as"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False."),
    ({"seed": 2**63}, "seed=9223372036854775808 must be an integer from"),
]


def case_id(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("options", "sentence"), BAD_SPEC, ids=case_id)
def test_invalid_spec_config_is_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_drafters(SpecConfig(**options), None)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("options", "sentence"), BAD_ENGINE, ids=case_id)
def test_invalid_engine_config_is_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("kind", [SpecConfig, EngineConfig])
def test_unknown_settings_raise_type_error(kind: type) -> None:
    with pytest.raises(TypeError, match="max_nun_seqs"):
        kind(max_nun_seqs=3)


@pytest.mark.parametrize("config", [SpecConfig(), EngineConfig()], ids=["spec", "engine"])
def test_settings_are_frozen(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


@pytest.mark.parametrize(
    ("options", "max_k"),
    [
        ({"num_speculative_tokens": "auto", "max_speculative_tokens": 9}, 9),
        ({"num_speculative_tokens": 63}, 63),
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 5, "method": "none"}, 0),
        ({"method": "none"}, 0),
    ],
    ids=case_id,
)
def test_max_k(options: dict[str, Any], max_k: int) -> None:
    assert SpecConfig(**options).max_k == max_k


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x", 3])
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_unknown_devices_are_rejected(name: Any, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.device
    if build == "cuda":  # a CUDA build of torch takes a number for a GPU, even without one
        gpu = lambda device: real(f"cuda:{device}" if isinstance(device, int) else device)  # noqa: E731
        monkeypatch.setattr(torch, "device", gpu)
    with pytest.raises(ValueError, match=r"use 'auto', 'cpu' or 'cuda'"):
        resolve_device(name)


def test_settings_do_not_import_torch_or_triton() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, triton=None)\n"
        "from nanospec import EngineConfig, SamplingParams, SpecConfig\n"
        "SamplingParams(temperature=0), EngineConfig(spec=SpecConfig(method='draft'))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("400M", 400 << 20), ("4g", 4 << 30), ("1.5 GiB", 3 << 29), ("4GB", 4 * 10**9), ("9b", 9)],
)
def test_memory_units(text: str, size: int) -> None:
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vllm", "ours"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            SpecConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4),
        ),
        ({"model": "[ngram]", "num_speculative_tokens": 4}, SpecConfig(num_speculative_tokens=4)),
        (
            {"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": None},
            SpecConfig(prompt_lookup_min=9, prompt_lookup_max=9),
        ),
        (
            {"method": "draft_model", "model": "small", "num_speculative_tokens": 3},
            SpecConfig(method="draft", draft_model="small", num_speculative_tokens=3),
        ),
        ({"model": "small"}, SpecConfig(method="draft", draft_model="small")),
        ({"method": "medusa", "model": "file"}, SpecConfig(method="medusa", heads="file")),
        (
            {"method": "ngram+draft", "draft_model": "small", "tree_width": 2},
            SpecConfig(method="ngram+draft", draft_model="small", tree_width=2),
        ),
    ],
    ids=["ngram", "old-ngram", "shortest", "draft", "model", "medusa", "ours"],
)
def test_from_vllm(vllm: dict[str, Any], ours: SpecConfig) -> None:
    assert SpecConfig.from_vllm(vllm) == ours


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda: SpecConfig.from_vllm("ngram"), "must be a dict"),  # type: ignore[arg-type]
        (lambda: SpecConfig.from_vllm({"prompt_lookup": 3}), "did you mean prompt_lookup_m"),
        (
            lambda: check_names({"max_seqs": 3}, EngineConfig),
            "Config has no option 'max_seqs'; did you mean ",
        ),
        (lambda: check_names({"xyzzy": 1}, EngineConfig), "available options: async_scheduling, block_size"),
        (lambda: LLM("x", spec=SpecConfig(), speculative_config={}), "cannot be combined"),
        (lambda: LLM("x", max_seqs=3), "did you mean max_num_seqs?"),
    ],
)
def test_unknown_names_suggest_the_closest(refused: Any, sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        refused()
    assert sentence in str(caught.value)
