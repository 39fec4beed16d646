"""Drafters load from the layouts of their authors and of speculators; others are refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import SpecConfig
from nanospec.drafters import Target
from nanospec.drafters.methods import METHODS
from nanospec.models.decoder import Model
from tests.random_weights import write_drafter
from tests.tiny import tiny_model

VOCAB, H = 40, 32
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny_model(vocab_size=VOCAB, num_layers=8, dtype=torch.float16)  # float16 weights are not packed


def rewrite(folder: Path, config: dict[str, Any], change: Callable[[Tensors], object] = len) -> None:
    """Update config.json by `config`, where None removes a key, and apply `change` to the tensors."""
    merged = json.loads((folder / "config.json").read_text()) | config
    kept = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def as_speculators(folder: Path, method: str) -> None:
    """Convert a folder to the layout of speculators, as its version 0.9 saves it."""
    given = json.loads((folder / "config.json").read_text())
    tensors, nested = load_file(folder / "model.safetensors"), given.pop("dflash_config", {})
    theta = {"rope_theta": given.pop("rope_theta"), "rope_type": "default"}
    layer = {key: given.pop(key) for key in [*given] if key.startswith(("hidden", "num_", "head_", "inter"))}
    layer |= {key: given.pop(key) for key in ("vocab_size", "rms_norm_eps", "max_position_embeddings")}
    layer |= {"model_type": "qwen3" if nested else "llama", "rope_parameters": theta, "mlp_bias": False}
    config = {
        **given, "architectures": ["DraftModel"], "speculators_model_type": method, "norm_output": False,
        "speculators_config": {"algorithm": method}, "target_hidden_size": None, "fc_norm": False,
        "transformer_layer_config": layer,
    }  # fmt: skip
    if nested:
        ids = [n + 1 for n in nested["target_layer_ids"]]
        config |= {"aux_hidden_state_layer_ids": ids, "mask_token_id": nested["mask_token_id"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors |= {"t2d": torch.ones(VOCAB, dtype=torch.bool), "embed_tokens.weight": torch.ones(VOCAB, H)}
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, target: Model, method: str) -> Any:
    return METHODS[method].load(SpecConfig(method, str(folder)), Target(target))


def weights_in(loaded: Any) -> list[Tensor]:
    linears = [loaded.fc, loaded.lm_head, *loaded.model.linears[:-1]]
    norms = [loaded.model.norm.weight, *(each.input_norm.weight for each in loaded.model.layers)]
    return [*(linear.unpacked_weight for linear in linears), *norms]


@pytest.mark.parametrize(("method", "num_layers"), [("dflash", 2), ("eagle3", 1)])
def test_both_layouts_give_the_same_drafter(
    method: str, num_layers: int, target: Model, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path, method, target.config, vocab=25, num_layers=num_layers, reads=(1, 8, 3))
    first, stored = load(folder, target, method), load_file(folder / "model.safetensors")
    as_speculators(folder, method)
    second = load(folder, target, method)
    assert first.model.config == second.model.config
    assert first.hidden_state_layers == second.hidden_state_layers == (1, 8, 3)
    if method == "dflash":
        assert [(each.mask, each.max_drafts) for each in (first, second)] == [(3, 5)] * 2
    assert all(map(torch.equal, weights_in(first), weights_in(second)))
    assert torch.equal(weights_in(first)[0], stored["fc.weight"].half())
    ids, lm_head = stored["d2t"] + torch.arange(25), target.lm_head.unpacked_weight
    assert lm_head is not None
    assert torch.equal(weights_in(first)[1], lm_head[ids])
    for loaded in (first, second):
        assert str(loaded.token_map) == str(ids)


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("vocab", [25, None])
def test_memory_counts_weights_and_cache(
    own_head: bool, vocab: int | None, target: Model, tmp_path: Path
) -> None:
    """Rows of the target's lm_head are copied if only some tokens can be drafted."""
    folder = write_drafter(tmp_path, "dflash", target.config, own_head=own_head, vocab=vocab, num_layers=3)
    memory = load(folder, target, "dflash").memory
    stored = load_file(folder / "model.safetensors")
    numbers = sum(
        tensor.numel() for name, tensor in stored.items() if name not in ("d2t", "hidden_norm.weight")
    )
    numbers += 25 * H * (vocab is not None and not own_head)
    assert memory == (2 * numbers, 2 * 2 * 3 * 2 * 16, None)


def test_eagle3_reads_three_layers_by_default(target: Model, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, "eagle3", target.config, reads=(0, 0, 0))
    rewrite(folder, {"eagle_aux_hidden_state_layer_ids": None})
    assert load(folder, target, "eagle3").hidden_state_layers == (2, 4, 5)


def put(**tensors: Tensor) -> Callable[[Tensors], object]:
    return lambda stored: stored.update({name.replace("__", "."): each for name, each in tensors.items()})


