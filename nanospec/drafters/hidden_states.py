"""Base class of drafters that read the target's hidden states, DFlash and EAGLE-3.

The target's forward pass keeps the residual stream after the layers that the drafter names. `fc` projects
these hidden states to the features of a token, one vector, from which the drafter computes keys and values
for each position of the text (EAGLE-3 also uses the next token's embedding). They are stored in the drafter's
own KV cache, which has the blocks of the target's cache, whenever the target stores its own: for prompt
chunks, and in every step for the tokens that it commits. So when the drafter runs, the cache holds the K/V of
all positions before the last committed token, also after steps without drafts, preemption and prefix cache
hits. In C++, EAGLE-3 stores them only when a block is complete or the row drafts, so steps without drafts
cost less. Positions that follow may hold the K/V of drafts, which are overwritten.

Drafts of one position are ranked by the logits. For a request that samples, the `CONTENDERS` most likely
tokens are ranked with the noise that the target will use at that position, so drafter and target draw the
same token if their distributions agree.

Two layouts of a folder with config.json and *.safetensors are supported: that of the methods' authors
(z-lab/dflash and SafeAILab/EAGLE), and that of vllm-project/speculators. With the hidden size H, n layers of
the target that are read, and Vd tokens that can be drafted, a folder has these tensors:

    fc.weight            [H, n * H]    projects the concatenated hidden states
    hidden_norm.weight   [H]           norm of the projection; in EAGLE-3, it belongs to the layer
    layers.{i}. ...                    decoder layers; authors of EAGLE-3 name the only one `midlayer`
    norm.weight          [H]           final norm
    lm_head.weight       [Vd, H]       optional: without it, the target's
    d2t                  [Vd] ints     optional: id of drafted token i minus i; without it, Vd = V

The embedding is the target's.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels.launch import use_triton
from ..kernels.layer.linear import make_linear
from ..kernels.layer.quantized import GROUP, Quantized, quantize
from ..kernels.layer.residual import Norm
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.cpu import CompiledModel, model_class
from ..models.decoder import Model
from ..models.families import Family, Raw, layer_windows
from ..models.folders import default_drafter, resolve_model
from ..models.formats.safetensors import check_fit, listed, open_safetensors, weight_files
from ..models.warm_up import warm_up
from ..text.files import errors_of, read_json
from ..text.validation import check_number, shown
from . import Drafter, Memory, Target, draft_limits, make_proposal

CONTENDERS = 16  # most likely tokens of a position from which drafts are sampled
PIECE = 64  # columns of a packed lm_head that are computed at a time

# Tensors that are ignored: only training needs them, or the target's are used.
UNUSED = ("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
# Keys of config.json with the ids of the layers to read, and the number of layers that have run minus the id.
LAYER_IDS = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
# Other keys that are supported or do not change results.
KEYS = {
    "architectures", "attention_bias", "attention_dropout", "auto_map", "block_size", "bos_token_id",
    "draft_vocab_size", "dtype", "eos_token_id", "has_no_defaults_at_init", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "layer_types", "mask_token_id",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "model_type", "norm_before_residual",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers",
    "original_max_position_embeddings", "pad_token_id", "partial_rotary_factor", "pretraining_tp",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "sliding_window_non_causal", "speculators_config", "speculators_model_type", "speculators_version",
    "target_hidden_size", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size",
}  # fmt: skip


class HiddenStateDrafter(Drafter):
    """Base class of drafters whose KV cache is computed from the target's hidden states. Subclasses define
    `max_drafts`, `read_hidden_states` and the methods after `propose`."""

    runs_model = True

    def __init__(self, spec: SpecConfig, folder: Path, target: Model) -> None:
        """Load the drafter in a folder for the target. Raises FileNotFoundError if a file is missing,
        ValueError if one is corrupt, not supported, or made for another target."""
        tensors, raw, path = open_tensors(folder), read_json(folder / "config.json"), folder / "config.json"
        with errors_of(path):
            raw = merge_config(raw, self.name)
            config = layers_config(raw, target.config, "layers.0.self_attn.q_norm.weight" in tensors)
            self._read_settings(raw, config, target.config)
            self.hidden_state_layers = layers_to_read(raw, target.config.num_layers)
        # The ids of the tokens that are drafted, [Vd] int64; None: all
        self.token_map = token_map(tensors.pop("d2t", None), folder, target)
        self._check_tensors(tensors, config, folder)
        is_compiled = isinstance(target, CompiledModel)

        def get(name: str, in_8_bits: bool = is_compiled) -> Any:
            weight = tensors[own_name(name)][:].to(target.device, target.dtype, copy=True)
            return quantized(weight) if in_8_bits else weight

        # A drafter shares its target's embedding, so it runs in C++ only if the target does.
        kind = model_class(config, target.dtype, target.device) if is_compiled else Model
        self.model = kind(config, target.dtype, target.device, get, vocabulary=target)
        self.fc = make_linear(get("fc.weight", in_8_bits=False))  # its inputs have outliers
        self.hidden_norm = Norm(get("hidden_norm.weight"), config.rms_norm_eps)
        self.lm_head = target.lm_head
        if "lm_head.weight" in tensors:
            self.lm_head = make_linear(get("lm_head.weight"))
        elif self.token_map is not None:
            rows = lm_head_rows(target, self.token_map)
            self.lm_head = make_linear(quantized(rows) if is_compiled else rows)
        linears = (self.fc,) if self.lm_head is target.lm_head else (self.fc, self.lm_head)
        size = self.model.weight_bytes + sum(linear.nbytes for linear in linears)
        self.memory = Memory(size, config.kv_bytes_per_token(target.dtype))

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "HiddenStateDrafter":
        if spec.draft_model is not None:
            folder = resolve_model(spec.draft_model)
        elif target.folder is not None:
            folder = default_drafter(target.folder)
        else:
            raise ValueError(f"method={spec.method!r} needs a drafter; set draft_model.")
        return cls(spec, folder, target.model)

    def _check_tensors(self, tensors: dict[str, Any], config: ModelConfig, folder: Path) -> None:
        """Raise ValueError unless the tensors fit the config."""
        H, n = config.hidden_size, len(self.hidden_state_layers)
        shapes = {own_name(name): shape for name, shape in self.parameter_shapes(config).items()}
        del shapes["embed_tokens.weight"]
        shapes.pop("lm_head.weight", None)
        shapes["fc.weight"] = H, n * H
        if "lm_head.weight" in tensors:
            shapes["lm_head.weight"] = config.vocab_size if self.token_map is None else len(self.token_map), H
        check_fit(tensors, shapes, f"The weights of the drafter in {folder} do not fit its config.json")

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        self.kv = self.model.allocate_kv_cache(num_blocks, table.block_size)
        if use_triton(self.kv):
            width = len(self.hidden_state_layers) * self.model.config.hidden_size
            states = torch.zeros(max_tokens, width, dtype=self.model.dtype, device=table.device)
            read = partial(self.read_hidden_states, table)
            warm_up(self.model, table, max_tokens, lambda batch: read(batch, states[: batch.num_tokens]))

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        num_drafts = self._ready(table, rows, draft_limits(table, rows, min(k, self.max_drafts)))
        return make_proposal(self._draft(table, rows, num_drafts, k), num_drafts)

    # A subclass defines these; `_ready` is optional.

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layers' tensors and of `hidden_norm` by name."""
        raise NotImplementedError

    def _read_settings(self, raw: dict[str, Any], config: ModelConfig, target: ModelConfig) -> None:
        """Read the settings of the method from the content of config.json. May add default values to it."""
        raise NotImplementedError

    def _ready(self, table: Table, rows: Tensor, num_drafts: Tensor) -> Tensor:
        """Return the number of drafts [B], 0 for the rows that cannot draft yet."""
        return num_drafts

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        """Return drafts [B, k] int32, of which `num_drafts` [B] are used for each of the rows [B]."""
        raise NotImplementedError

    def _best(self, hidden: Tensor, table: Table, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the best token [N] int32 for each of the hidden states [N, H] of request rows [N], at
        positions [N]."""
        scores, index = self.lm_head(hidden).float(), rows.clamp(min=0)  # [N, Vd]
        likely, place = scores.topk(min(CONTENDERS, scores.shape[1]))
        ids = (place if self.token_map is None else self.token_map[place]).int()
        log_e = noise.draw(table.seed[index], positions, ids)
        best = (likely - table.temperature[index][:, None] * log_e).argmax(1, keepdim=True)
        return ids.gather(1, best)[:, 0]


def open_tensors(folder: Path) -> dict[str, Any]:
    """Return slices of the tensors in a folder by their names in the module docstring."""
    files = map(open_safetensors, weight_files(folder))
    tensors = {own_name(name): file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
    return {name: tensor for name, tensor in tensors.items() if name not in UNUSED}


def own_name(name: str) -> str:
    """Return the name of a tensor in the module docstring."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return name.replace("layers.0.hidden_norm", "hidden_norm")


def merge_config(raw: Raw, method: str) -> dict[str, Any]:
    """Return the keys of a config.json with those of its nested objects. Raises ValueError if it is not of a
    drafter for `method`, or has keys that may change results and are not supported."""
    architectures = shown(raw.get("speculators_model_type") or raw.get("architectures"))
    unnamed = "eagle3" if raw.get("draft_vocab_size") else None  # some are named LlamaForCausalLM
    if method != next((m for m in ("dflash", "eagle3") if m in architectures.lower()), unnamed):
        problem = f"architectures={architectures} is not a drafter for method={method!r}"
        raise ValueError(f"{problem}; set draft_model to one.")
    merged = dict(raw)
    for name in ("transformer_layer_config", "dflash_config"):
        part = merged.pop(name, {})
        if not isinstance(part, dict):
            raise ValueError(f"{name}={shown(part)} must be an object.")
        merged |= part
    given = {key for key, value in merged.items() if value and not key.startswith("_")}
    if unknown := given - KEYS - LAYER_IDS.keys():
        raise ValueError(f"unknown keys: {listed(unknown)}; they may change the drafter's results.")
    return {key: value for key, value in merged.items() if value is not None}


def layers_config(raw: Raw, target: ModelConfig, has_qk_norm: bool) -> ModelConfig:
    """Return the config of the drafter's layers. Raises ValueError if they do not fit the target."""
    windows = layer_windows(raw, None, lambda i: False)  # accepts full attention only
    config = replace(
        Family().config(raw), qk_norm=has_qk_norm, windows=windows,
        max_position_embeddings=target.max_position_embeddings,
    )  # fmt: skip
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the drafter is for a model with hidden size {config.hidden_size} and {config.vocab_size} "
            f"tokens, but the target has {target.hidden_size} and {target.vocab_size}."
        )
    return config


