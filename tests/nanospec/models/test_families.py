"""Features of each model family: logits of transformers in bfloat16, bitwise identity, stored names.

`test_decoder.py` tests every entry of `VARIANTS` in float32 with prompts, chunks and drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.drafters.medusa import lm_head_rows
from nanospec.kernels.launch import forced
from nanospec.kernels.native import library
from nanospec.models.config import ModelConfig
from nanospec.models.cpu import CompiledModel
from nanospec.models.families import FAMILIES, Family, Raw, build_config
from nanospec.models.weights import load_model
from tests.drive import Job, make_engine, outcome, run
from tests.tiny import ModelRunner, checkpoint, reference_logits, tiny_model
from tests.util import assert_close, error_ratio

BF16 = torch.bfloat16
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads wide enough for C++
NEW: dict[str, dict[str, Any]] = {
    "phi3-window11": WIDE, "phi3-partly-rotated": WIDE, "gemma2-caps": {}, "gemma3": {},
}  # fmt: skip


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(seed))


def logits_of(folder: Path, ids: Tensor, max_len: int | None = None) -> Tensor:
    model = load_model(folder, torch.float32, "cpu", max_len)
    return ModelRunner(model, 1, 64).step({0: ids})[0]


@pytest.mark.parametrize("backend", ["native", "naive"])
@pytest.mark.parametrize("variant", NEW)
def test_bfloat16(variant: str, backend: Any, tmp_path: Path) -> None:
    """It is as accurate as in transformers, and speculation leaves the results bitwise unchanged."""
    if backend == "native" and library() is None:
        pytest.skip("there is no C++ compiler")
    folder, ids, results = checkpoint(tmp_path, variant, BF16, **NEW[variant]), tokens(90), []
    params = [SamplingParams(temperature=t, seed=3, max_tokens=30, logprobs=2) for t in (0, 0.7, 1.2)]
    jobs = [Job([*range(5, 25), i] * 2, p) for i, p in enumerate(params)]
    with forced(backend):
        model = load_model(folder, BF16, "cpu")
        assert isinstance(model, CompiledModel) == (backend == "native")
        runner = ModelRunner(model, 1, 112)
        ours = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([50, 1, 5, 34])])
        for k in (None, 4):
            engine = make_engine(model, k, max_num_batched_tokens=32)
            results.append([outcome(request) for request in run(engine, jobs)])
    exact, theirs = reference_logits(folder, ids), reference_logits(folder, ids, BF16)
    assert error_ratio(ours, exact) < 1.3 * error_ratio(theirs, exact)
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


def test_longrope_factors_follow_max_model_len(tmp_path: Path) -> None:
    """If the context length exceeds the 32 tokens of pretraining, all texts use the long factors."""
    folder = checkpoint(tmp_path, "phi3-longrope")
    long, short = (logits_of(folder, tokens(n), n) for n in (64, 32))
    assert_close(long, reference_logits(folder, tokens(64)), 1e-5)
    assert_close(short, reference_logits(folder, tokens(32)), 1e-5)
    assert error_ratio(long[:32], short) > 0.01
    assert load_model(folder, torch.float32, "cpu", 32).config.max_position_embeddings == 32


def test_gemma_3_multimodal_checkpoint_loads_as_text_model(tmp_path: Path) -> None:
    import transformers

    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision = {**small, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    plain, images = checkpoint(tmp_path / "plain", "gemma3"), tmp_path / "images"
    text = json.loads((plain / "config.json").read_text())
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(images)
    own = {f"language_model.{n}": t for n, t in load_file(plain / "model.safetensors").items()}
    save_file(load_file(images / "model.safetensors") | own, images / "model.safetensors")
    assert torch.equal(logits_of(images, tokens(30)), logits_of(plain, tokens(30)))


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


def test_new_family_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(Family):
        def config(self, raw: Raw) -> ModelConfig:
            return build_config(raw, qkv_bias=True)

        def stored_name(self, name: str) -> str:
            return name.replace("model.", "toy.")

    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", Toy)
    folder = checkpoint(tmp_path, "qwen2-tied")
    expected = logits_of(folder, tokens(20))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["ToyForCausalLM"]}))
    stored = load_file(folder / "model.safetensors")
    save_file({n.replace("model.", "toy."): t for n, t in stored.items()}, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, tokens(20)), expected)