LAYERS = "eagle_aux_hidden_state_layer_ids"
ERRORS: dict[str, list[tuple[dict[str, Any], Callable[[Tensors], object], str]]] = {
    "eagle3": [
        ({"logit_scale": 2}, len, "unknown keys: logit_scale; they may change the drafter's results"),
        ({"norm_before_fc": True, "fc_norm": False}, len, "unknown keys: norm_before_fc; they may"),
        ({"hidden_act": "gelu"}, len, "hidden_act='gelu' is not supported"),
        ({"layer_types": ["sliding_attention"]}, len, "Layer type 'sliding_attention' is not supported"),
        ({"layer_types": 5}, len, "config.json has invalid content"),
        ({LAYERS: None, "target_layer_ids": [True, 1]}, len, "target_layer_ids=True must be an integer"),
        ({LAYERS: None, "target_layer_ids": [0, 8]}, len, "target_layer_ids=8 must be .* -1 to 7"),
        ({"architectures": ["DFlashDraftModel"]}, len, "is not a drafter for method='eagle3'"),
        ({"draft_vocab_size": None}, len, "architectures=.'LlamaForCausalLM'. is not a drafter"),
        ({"transformer_layer_config": 3}, len, "transformer_layer_config=3 must be an object"),
        ({"num_hidden_layers": 2}, len, "num_hidden_layers=2 must be 1 for EAGLE-3"),
        ({"norm_before_residual": "yes"}, len, "norm_before_residual='yes' must be true or false"),
        ({"vocab_size": 41}, len, "hidden size 32 and 41 tokens, but the target has 32 and 40"),
        ({"hidden_size": 64}, len, "hidden size 64 and 40 tokens, but the target has 32 and 40"),
        ({LAYERS: [0, 9]}, len, f"{LAYERS}=9 must be an integer from 0 to 8"),
        ({LAYERS: "all"}, len, f"{LAYERS}='all' must be a list of the layers to read"),
        ({LAYERS: []}, len, "must be a list"),
        ({LAYERS: [1, 2, 3]}, len, r"wrong shape: fc.weight \[32, 64\] instead of \[32, 96\]"),
        ({}, put(layers__0__norm__weight=torch.ones(H)), "unexpected: layers.0.norm.weight"),
        ({}, lambda stored: stored.pop("fc.weight"), "1 tensor.s. missing: fc.weight"),
        ({}, put(lm_head__weight=torch.ones(40, H)), r"lm_head.weight \[40, 32\] instead of \[25, 32\]"),
        ({}, put(d2t=torch.tensor([0, 40])), "d2t in .* must give distinct ids from 0 to 39"),
        ({}, put(d2t=torch.zeros(0).int()), "d2t in .* must give distinct ids from 0 to 39"),
        ({}, put(d2t=-torch.arange(25)), "must give distinct ids"),
        ({}, put(d2t=torch.full((25,), 16)), "must give distinct ids"),
        ({}, put(d2t=torch.full((25,), -1)), "must give distinct ids"),
    ],
    "dflash": [
        ({"architectures": ["Eagle3"]}, len, "is not a drafter for method='dflash'"),
        ({"dflash_config": []}, len, r"dflash_config=\[\] must be an object"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, len, "mask_token_id=None must be an integer"),
        ({"mask_token_id": 40, "dflash_config": None}, len, "mask_token_id=40 must be .* from 0 to 39"),
        ({"dflash_config": {"mask_token_id": 3}}, len, "target_layer_ids=None must be a list of the layers"),
        ({"block_size": None}, len, "block_size=None must be an integer from 2 to 63"),
        ({"block_size": 64}, len, "block_size=64 must be an integer from 2 to 63"),
        ({"sample_from_anchor": True}, len, "unknown keys: sample_from_anchor"),
        ({"num_hidden_layers": 2}, len, "missing: layers.1.input_layernorm.weight, .* and 3 more"),
        ({}, put(layers__1__norm__weight=torch.ones(H)), "unexpected: layers.1.norm.weight"),
        ({}, lambda stored: stored.pop("hidden_norm.weight"), "missing: hidden_norm.weight"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("method", ERRORS)
def test_unsupported_folders_are_refused(method: str, target: Model, tmp_path: Path) -> None:
    for number, (config, change, sentence) in enumerate(ERRORS[method]):
        folder = write_drafter(tmp_path / str(number), method, target.config, vocab=25)
        rewrite(folder, config, change)
        with pytest.raises(ValueError, match=sentence) as error:
            load(folder, target, method)
        assert str(folder) in str(error.value), sentence
    for missing in ("model.safetensors", "config.json"):
        (folder / missing).unlink()
        with pytest.raises(FileNotFoundError, match=str(folder)):
            load(folder, target, method)
