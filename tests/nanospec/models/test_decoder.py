"""The decoder matches the logits of transformers for all families, however tokens are split into steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.drafters.hidden_states import lm_head_rows
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.launch import forced
from nanospec.kernels.layer.residual import rms_norm
from nanospec.models.cpu import CompiledModel
from nanospec.models.decoder import new_states
from nanospec.models.weights import load_model
from tests.tiny import (
    VARIANTS,
    ModelRunner,
    checkpoint,
    num_parameters,
    reference,
    reference_logits,
    tiny_model,
)
from tests.util import assert_close, error_ratio


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_in_any_chunks(variant: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant)
    model, generator = load_model(folder, torch.float32, "cpu"), torch.Generator().manual_seed(3)
    texts = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in (100, 37)]
    expected = [reference_logits(folder, text) for text in texts]
    for sizes in (100,), (1, 31, 7, 17, 3, 41):
        runner = ModelRunner(model, 2, 112)
        for size in sizes:
            starts = tuple(runner.length)
            parts = {row: texts[row][starts[row] :][: size + 4 * row] for row in (1, 0)}  # in any order
            chunks = {row: part for row, part in parts.items() if len(part)}
            for row, logits in runner.step(chunks).items():
                wanted = expected[row][starts[row] : runner.length[row]]
                assert assert_close(logits, wanted, 1e-5, f"row {row} from {starts[row]}") < 1e-4
        assert tuple(runner.length) == (100, 37)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["naive", "native", "triton"])
def test_kept_states_match_transformers(backend: Any, tmp_path: Path) -> None:
    """Keep the states after each number of layers, in a forward pass and when a prompt is only written."""
    dtype = torch.bfloat16 if backend == "native" else torch.float32
    folder, ids = checkpoint(tmp_path, "gemma2-caps", dtype), tokens(37)
    expected = reference(folder, ids, output_hidden_states=True).hidden_states
    with forced(backend):
        model = load_model(folder, dtype, "cpu")
        assert isinstance(model, CompiledModel) == (backend == "native")
        runner, last = ModelRunner(model, 1, 48), model.config.num_layers
        runner.table.tokens[0, :37] = ids
        batch = Batch.from_chunks(runner.table, [Chunk(0, 0, 37)])
        for layers, run in (
            ([0, last, 2, 1, *[1] * 90], model.forward),
            ([2, 0], model.write_kv),
            ([last], model.write_kv),
        ):
            kept, states = new_states(model, 37, layers)
            run(batch, runner.cache, states)
            for n, state in zip(layers, kept.unflatten(1, (-1, model.config.hidden_size)).unbind(1)):
                wanted = expected[n][0]
                if n == last:  # transformers normalizes it
                    state = rms_norm(state.contiguous(), model.norm)
                assert_close(state, wanted, 1e-5 if dtype == torch.float32 else 0.02, f"{n} layers, {run}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_tied_weights_count_once_unless_packed(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype, tie_word_embeddings=True)
    is_packed = model.lm_head.unpacked_weight is None
    packed = model.embedding.nbytes if is_packed else 0
    assert model.lm_head.nbytes == model.embedding.nbytes
    assert model.weight_bytes == num_parameters(model.config) * dtype.itemsize + packed
    assert is_packed == (dtype == torch.float32)


@pytest.mark.slow
def test_smollm2_matches_transformers(smollm2: Path) -> None:
    ids = torch.randint(49152, (60,), generator=torch.Generator().manual_seed(7))
    expected = reference_logits(smollm2, ids, torch.float32)
    runner = ModelRunner(load_model(smollm2, torch.float32, "cpu"), 1, 64)
    logits = torch.cat([runner.step({0: chunk})[0] for chunk in ids.split([50, 1, 1, 5, 3])])
    largest = assert_close(logits, expected, 3e-6, "SmolLM2")
    assert largest < 5e-4  # logits reach 33; transformers itself is 1e-4 from float64
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


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
