"""Features of single model families; `test_decoder.py` tests what they have in common."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.drafters.medusa import lm_head_rows
from nanospec.models.weights import load_model
from tests.tiny import ModelRunner, checkpoint, reference_logits, tiny_model
from tests.util import assert_close, error_ratio


def tokens(count: int) -> Tensor:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(0))


def logits_of(folder: Path, ids: Tensor, max_len: int | None = None) -> Tensor:
    model = load_model(folder, torch.float32, "cpu", max_len)
    return ModelRunner(model, 1, 64).step({0: ids})[0]


def test_embedding_scale_is_rounded_to_bfloat16() -> None:
    config: dict[str, Any] = {"embedding_scale": 2304**0.5 + 0.1, "tie_word_embeddings": True}
    assert tiny_model(dtype=torch.bfloat16, **config).embedding_scale == 48.0
    model = tiny_model(**config, logit_softcap=1.0)
    assert torch.equal(lm_head_rows(model, torch.arange(5)), model.embedding[:5])


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