def layers_to_read(raw: Raw, num_layers: int) -> tuple[int, ...]:
    """Return the hidden states to read, as numbers of layers that have run."""
    key = next((key for key in LAYER_IDS if key in raw), "target_layer_ids")
    ids, offset = raw.get(key), LAYER_IDS[key]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{key}={shown(ids)} must be a list of the layers to read.")
    return tuple(check_number(key, n, -offset, num_layers - offset) + offset for n in ids)


def token_map(d2t: Any, folder: Path, target: Model) -> Tensor | None:
    """Return the ids [Vd] int64 of the tokens that are drafted from a slice of `d2t`, or None without it."""
    if d2t is None:
        return None
    offsets, vocab_size = d2t[...].flatten().long(), target.config.vocab_size
    ids = offsets + torch.arange(len(offsets))
    if not 0 < len(ids[(ids >= 0) & (ids < vocab_size)].unique()) == len(ids):
        raise ValueError(f"d2t in {folder} must give distinct ids from 0 to {vocab_size - 1}.")
    return ids.to(target.device)


def lm_head_rows(model: Model, tokens: Tensor) -> Tensor:
    """Return the target's lm_head rows for the tokens [n] int64, as a plain tensor [n, H]. A packed lm_head
    has no readable rows, but its product with unit vectors gives its columns."""
    table = model.embedding if model.config.tie_word_embeddings else model.lm_head.unpacked_weight
    if isinstance(table, Tensor):
        return table[tokens]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    return torch.cat([model.lm_head(piece)[:, tokens] for piece in units.split(PIECE)]).T.contiguous()


def quantized(weight: Tensor) -> Tensor | Quantized:
    """Quantize a matrix to 8 bits, since a pass in C++ takes as long as reading its weights."""
    return quantize(weight, 8) if weight.dim() == 2 and weight.shape[1] % GROUP == 0 else weight
