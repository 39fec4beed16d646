"""Settings reject invalid values with a message that names the value and the limit."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanospec import LLM
from nanospec.config import EngineConfig, SamplingParams, SpecConfig, check_names
from nanospec.device.resources import resolve_device
from nanospec.drafters.methods import resolve_drafters
from nanospec.kernels import MAX_STOP_IDS

BIG, SEED = 2**31 - 1, 2**63
INVALID: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"n": 0}, "n=0 must be an integer from 1 to 1024."),
    (SamplingParams, {"n": 1.0}, "n=1.0 must be an integer from 1 to 1024."),
    (SamplingParams, {"n": True}, "n=True must be an integer from 1 to 1024."),
    (SamplingParams, {"temperature": -0.1}, "temperature=-0.1 must be a number from 0 to 100."),
    (SamplingParams, {"temperature": math.nan}, "temperature=nan must be a number from 0 to 100."),
    (SamplingParams, {"temperature": "hot"}, "temperature='hot' must be a number from 0 to 100."),
    (SamplingParams, {"top_p": 0}, "top_p=0 must be greater than 0; use temperature=0 for greedy decoding."),
    (SamplingParams, {"top_p": 1.01}, "top_p=1.01 must be a number from 0 to 1."),
    (SamplingParams, {"top_k": -2}, f"top_k=-2 must be an integer from -1 to {BIG}."),
    (SamplingParams, {"min_p": 1.5}, "min_p=1.5 must be a number from 0 to 1."),
    (SamplingParams, {"seed": SEED}, f"seed={SEED} must be an integer from -{SEED} to {SEED - 1}."),
    (SamplingParams, {"max_tokens": 0}, f"max_tokens=0 must be an integer from 1 to {BIG}."),
    (SamplingParams, {"min_tokens": -1}, f"min_tokens=-1 must be an integer from 0 to {BIG}."),
    (SamplingParams, {"min_tokens": 17}, "min_tokens=17 must not exceed max_tokens=16."),
    (SamplingParams, {"stop": ""}, "stop='' must be a non-empty string or a list of them."),
    (SamplingParams, {"stop": ["a", ""]}, "stop=['a', ''] must be a non-empty string or a list of them."),
    (SamplingParams, {"stop": 0}, "stop=0 must be a non-empty string or a list of them."),
    (SamplingParams, {"stop_token_ids": 0}, "stop_token_ids=0 must be a list of at most 24 token ids."),
    (SamplingParams, {"stop_token_ids": ""}, "stop_token_ids='' must be a list of at most 24 token ids."),
    (SamplingParams, {"stop_token_ids": range(25)}, "stop_token_ids=range(0, 25) must be a list of at most"),
    (SamplingParams, {"stop_token_ids": [-1]}, f"ids: token=-1 must be an integer from 0 to {BIG}."),
    (SamplingParams, {"stop_token_ids": [True]}, "stop_token_ids: token=True must be an integer"),
    (SamplingParams, {"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False."),
    (SamplingParams, {"logprobs": 21}, "logprobs=21 must be an integer from 0 to 20."),
    (SamplingParams, {"presence_penalty": 2.1}, "presence_penalty=2.1 must be a number from -2 to 2."),
    (SamplingParams, {"frequency_penalty": -3}, "frequency_penalty=-3 must be a number from -2 to 2."),
    (SamplingParams, {"repetition_penalty": 0}, "repetition_penalty=0 must be a number from 0.01 to 100."),
    (SamplingParams, {"logit_bias": {7: 1e38}}, "[7]=1e+38 must be a number from -1000000 to 1000000."),
    (SamplingParams, {"logit_bias": {7: "x"}}, "logit_bias[7]='x' must be a number"),
    (SamplingParams, {"logit_bias": 0}, "logit_bias=0 must map token ids to numbers."),
    (SamplingParams, {"logit_bias": {"1": 5, "01": 5}}, "logit_bias={'1': 5, '01': 5} has token 1 twice"),
    (SamplingParams, {"logit_bias": {True: 1}}, "logit_bias: token=True must be an integer"),
    (SamplingParams, {"logit_bias": {-1: 1}}, f"logit_bias: token=-1 must be an integer from 0 to {BIG}."),
    (SamplingParams, {"logit_bias": {"9" * 5000: 1}}, "must be an integer from 0 to"),
    (SamplingParams, {"num_speculative_tokens": "auto"}, "='auto' must be an integer from 0 to 63."),
    (SamplingParams, {"tree_width": 9}, "tree_width=9 must be an integer from 1 to 8."),
    (SamplingParams, {"acceptance": "any"}, "acceptance='any' is not supported; use one of exact,"),
    (SpecConfig, {"method": "draft+ngram"}, "'draft+ngram' is unknown; did you mean 'ngram+draft'? Avail"),
    (SpecConfig, {"method": "tree"}, "method='tree' is unknown; use one of draft, medusa,"),
    (SpecConfig, {"method": ["ngram"]}, "method=['ngram'] must be a string."),
    (SpecConfig, {"num_speculative_tokens": -1}, "=-1 must be 'auto' or an integer from 0 to 63."),
    (SpecConfig, {"num_speculative_tokens": "5"}, "='5' must be 'auto' or an integer from 0 to 63."),
    (SpecConfig, {"num_speculative_tokens": np.arange(3)}, "=array([0, 1, 2]) must be 'auto' or an integer"),
    (SpecConfig, {"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be an integer from 1 to 32."),
    (SpecConfig, {"prompt_lookup_max": 33}, "prompt_lookup_max=33 must be an integer from 1 to 32."),
    (SpecConfig, {"prompt_lookup_min": 9}, "prompt_lookup_min=9 must not exceed prompt_lookup_max=8."),
    (SpecConfig, {"max_speculative_tokens": 0}, "max_speculative_tokens=0 must be an integer from 1 to 63."),
    (SpecConfig, {"draft_model": "x"}, "draft_model='x' is not used by method='ngram'"),
    (SpecConfig, {"method": "draft", "heads": "x"}, "heads='x' is not used by method='draft'"),
    (SpecConfig, {"method": "medusa", "heads": Path("x")}, "must be a string."),
    (SpecConfig, {"tree_width": 9}, "tree_width=9 must be an integer from 1 to 8."),
    (SpecConfig, {"method": "draft", "tree_width": 2}, "tree_width=2 is not supported by draft; use tree_w"),
    (SpecConfig, {"acceptance": "lossy"}, "acceptance='lossy'"),
    (EngineConfig, {"spec": "ngram"}, "spec='ngram' must be a SpecConfig"),
    (EngineConfig, {"dtype": []}, "dtype=[] must be a string."),
    (EngineConfig, {"threads": 0}, "threads=0 must be 'auto' or an integer from 1 to 1024."),
    (EngineConfig, {"max_num_seqs": 10**9}, "max_num_seqs=1000000000 must be an integer from 1 to 65536."),
    (EngineConfig, {"max_num_batched_tokens": 0}, "_tokens=0 must be an integer from 1 to 16777216."),
    (EngineConfig, {"max_model_len": 1}, "max_model_len=1 must be an integer of at least 2."),
    (EngineConfig, {"block_size": 8}, "block_size=8 must be an integer of at least 16."),
    (EngineConfig, {"block_size": 24}, "block_size=24 must be a power of two and at least 16."),
    (EngineConfig, {"kv_cache_memory": 0}, "kv_cache_memory=0 must be an integer of at least 1."),
    (EngineConfig, {"kv_cache_memory": 10**40}, "0 must be an integer from 1 to 9223372036854775807."),
    (EngineConfig, {"kv_cache_memory": "4 gigs"}, "kv_cache_memory='4 gigs' must be a number of bytes"),
    (EngineConfig, {"tensor_parallel_size": 65}, "tensor_parallel_size=65 must be an integer from 1 to 64."),
    (EngineConfig, {"distributed_timeout": 10**18}, "must be an integer from 1 to 10000000."),
    (EngineConfig, {"trace": np.arange(3)}, "trace=array([0, 1, 2]) must be True or False."),
    (EngineConfig, {"seed": SEED}, f"seed={SEED} must be an integer from -{SEED} to {SEED - 1}."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "sentence"), INVALID, ids=lambda value: str(value)[:60])
def test_invalid_settings_are_rejected(kind: type, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_drafters(kind(**options), None) if kind is SpecConfig else kind(**options)
    assert sentence in str(caught.value)


def test_defaults() -> None:
    """Those of `SamplingParams` are vLLM's."""
    params = SamplingParams(
        n=1, temperature=1, top_p=1, top_k=0, min_p=0, max_tokens=16, min_tokens=0, presence_penalty=0,
        frequency_penalty=0, repetition_penalty=1, logit_bias={}, stop=[], stop_token_ids=[],
    )  # fmt: skip
    spec = SpecConfig("ngram", None, None, 1, "exact", "auto", 1, 8, 16)
    engine = EngineConfig(
        spec, max_num_seqs=64, max_num_batched_tokens=2048, block_size=16, enable_prefix_caching=True,
        lazy_capture=False, tensor_parallel_size=1, distributed_timeout=300, seed=0, trace=False,
    )  # fmt: skip
    assert (params, engine) == (SamplingParams(), EngineConfig())


