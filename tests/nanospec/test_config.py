"""Settings reject invalid values with a message that names the value and the limit."""

import math
import re
from typing import Any

import numpy as np
import pytest

from nanospec import LLM
from nanospec.config import EngineConfig, SamplingParams, SpecConfig
from nanospec.drafters.methods import resolve_drafters
from nanospec.kernels import MAX_STOP_IDS

BIG, SEED = 2**31 - 1, 2**63
LIMITS: list[tuple[type, dict[str, tuple[float, float]]]] = [
    (SamplingParams, {
        "n": (1, 1024), "temperature": (0, 100), "top_p": (1e-9, 1), "top_k": (-1, BIG), "min_p": (0, 1),
        "seed": (-SEED, SEED - 1), "max_tokens": (1, BIG), "min_tokens": (0, 16), "logprobs": (0, 20),
        "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
        "num_speculative_tokens": (0, 63), "tree_width": (1, 8),
    }),
    (SpecConfig, {
        "num_speculative_tokens": (0, 63), "prompt_lookup_min": (1, 8),
        "prompt_lookup_max": (1, 32), "tree_width": (1, 8),
    }),
    (EngineConfig, {
        "threads": (1, 1024), "max_num_seqs": (1, 1 << 16), "max_num_batched_tokens": (1, 1 << 24),
        "kv_cache_memory": (1, SEED - 1), "tensor_parallel_size": (1, 64),
        "distributed_timeout": (1, 10**7), "gpu_memory_utilization": (0.01, 1), "seed": (-SEED, SEED - 1),
    }),
]  # fmt: skip


def test_limits_are_accepted_and_values_beyond_are_rejected() -> None:
    for kind, limits in LIMITS:
        for name, (least, most) in limits.items():
            kind(**{name: least})
            kind(**{name: most})
            for value in (least - 1, most + 1):
                with pytest.raises(ValueError, match=rf"^{name}={value} must (be|not exceed)"):
                    kind(**{name: value})


