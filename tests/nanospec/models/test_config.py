"""Every supported config.json becomes a `ModelConfig`; others are rejected with a one-line message."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanospec.models.config import ModelConfig, Rope, cos_sin_table
from nanospec.models.families import config_of, read_config
from tests.tiny import num_parameters

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# Released files.
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "hidden_size": 2304,
    "final_logit_softcapping": 30.0, "intermediate_size": 9216, "max_position_embeddings": 8192,
    "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {  # most fields are left to their defaults
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "vocab_size": 32064,
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "su"},
}  # fmt: skip
PHI4_MINI = {**PHI3, "partial_rotary_factor": 0.75, "num_attention_heads": 24, "num_key_value_heads": 8}
RELEASED = {"Gemma2": GEMMA2_2B, "Gemma3WithImages": GEMMA3_4B, "Phi3": PHI3, "Phi4Mini": PHI4_MINI}


def parse(family: str = "Llama", **changes: Any) -> ModelConfig:
    base = RELEASED.get(family, {**LLAMA, "architectures": [f"{family}ForCausalLM"]})
    return config_of({**base, **changes})


def test_llama_with_defaults() -> None:
    expected = ModelConfig(100, 64, 96, 4, 4, 4, 16, 128, (None,) * 4, 1e-5, Rope("default", 10000.0))
    assert parse() == expected
    grouped = parse(num_key_value_heads=2)
    assert grouped.kv_bytes_per_token(torch.bfloat16) == 4 * 2 * 2 * 16 * 2


SLIDING = {"use_sliding_window": True, "sliding_window": 8}
KINDS = ["full_attention", "sliding_attention"] * 2
NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
PARSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (  # the inner theta takes precedence
        "Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 3.0},
        {"rope": Rope("llama3", 5e5, 32.0, 1.0, 4.0, 8192)},
    ),
    ("Qwen2", {**SLIDING, "max_window_layers": 1}, {"windows": (None, 8, 8, 8)}),
    ("Qwen3", {**SLIDING, "max_window_layers": 0, "layer_types": KINDS}, {"windows": (None, 8, None, 8)}),
    ("Mistral", {"attention_bias": True}, NO_BIAS),
    ("Qwen3", {"attention_bias": True}, {**NO_BIAS, "qkv_bias": True, "o_bias": True, "qk_norm": True}),
    ("Llama", {"head_dim": None, "torch_dtype": "torch.float16"}, {"head_dim": 16, "dtype": "float16"}),
    (
        "Gemma2", {},
        {
            "windows": (4096, None) * 13, "tie_word_embeddings": True, "attention_softcap": 50,
            "logit_softcap": 30, "attention_scale": 256**-0.5, "dtype": "bfloat16", "qkv_bias": False,
            "embedding_scale": 48.0,
        },
    ),
    (
        "Gemma3WithImages", {},
        {
            "windows": ((1024,) * 5 + (None,)) * 5 + (1024,) * 4, "rope": Rope("linear", 1e6, 8.0),
            "local_rope": Rope(theta=1e4), "attention_softcap": None, "logit_softcap": None,
            "dtype": "bfloat16", "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        },
    ),
    ("Phi3", {}, {"windows": (None,) * 32}),  # the window exceeds the context length
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "expected"), PARSED, ids=lambda value: str(value)[:60])
def test_fields_of_families(family: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse(family, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


def test_numbers_of_released_models() -> None:
    counts = {"Gemma2": 2_614_341_888, "Gemma3WithImages": 3_880_263_168, "Phi3": 3_821_079_552}
    assert {family: num_parameters(parse(family)) for family in counts} == counts
    rope = parse("Phi3").rope
    assert (rope.kind, rope.original_max_len, rope.long_factors[0]) == ("longrope", 4096, 1.5)
    assert abs(rope.amplitude - 1.1902380714) < 1e-9
    assert parse("Phi4Mini").rope.rotated(128) == 96


INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not .*Qwen3ForCausalLM"),
    ("Llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
    ("Llama", {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of .*=3"),
    ("Llama", {"head_dim": 15}, "head_dim=15 must be even"),
    ("Phi4Mini", {"head_dim": 15, "partial_rotary_factor": 0.4}, "head_dim=15 must be even"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu'"),
    ("Llama", {"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' must be one of float32"),
    ("Llama", {"rope_scaling": {"type": "yarn", "factor": 2}}, "RoPE type 'yarn' is not supported"),
    ("Llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor=1.0 must be below"),
    ("Llama", {"rope_parameters": {"full_attention": {}}}, "use one for all"),
    ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for"),
    ("Llama", {"rope_scaling": {**LONGROPE, "short_factor": []}}, "each of 8 pairs"),
    ("Qwen2", {"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
    ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
    ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; only 'gelu_"),
    ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("Phi4Mini", {"partial_rotary_factor": 0.715}, "RoPE rotates, 91"),
]


@pytest.mark.parametrize(("family", "changes", "words"), INVALID, ids=lambda value: str(value)[:60])
def test_invalid_config_is_rejected(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}[^\n]{{,300}}\.$"):
        parse(family, **changes)


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs a config\.json"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    for content, words in (
        (b"[" * 100_000, "config.json has invalid content .RecursionError.*; it may be corrupt, download it"),
        (b"\xff\xfe{", "config.json has invalid content .UnicodeDecodeError.*; it may be corrupt"),
        (b"[]", "config.json: the content must be a JSON object, not a list"),
        (b"{}", f"{path}: architectures=None is not"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)


def test_cos_sin_table_is_exact_without_vectorized_functions() -> None:
    """`Tensor.cos` on a CPU is less exact in some processes, which a test in one process cannot detect."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func.overloadpacket not in (torch.ops.aten.cos, torch.ops.aten.sin)
            return func(*args, **(kwargs or {}))

    with Calls():
        table = cos_sin_table(Rope(), 4, 512, "cpu")
    angles = [(p, p * Rope().theta ** -0.5) for p in range(512)]
    exact = [[*map(math.cos, pair), *map(math.sin, pair)] for pair in angles]
    assert torch.equal(table, torch.tensor(exact, dtype=torch.float64).float())
