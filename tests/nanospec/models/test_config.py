"""`ModelConfig` reads every supported config.json and rejects others with a one-line message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.models.config import ModelConfig, Rope
from nanospec.models.families import config_of, read_config
from tests.tiny import VARIANTS, checkpoint, num_parameters

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def parse(architecture: str = "Llama", **changes: Any) -> ModelConfig:
    names = [f"{architecture}ForCausalLM"]
    return config_of({**LLAMA, "architectures": names, **changes})


def test_llama_with_defaults() -> None:
    expected = ModelConfig(100, 64, 96, 4, 4, 4, 16, 128, (None,) * 4, 1e-5, Rope("default", 10000.0))
    assert parse() == expected
    assert expected.dtype == "float32"


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
ROPES: dict[str, tuple[dict[str, Any], Rope]] = {
    "theta": ({"rope_theta": 5e5}, Rope("default", 5e5)),
    "null": ({"rope_scaling": None}, Rope()),
    "linear-old-type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope("linear", 1e4, 2.0)),
    "linear-v5": ({"rope_parameters": LINEAR}, Rope("linear", 7.0, 2.0)),
    "llama3-old": (
        {"rope_scaling": LLAMA3, "rope_theta": 5e5}, Rope("llama3", 5e5, 32.0, 1.0, 4.0, 8192)
    ),
    "llama3-v5-inner-theta-wins": (
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 3.0},
        Rope("llama3", 5e5, 32.0, 1.0, 4.0, 8192),
    ),
    "default-v5": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope("default", 1e6)),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_rope(case: str) -> None:
    changes, expected = ROPES[case]
    assert parse(**changes).rope == expected


def test_windows() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention"] * 2
    for architecture, changes, expected in (
        ("Llama", {"sliding_window": 8}, (None, None, None, None)),
        ("Mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None, None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096, 4096)),
        ("Qwen2", {"sliding_window": 8, "max_window_layers": 1}, (None, None, None, None)),
        ("Qwen2", {**sliding, "max_window_layers": 1}, (None, 8, 8, 8)),
        ("Qwen3", {**sliding, "max_window_layers": 0, "layer_types": kinds}, (None, 8, None, 8)),
    ):
        assert parse(architecture, **changes).windows == expected, (architecture, changes)


def test_biases_and_norms() -> None:
    def flags(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags(parse("Llama")) == (False, False, False, False)
    assert flags(parse("Llama", attention_bias=True)) == (True, True, False, False)
    assert flags(parse("Llama", mlp_bias=True)) == (False, False, True, False)
    assert flags(parse("Mistral", attention_bias=True)) == (False, False, False, False)
    assert flags(parse("Qwen2")) == (True, False, False, False)
    assert flags(parse("Qwen3")) == (False, False, False, True)
    assert flags(parse("Qwen3", attention_bias=True)) == (True, True, False, True)


def test_head_dim() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=None).head_dim == 16
    assert parse("Qwen3").head_dim == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not .*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures=None is not"),
        ({"architectures": [["a"]]}, r"\['a'\] is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be an integer from 1"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 must be a number from"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of .*=3"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"head_dim": 258}, "head_dim=258 must be an integer from 1 to 256"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu'"),
        ({"quantization_config": {"bits": 4}}, "Quantized checkpoints .* not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' must be one of float32"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "RoPE type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": 3}, "rope_scaling=3 must be an object"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor=1.0 must be below"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "use one for all"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 must be .* to 4096"),
        ({"max_position_embeddings": 2**31}, "must be an integer from 1 to 16777216"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* must be a number from"),
        ({"rope_theta": 1e-45}, "rope_theta=1e-45 must be a number from 1e-30 to 1e.30"),
        ({"architectures": ["x" * 1000]}, "'xxx.* is not supported"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [], "long_factor": []}}, "each of 8 pairs"),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "=1 must be at least 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_config_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 350


def test_rope_parameters_of_gemma_must_be_an_object() -> None:
    with pytest.raises(ValueError, match="rope_parameters=.* must be an object"):
        parse("Gemma3", head_dim=16, query_pre_attn_scalar=16, sliding_window=8, rope_parameters="x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"]}, "a list of 4 entries"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
    ],
    ids=["short", "unknown", "no-window", "negative", "zero"],
)
def test_invalid_windows_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse("Qwen2", **changes)


def test_dtype() -> None:
    assert parse(dtype="bfloat16").dtype == "bfloat16"
    assert parse(torch_dtype="torch.float16").dtype == "float16"


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_match_transformers(variant: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = checkpoint(tmp_path, variant)
    family, config = read_config(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        count = sum(file.get_tensor(name).numel() for name in stored)
    assert family.stored_shapes(config) == stored
    assert num_parameters(config) == count


def test_derived_numbers() -> None:
    config = parse(num_key_value_heads=2)
    assert config.kv_bytes_per_token(torch.bfloat16) == 4 * 2 * 2 * 16 * 2
    assert config.kv_bytes_per_token(torch.float32) == 4 * 2 * 2 * 16 * 4
    tied = parse(tie_word_embeddings=True)
    assert num_parameters(parse()) - num_parameters(tied) == 100 * 64


def test_from_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"needs a config\.json"):
        read_config(tmp_path)
    path.write_text(json.dumps(LLAMA))
    assert read_config(tmp_path)[1] == parse()
    for content, words in [
        ("{", "config.json is not valid JSON"),
        ("[]", "must be a JSON object, not a list"),
        ("{}", f"{path}: architectures=None is not"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
    for broken in (b"\xff\xfe{", b"[" * 100_000):
        path.write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"config\.json is not valid (JSON|UTF-8).*; download it again\.$"
        ):
            read_config(tmp_path)