def test_params_are_frozen_and_copy_their_arguments() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 2.0})
    for settings in (params, SpecConfig(), EngineConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            settings.seed = 2  # type: ignore


def test_shorthands_numeric_types_and_limits_are_accepted() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1}  # type: ignore[dict-item]
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert empty == SamplingParams()
    other = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        stop_token_ids=[np.int64(3)],
        logit_bias={np.int32(4): np.float32(2)},
    )
    numbers = (
        other.max_tokens,
        other.temperature,
        *other.stop_token_ids,
        *other.logit_bias,
        other.logit_bias[4],
    )
    assert [type(number) for number in numbers] == [int, float, int, int, float]
    SamplingParams(top_p=1, top_k=-1, min_p=1, temperature=100, repetition_penalty=100)
    SamplingParams(seed=-SEED, stop_token_ids=range(MAX_STOP_IDS - 8), logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=BIG)
    SamplingParams(max_tokens=4, min_tokens=4)
    SpecConfig(prompt_lookup_min=8)


def test_changes_logits() -> None:
    changes: dict[str, Any] = {"logit_bias": {0: 1.0}, "min_tokens": 1, "presence_penalty": 0.1}
    for name, value in {**changes, "frequency_penalty": -0.1, "repetition_penalty": 1.1}.items():
        assert SamplingParams(**{name: value}).changes_logits
    assert not SamplingParams(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1).changes_logits


