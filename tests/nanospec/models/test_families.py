"""Features of each model family: released configs, logits of transformers, bitwise identity on a CPU.

`test_decoder.py` tests every entry of `VARIANTS` in float32 with prompts, chunks and drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.drafters.medusa import lm_head_rows
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.native import library
from nanospec.models.config import ModelConfig
from nanospec.models.cpu import CompiledModel
from nanospec.models.decoder import Model
from nanospec.models.families import FAMILIES, Family, Raw, build_config, config_of, family_of
from nanospec.models.weights import load_model
from tests.drive import Job, make_engine, outcome, run
from tests.tiny import ModelRunner, checkpoint, num_parameters, reference_logits, tiny_model
from tests.util import assert_close, error_ratio

BF16 = torch.bfloat16
NEW: dict[str, dict[str, Any]] = {  # variants, with changes that make their heads wide enough for C++
    "phi3-window11": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "phi3-partly-rotated": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma2-caps": {},
    "gemma3": {},
}


@pytest.fixture(scope="module", params=list(NEW))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param, BF16, **NEW[request.param])


@pytest.fixture(params=["native", "naive"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "native" and library() is None:
        pytest.skip("there is no C++ compiler")
    with forced(request.param):
        yield request.param


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(seed))


def test_bfloat16_accuracy_matches_transformers(folder: Path, backend: Backend) -> None:
    model, ids = load_model(folder, BF16, "cpu"), tokens(90)
    assert isinstance(model, CompiledModel) == (backend == "native")
    exact, theirs = reference_logits(folder, ids), reference_logits(folder, ids, BF16)
    runner = ModelRunner(model, 1, 112)
    ours = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([50, 1, 5, 34])])
    assert error_ratio(ours, exact) < 1.3 * error_ratio(theirs, exact)


def test_speculation_is_bitwise_identical(folder: Path, backend: Backend) -> None:
    """In bfloat16 on a CPU, with both implementations."""
    model = load_model(folder, BF16, "cpu")
    params = [SamplingParams(temperature=t, seed=3, max_tokens=40, logprobs=2) for t in (0, 0, 0.7, 1.2)]
    jobs = [Job([*range(5, 25), i] * 2, p) for i, p in enumerate(params)]
    results = []
    for k in (None, 4):
        engine = make_engine(model, k, max_num_batched_tokens=32)
        results.append([outcome(request) for request in run(engine, jobs)])
    assert engine.metrics.spec.num_accepted > 0
    assert results[0] == results[1]


def test_embedding_scale_is_rounded_to_bfloat16() -> None:
    config: dict[str, Any] = {"embedding_scale": 2304**0.5 + 0.1, "tie_word_embeddings": True}
    assert tiny_model(dtype=BF16, **config).embedding_scale == 48.0
    model = tiny_model(**config, logit_softcap=1.0)
    assert torch.equal(lm_head_rows(model, torch.arange(5)), model.embedding[:5])
    untied = tiny_model(logit_softcap=1.0)
    with forced("triton"):  # not packed
        plain = tiny_model()
    assert torch.equal(lm_head_rows(untied, torch.arange(64)), cast(Tensor, plain.lm_head.unpacked_weight))


@pytest.mark.parametrize("longest", [64, 32])
def test_longrope_factors_follow_max_model_len(tmp_path: Path, longest: int) -> None:
    """If the context length exceeds the 32 tokens of pretraining, all texts use the long factors."""
    folder = checkpoint(tmp_path, "phi3-longrope")
    model, ids = load_model(folder, torch.float32, "cpu", longest), tokens(longest)
    assert model.config.max_position_embeddings == longest
    logits = ModelRunner(model, 1, longest).step({0: ids})[0]
    assert_close(logits, reference_logits(folder, ids), 1e-5)
    if longest == 64:
        short = reference_logits(folder, ids[:20])
        assert error_ratio(logits[:20], short) > 0.01


def test_gemma_3_multimodal_checkpoint_loads_as_text_model(tmp_path: Path) -> None:
    import transformers

    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision = {**small, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    plain = checkpoint(tmp_path / "plain", "gemma3")
    text = json.loads((plain / "config.json").read_text())
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "images")
    stored = load_file(tmp_path / "images" / "model.safetensors")
    own = load_file(plain / "model.safetensors")
    stored |= {f"language_model.{name}": tensor for name, tensor in own.items()}
    save_file(stored, tmp_path / "images" / "model.safetensors")
    models = [load_model(folder, torch.float32, "cpu") for folder in (plain, tmp_path / "images")]
    logits = [ModelRunner(model, 1, 64).step({0: tokens(30)})[0] for model in models]
    assert torch.equal(*logits)


# ---- errors give the checkpoint's names ------------------------------------------------------------


QKV = "model.layers.1.self_attn.qkv_proj.weight"
NORM = "model.layers.1.pre_feedforward_layernorm.weight"


def test_errors_use_checkpoint_tensor_names(tmp_path: Path) -> None:
    for variant, name, shape, words in (
        ("phi3-window11", QKV, None, f"missing: {QKV}."),
        ("phi3-window11", QKV, (100, 64), f"of the wrong shape: {QKV} [100, 64] instead of [128, 64]."),
        ("gemma2-caps", NORM, None, f"missing: {NORM}."),
    ):
        folder = checkpoint(tmp_path / variant, variant)
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        if shape is not None:
            tensors[name] = torch.zeros(shape)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match="do not fit its config") as caught:
            load_model(folder, torch.float32, "cpu")
        assert str(caught.value).endswith(f"1 tensor(s) {words}")


# ---- released files --------------------------------------------------------------------------------

GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "hidden_size": 2304,
    "final_logit_softcapping": 30.0, "intermediate_size": 9216, "max_position_embeddings": 8192,
    "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
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


def test_gemma_2_released_config() -> None:
    config = config_of(GEMMA2_2B)
    assert config.windows[:3] == (4096, None, 4096)
    assert config.tie_word_embeddings
    assert (config.attention_softcap, config.logit_softcap) == (50, 30)
    assert config.attention_scale == 256**-0.5
    assert num_parameters(config) == 2_614_341_888


def test_gemma_3_released_config() -> None:
    """Most fields are left to their defaults."""
    config = config_of(GEMMA3_4B)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("linear", 1e6, 8)
    assert config.local_rope is not None
    assert config.local_rope.theta == 1e4
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert num_parameters(config) == 3_880_263_168
    assert config.dtype == "bfloat16"


def test_phi_3_released_config() -> None:
    config = config_of(PHI3)
    assert config.windows == (None,) * 32  # the window exceeds the context length
    assert config.rope.kind == "longrope"
    assert abs(config.rope.amplitude - 1.1902380714) < 1e-9
    assert num_parameters(config) == 3_821_079_552
    mini = {**PHI3, "partial_rotary_factor": 0.75, "num_attention_heads": 24, "num_key_value_heads": 8}
    with pytest.raises(ValueError, match=r"a short and a long factor for each of 48 pairs"):
        config_of({**mini, "rope_scaling": {**PHI3["rope_scaling"], "short_factor": [1.0]}})
    config = config_of(mini)
    assert (config.head_dim, config.rope.rotated(128)) == (128, 96)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (GEMMA2_2B, {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; only 'gelu_"),
        (GEMMA2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA2_2B, {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1 must be a number from"),
        (GEMMA3_4B, {"text_config": None}, "'text_config' is missing"),
        (PHI3, {"partial_rotary_factor": 2}, "partial_rotary_factor=2.0 is not supported"),
        (PHI3, {"rope_scaling": {"type": "longrope"}}, "'short_factor' of longrope must be a list"),
    ],
    ids=["activation", "bidirectional", "cap", "text", "part", "factors"],
)
def test_invalid_config_is_rejected(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        config_of({**raw, **changes})
    assert str(caught.value).endswith(".")


# ---- a new family is one class -----------------------------------------------------------------------


def test_new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(Family):
        def config(self, raw: Raw) -> ModelConfig:
            return build_config(raw, qkv_bias=True)

        def stored_name(self, name: str) -> str:
            return name.replace("model.", "toy.")

    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", Toy)
    folder = checkpoint(tmp_path, "qwen2-tied")
    expected = ModelRunner(load_model(folder, torch.float32, "cpu"), 1, 32).step({0: tokens(20)})[0]
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["ToyForCausalLM"]}))
    stored = load_file(folder / "model.safetensors")
    save_file({n.replace("model.", "toy."): t for n, t in stored.items()}, folder / "model.safetensors")
    model = load_model(folder, torch.float32, "cpu")
    assert torch.equal(ModelRunner(model, 1, 32).step({0: tokens(20)})[0], expected)
    assert isinstance(family_of({"architectures": ["ToyForCausalLM"]}), Toy)
    assert isinstance(model, Model)