INVALID: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"n": 1.0}, "n=1.0 must be an integer from 1 to 1024."),
    (SamplingParams, {"temperature": math.nan}, "temperature=nan must be a number from 0 to 100."),
    (SamplingParams, {"top_p": 0}, "top_p=0 must be a number from 1e-45 to 1."),
    (SamplingParams, {"min_tokens": 17}, "min_tokens=17 must not exceed max_tokens=16."),
    (SamplingParams, {"stop": ["a", ""]}, "stop=['a', ''] must be a non-empty string or a list of them."),
    (SamplingParams, {"stop_token_ids": ""}, "stop_token_ids='' must be a list of at most 24 token ids."),
    (SamplingParams, {"stop_token_ids": [-1]}, f"ids: token=-1 must be an integer from 0 to {BIG}."),
    (SamplingParams, {"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False."),
    (SamplingParams, {"logit_bias": {7: 1e38}}, "[7]=1e+38 must be a number from -1000000 to 1000000."),
    (SamplingParams, {"logit_bias": {True: 1}}, "logit_bias: token=True must be an integer"),
    (SamplingParams, {"acceptance": "any"}, "acceptance='any' is not supported; use 'exact' or"),
    (SpecConfig, {"method": "draft+ngram"}, "'draft+ngram' is unknown; did you mean 'ngram+draft'? Avail"),
    (SpecConfig, {"acceptance": "rejection"}, "='rejection' is not supported; use 'exact' or 'typical'."),
    (SpecConfig, {"method": "draft", "draft_model": ""}, "draft_model='' must be the name of a folder"),
    (SpecConfig, {"prompt_lookup_min": 9}, "prompt_lookup_min=9 must not exceed prompt_lookup_max=8."),
    (SpecConfig, {"method": 1}, "method=1 must be a string."),
    (SpecConfig, {"draft_model": "x"}, "draft_model='x' is not used by method='ngram'"),
    (SpecConfig, {"method": "draft", "tree_width": 2}, "tree_width=2 is not supported by draft; use tree_w"),
    (SpecConfig, {"method": "eagle3", "tree_width": 2}, "tree_width=2 is not supported by eagle3; use tree"),
    (EngineConfig, {"spec": "ngram"}, "spec='ngram' must be a SpecConfig"),
    (EngineConfig, {"dtype": []}, "dtype=[] must be a string."),
    (EngineConfig, {"dtype": "half"}, "dtype='half' is not supported; use 'auto' or 'bfloat16' or"),
    (EngineConfig, {"quantization": "int3"}, "quantization='int3' is not supported; use 'int8' or 'int4'."),
    (EngineConfig, {"max_model_len": 1}, "max_model_len=1 must be an integer of at least 2."),
    (EngineConfig, {"block_size": 24}, "block_size=24 must be a power of two and at least 16."),
    (EngineConfig, {"kv_cache_memory": "4 gigs"}, "kv_cache_memory='4 gigs' must be a number of bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "sentence"), INVALID, ids=lambda value: str(value)[:60])
def test_invalid_settings_are_rejected(kind: type, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        resolve_drafters(kind(**options), None) if kind is SpecConfig else kind(**options)


def test_shorthands_and_numeric_types_are_converted_and_copied() -> None:
    bias: Any = {np.int32(4): np.float32(2), "12": 1}
    other = SamplingParams(max_tokens=np.int64(5), stop_token_ids=[np.int64(3)], logit_bias=bias)
    plain: Any = {1: 2.0}
    copied = SamplingParams(logit_bias=plain)
    plain.clear()
    assert copied.logit_bias == {1: 2.0}
    assert SamplingParams(stop="end").stop == ("end",)
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert empty == SamplingParams()
    numbers = other.max_tokens, *other.stop_token_ids, *other.logit_bias, other.logit_bias[4]
    assert numbers == (5, 3, 4, 12, 2.0)
    assert [type(number) for number in numbers] == [int, int, int, int, float]
    SamplingParams(max_tokens=None, min_tokens=BIG, stop_token_ids=range(MAX_STOP_IDS - 8))


def test_memory_units() -> None:
    sizes = {"7": 7, "400M": 400 << 20, "4g": 4 << 30, "1.5 GiB": 3 << 29, "4GB": 4 * 10**9, "9b": 9}
    for text, size in sizes.items():
        config = EngineConfig(kv_cache_memory=text)  # type: ignore[arg-type]
        assert config.kv_cache_memory == size


FROM_VLLM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_speculative_tokens": 4, "prompt_lookup_max": None}, {"num_speculative_tokens": 4}),
    ({"method": "draft_model", "model": "small"}, {"method": "draft", "draft_model": "small"}),
    ({"model": "small"}, {"method": "draft", "draft_model": "small"}),
    ({"method": "eagle3", "model": "small"}, {"method": "eagle3", "draft_model": "small"}),
]


def test_options_of_vllm_are_converted() -> None:
    for config, fields in FROM_VLLM:
        assert EngineConfig.from_options(None, {"speculative_config": config}).spec == SpecConfig(**fields)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda: SpecConfig.from_vllm("ngram"), "must be a dict"),  # type: ignore[arg-type]
        (lambda: SpecConfig.from_vllm({"prompt_lookup": 3}), "did you mean prompt_lookup_m"),
        (lambda: LLM("x", spec=SpecConfig(), speculative_config={}), "cannot be combined"),
        (lambda: LLM("x", max_seqs=3), "no option 'max_seqs'; did you mean max_num_seqs?"),
        (lambda: LLM("x", kv_cache_memory_bytes=3), "did you mean kv_cache_memory?"),
        (lambda: SamplingParams(structured_outputs=1), "did you mean response_format?"),  # type: ignore[call-arg]
        (lambda: LLM("x", prompt_lookup_max=2), "no option 'prompt_lookup_max'; did you mean spec?"),
        (lambda: SamplingParams(best_of=2), "SamplingParams has no option 'best_of'; available options"),  # type: ignore[call-arg]
    ],
)
def test_unknown_options_and_wrong_types_are_rejected(refused: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        refused()