def test_max_k_and_methods() -> None:
    assert SpecConfig(num_speculative_tokens="auto", max_speculative_tokens=9).max_k == 9
    assert SpecConfig(num_speculative_tokens=63).max_k == 63
    assert SpecConfig(num_speculative_tokens=5, method="none").max_k == 0
    assert SpecConfig(method="none").methods == ()
    assert SpecConfig(method="ngram+draft").methods == ("ngram", "draft")


def test_unknown_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.device

    def in_cuda_build(device: Any) -> torch.device:  # it takes a number for a GPU, even without one
        return real(f"cuda:{device}" if isinstance(device, int) else device)

    names: list[Any] = ["gpu", "mps", "cuda:x", 3]
    for build in (real, in_cuda_build):
        monkeypatch.setattr(torch, "device", build)
        for name in names:
            with pytest.raises(ValueError, match=r"use 'auto', 'cpu' or 'cuda'"):
                resolve_device(name)


def test_settings_do_not_import_torch_or_triton() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, triton=None)\n"
        "from nanospec import EngineConfig, SamplingParams, SpecConfig\n"
        "SamplingParams(temperature=0), EngineConfig(spec=SpecConfig(method='draft'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_memory_units() -> None:
    sizes = {"7": 7, "400M": 400 << 20, "4g": 4 << 30, "1.5 GiB": 3 << 29, "4GB": 4 * 10**9, "9b": 9}
    for text, size in sizes.items():
        config = EngineConfig.from_options(None, {"kv_cache_memory_bytes": text})  # vLLM's name
        assert config.kv_cache_memory == size


LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
FROM_VLLM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"method": "ngram", **LOOKUP}, LOOKUP),
    ({"model": "[ngram]", "num_speculative_tokens": 4}, {"num_speculative_tokens": 4}),
    ({"prompt_lookup_min": 9, "prompt_lookup_max": None}, {"prompt_lookup_min": 9, "prompt_lookup_max": 9}),
    ({"method": "draft_model", "model": "small"}, {"method": "draft", "draft_model": "small"}),
    ({"model": "small"}, {"method": "draft", "draft_model": "small"}),
    ({"method": "medusa", "model": "file"}, {"method": "medusa", "heads": "file"}),
    ({"method": "ngram+draft", "tree_width": 2}, {"method": "ngram+draft", "tree_width": 2}),
]


def test_options_of_vllm_are_converted() -> None:
    for theirs, ours in FROM_VLLM:
        assert EngineConfig.from_options(None, {"speculative_config": theirs}).spec == SpecConfig(**ours)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda: SpecConfig.from_vllm("ngram"), "must be a dict"),  # type: ignore[arg-type]
        (lambda: SpecConfig.from_vllm({"method": 1}), "speculative_config: method=1 must be a string."),
        (lambda: SpecConfig.from_vllm({"prompt_lookup": 3}), "did you mean prompt_lookup_m"),
        (lambda: check_names({"max_seqs": 3}, EngineConfig), "no option 'max_seqs'; did you mean max_num_s"),
        (lambda: check_names({"xyzzy": 1}, EngineConfig), "available options: async_scheduling, block_size"),
        (lambda: LLM("x", spec=SpecConfig(), speculative_config={}), "cannot be combined"),
        (lambda: LLM("x", max_seqs=3), "did you mean max_num_seqs?"),
    ],
)
def test_unknown_options_and_wrong_types_are_rejected(refused: Any, sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        refused()
    assert sentence in str(caught.value)
