"""Load the weights of a drafter that reads hidden states of the target, DFlash or EAGLE-3.

Two layouts of a folder with config.json and *.safetensors are supported: that of the methods' authors
(z-lab/dflash and SafeAILab/EAGLE), and that of vllm-project/speculators. With the hidden size H, n layers of
the target that are read, and Vd tokens that can be drafted, a folder has these tensors:

    fc.weight            [H, n * H]    projects the concatenated hidden states
    hidden_norm.weight   [H]           DFlash: norm of the projection; in EAGLE-3, `hidden_norm` of the layer
    layers.{i}. ...                    decoder layers; authors of EAGLE-3 name the only one `midlayer`
    norm.weight          [H]           final norm
    lm_head.weight       [Vd, H]       optional: without it, the target's
    d2t                  [Vd] ints     optional: id of drafted token i minus i; without it, Vd = V
    embed_tokens.weight  [V, H]        optional: the target's
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.batch import MAX_QUERIES
from ..kernels.layer.linear import Linear, make_linear
from ..kernels.layer.quantized import GROUP, Quantized, quantize
from ..models.config import ModelConfig
from ..models.cpu import CompiledModel, model_class
from ..models.decoder import Model
from ..models.families import Raw, build_config, get_value
from ..models.formats.safetensors import check_fit, listed, open_safetensors, weight_files
from ..text.files import read_json
from ..text.validation import check_number, shown

PIECE = 64  # columns of a packed lm_head that are computed at a time
INTEGERS = ("I32", "I64")
# Tensors that are ignored: only training needs them, or the target's embedding is used.
UNUSED = ("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")

# Keys of config.json by their use: settings of a drafter, the layers to read, settings of the decoder layers,
# and keys without effect. Others are refused unless their value is null or false.
SETTINGS = {"block_size", "mask_token_id", "norm_before_residual"}
LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # numbers of layers
TARGET_LAYER_IDS = "target_layer_ids"  # indices of layers; their outputs are read
DECODER = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "attention_bias",
    "mlp_bias", "hidden_act", "layer_types", "dtype", "torch_dtype",
}  # fmt: skip
NO_EFFECT = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "draft_vocab_size", "eos_token_id",
    "has_no_defaults_at_init", "initializer_range", "max_window_layers", "model_type", "num_target_layers",
    "pad_token_id", "pretraining_tp", "sliding_window", "sliding_window_non_causal", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings",
    "transformers_version", "use_cache",
}  # fmt: skip


class DraftCheckpoint(NamedTuple):
    """A loaded drafter."""

    model: Model  # its layers and final norm, with the target's embedding
    settings: Mapping[str, Any]  # of `SETTINGS`
    layers: tuple[int, ...]  # hidden states to read, as numbers of layers that have run
    fc: Linear
    hidden_norm: Tensor | None  # [H] for DFlash
    lm_head: Linear  # [Vd, H]
    token_map: Tensor | None  # [Vd] int64, the id of each drafted token; None: its index
    weight_bytes: int


def load_checkpoint(folder: Path, target: Model, method: str) -> DraftCheckpoint:
    """Load the drafter in a folder for the target. `method` is "dflash" or "eagle3". Raises FileNotFoundError
    if a file is missing, ValueError if one is corrupt, not supported, or made for another target."""
    path = folder / "config.json"
    raw = read_json(path)
    files = [open_safetensors(file) for file in weight_files(folder)]
    names = [(_own_name(name), file, name) for file in files for name in file.keys()]  # noqa: SIM118
    stored = {own: (file, name) for own, file, name in names}
    if len(stored) < len(names):
        raise ValueError(f"The drafter in {folder} has several tensors with one meaning, such as midlayer.")
    try:
        decoder, settings, ids = _read_settings(raw, method)
        config, layers = _read_config(decoder, settings, ids, stored, target.config, method == "eagle3")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    num_drafted = _check_tensors(folder, config, stored, len(layers))

    def read(name: str) -> Tensor:
        file, stored_name = stored[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def plain(name: str) -> Tensor:
        return read(name.removeprefix("model.")).to(target.device, target.dtype, copy=True)

    def in_8_bits(weight: Tensor) -> Tensor | Quantized:
        """Quantize a matrix for a target in C++: a pass takes as long as reading its weights."""
        fits = isinstance(target, CompiledModel) and weight.dim() == 2 and weight.shape[1] % GROUP == 0
        return quantize(weight, 8) if fits else weight

    # A drafter shares its target's embedding, so it runs in C++ only if the target does.
    kind = model_class(config, target.dtype, target.device) if isinstance(target, CompiledModel) else Model
    model = kind(config, target.dtype, target.device, lambda n: in_8_bits(plain(n)), vocabulary=target)
    token_map = None
    if "d2t" in stored:
        token_map = (read("d2t").long() + torch.arange(num_drafted)).to(target.device)
        valid = token_map[(token_map >= 0) & (token_map < config.vocab_size)].unique()
        if not 0 < len(valid) == num_drafted:
            raise ValueError(f"d2t in {folder} must give distinct ids from 0 to {config.vocab_size - 1}.")
    hidden_norm = None if config.has_inputs else plain("hidden_norm.weight")
    fc, lm_head = make_linear(plain("fc.weight")), target.lm_head  # not `fc`: its inputs have outliers
    if "lm_head.weight" in stored:
        lm_head = make_linear(in_8_bits(plain("lm_head.weight")))
    elif token_map is not None:
        lm_head = make_linear(in_8_bits(lm_head_rows(target, token_map)))
    size = model.weight_bytes + fc.nbytes + (0 if lm_head is target.lm_head else lm_head.nbytes)
    return DraftCheckpoint(model, settings, layers, fc, hidden_norm, lm_head, token_map, size)


def _read_config(
    decoder: Raw, settings: Raw, ids: Any, stored: Collection[str], target: ModelConfig, is_eagle: bool
) -> tuple[ModelConfig, tuple[int, ...]]:
    """Return the config of the drafter's layers and the hidden states to read."""
    bias = get_value(decoder, "attention_bias", bool, False)
    config = build_config(
        decoder,
        qk_norm=not is_eagle or "layers.0.self_attn.q_norm.weight" in stored,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=get_value(decoder, "mlp_bias", bool, False),
        has_inputs=is_eagle,
        norm_before_residual=get_value(settings, "norm_before_residual", bool, False),
        max_position_embeddings=target.max_position_embeddings,
    )
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the drafter is for a model with hidden size {config.hidden_size} and {config.vocab_size} "
            f"tokens, but the target has {target.hidden_size} and {target.vocab_size}."
        )
    if is_eagle:
        if config.num_layers != 1:
            raise ValueError(f"num_hidden_layers={config.num_layers} must be 1 for EAGLE-3.")
        n = target.num_layers
        ids = [2, n // 2, n - 3] if ids is None else ids
    else:
        check_number("mask_token_id", settings.get("mask_token_id"), 0, config.vocab_size - 1)
        check_number("block_size", settings.get("block_size"), 2, MAX_QUERIES - 1)
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"the layers to read are {shown(ids)}; they must be a list of ids.")
    return config, tuple(check_number("layer to read", n, 0, target.num_layers) for n in ids)


def _read_settings(raw: Raw, method: str) -> tuple[Raw, dict[str, Any], Any]:
    """Return the keys of the decoder, the settings, and the hidden states to read. Raises ValueError for keys
    that are not supported."""
    nested = "transformer_layer_config", "dflash_config"
    decoder, own = raw.get(nested[0], raw), raw.get(nested[1], {})
    for name, part in zip(nested, (decoder, own), strict=True):
        if not isinstance(part, dict):
            raise ValueError(f"{name}={shown(part)} must be an object.")
    architectures = shown(raw.get("speculators_model_type") or raw.get("architectures"))
    unnamed = "eagle3" if raw.get("draft_vocab_size") else None  # some are named LlamaForCausalLM
    if method != next((m for m in ("dflash", "eagle3") if m in architectures.lower()), unnamed):
        problem = f"architectures={architectures} is not a drafter for method={method!r}"
        raise ValueError(f"{problem}; set draft_model to one.")
    merged = {key: value for key, value in {**decoder, **raw, **own}.items() if key not in nested}
    known = {*DECODER, *SETTINGS, *LAYER_IDS, TARGET_LAYER_IDS, *NO_EFFECT}
    given = {key for key, value in merged.items() if value not in (None, False) and not key.startswith("_")}
    if unknown := given - known:
        raise ValueError(f"unknown keys: {listed(unknown)}; they may change the drafter's results.")
    kinds = merged.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types={shown(merged['layer_types'])} must all be 'full_attention'.")
    ids = next((merged[key] for key in LAYER_IDS if merged.get(key) is not None), None)
    if ids is None and isinstance(ids := merged.get(TARGET_LAYER_IDS), list):
        ids = [each + 1 if type(each) is int else each for each in ids]
    return decoder, {key: merged[key] for key in SETTINGS if key in merged}, ids


def _own_name(stored: str) -> str:
    """Return the name of a tensor in the module docstring."""
    return stored.removeprefix("model.").replace("midlayer.", "layers.0.")


def _check_tensors(folder: Path, config: ModelConfig, stored: Mapping[str, Any], reads: int) -> int:
    """Raise ValueError unless the tensors fit the config. Return the number of drafted tokens."""
    H, V = config.hidden_size, config.vocab_size
    slices = {name: file.get_slice(stored_name) for name, (file, stored_name) in stored.items()}
    shapes = replace(config, tie_word_embeddings=True).parameter_shapes()
    expected = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    expected["fc.weight"] = (H, reads * H)
    if not config.has_inputs:
        expected["hidden_norm.weight"] = (H,)
    num_drafted = (slices["d2t"].get_shape() or [V])[0] if "d2t" in slices else V
    if "d2t" in slices:
        expected["d2t"] = (num_drafted,)
    expected |= {"lm_head.weight": (num_drafted, H), "t2d": (V,), "verifier_norm.weight": (H,)}
    expected["verifier_lm_head.weight"] = (num_drafted, H)
    dtypes = {"d2t": INTEGERS, "t2d": (*INTEGERS, "BOOL", "U8")}
    problem = f"The weights of the drafter in {folder} do not fit its config.json"
    check_fit(slices, expected, problem, ["lm_head.weight", *UNUSED], dtypes)
    return int(num_drafted)


def lm_head_rows(model: Model, tokens: Tensor) -> Tensor:
    """Return the target's lm_head rows for the tokens [n] int64, as a plain tensor [n, H]. A packed lm_head
    has no readable rows, but its product with unit vectors gives its columns."""
    table = model.embedding if model.config.tie_word_embeddings else model.lm_head.unpacked_weight
    if isinstance(table, Tensor):
        return table[tokens]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    return torch.cat([model.lm_head(piece)[:, tokens] for piece in units.split(PIECE)]).T.contiguous()
