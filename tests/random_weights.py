"""Random weights for tests and benchmarks, created on the device."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanospec.config import SpecConfig
from nanospec.drafters import Drafter, Target
from nanospec.drafters.hidden_states import HiddenStateDrafter
from nanospec.drafters.methods import METHODS
from nanospec.kernels.layer.quantized import Quantized
from nanospec.models.config import ModelConfig
from nanospec.models.cpu import model_class
from nanospec.models.decoder import GetWeight, Model


def random_model(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Model:
    """Return a model with `random_weights`."""
    get = random_weights(config, dtype, device, seed)
    return model_class(config, dtype, device)(config, dtype, device, get)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int
) -> GetWeight:
    """Return a function that returns each tensor of `config.parameter_shapes` once, by name.

    They are scaled so that activations stay near 1 and logits have a standard deviation of about 2: outputs
    are neither constant nor uniform. A seed gives the same weights up to rounding in every dtype, but
    not on every device."""
    return _random(config.parameter_shapes(), dtype, device, seed)


def _random(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str, seed: int
) -> GetWeight:
    generator = torch.Generator(device=device).manual_seed(seed)
    names, created = iter(shapes), dict[str, Tensor]()

    def get(name: str) -> Tensor:
        while name not in created:  # in a fixed order, so that it does not depend on the order of calls
            made = next(names)
            created[made] = create(made)
        return created.pop(name)

    def create(name: str) -> Tensor:
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif len(shape) == 1:  # biases
            noise *= 0.1
        else:
            scale = 2.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.0
            noise *= scale / math.sqrt(shape[1])
        return noise.to(dtype)

    return get


def write_drafter(
    folder: Path, method: str, target: ModelConfig, *, vocab: int | None = None, own_head: bool = False,
    seed: int = 0, reads: Sequence[int] = (0, 1), num_layers: int = 1, **settings: Any,
) -> Path:  # fmt: skip
    """Write a random drafter in the layout of the authors of `method`, and return its folder. It reads the
    hidden states after each of the `reads` numbers of layers. `vocab` limits the drafts to this many random
    tokens; `settings` are further keys of config.json."""
    is_eagle, has_bias, num_drafted = (
        method == "eagle3",
        "attention_bias" in settings,
        vocab or target.vocab_size,
    )
    layers = replace(
        target, num_layers=num_layers, windows=(None,) * num_layers, out_norms=False,
        qkv_bias=has_bias, o_bias=has_bias, mlp_bias=False, qk_norm=not is_eagle or "model_type" in settings,
    )  # fmt: skip
    config: dict[str, Any] = {
        "hidden_size": layers.hidden_size, "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": num_layers, "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads, "head_dim": layers.head_dim,
        "vocab_size": layers.vocab_size, "draft_vocab_size": num_drafted, "rms_norm_eps": 1e-5,
        "rope_theta": 300.0, "max_position_embeddings": layers.max_position_embeddings,
    }  # fmt: skip
    if is_eagle:
        config |= {"architectures": ["LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": reads}
    else:
        nested = {"mask_token_id": 3, "target_layer_ids": [n - 1 for n in reads]}
        config |= {"architectures": ["DFlashDraftModel"], "block_size": 6, "dflash_config": nested}
    H, kind = layers.hidden_size, METHODS[method]
    assert issubclass(kind, HiddenStateDrafter)
    shapes = kind.parameter_shapes(layers)
    shapes |= {"fc.weight": (H, len(reads) * H), "lm_head.weight": (num_drafted, H)}
    weights = _random(shapes, torch.float32, "cpu", seed)
    unused = {"model.embed_tokens.weight", "" if own_head else "lm_head.weight"}
    name_of = {name: name.removeprefix("model.") for name in shapes if name not in unused}
    if is_eagle:
        name_of = {name: stored.replace("layers.0.", "midlayer.") for name, stored in name_of.items()}
    tensors = {stored: weights(name) for name, stored in name_of.items()}
    if vocab is not None:
        ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(seed))[:vocab]
        tensors["d2t"] = ids.sort().values - torch.arange(vocab)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def hidden_state_drafter(
    method: str, target: Model, spec: SpecConfig | None = None, **options: Any
) -> Drafter:
    """Return a drafter with the weights of `write_drafter`."""
    with TemporaryDirectory() as folder:
        write_drafter(Path(folder), method, target.config, **options)
        chosen = replace(spec or SpecConfig(method), draft_model=folder)
        return METHODS[method].load(chosen, Target(target))


def random_quantized(
    form: str, N: int, K: int, group: int, size: float | Tensor = 1.0, dtype: torch.dtype = torch.float32
) -> Quantized:
    """Return random codes with values of about `size`, which may differ by row. Scales and minima have 8
    significant bits, so that float16 represents them; one group has the scale 0. `form` is "int4", "int8",
    each also with "-min", or "fp8"."""
    generator, bits = torch.Generator().manual_seed(N * K + group), 4 if "int4" in form else 8
    codes = torch.randint(0, 1 << bits, (N, K), generator=generator, dtype=torch.uint8)
    if form == "fp8":
        codes = torch.where(codes & 127 == 127, 1, codes).view(torch.float8_e4m3fn)  # no NaN
    scale, low = torch.randint(128, 256, (2, N, K // group), generator=generator) * size / 2.0 ** (7 + bits)
    scale[0, 0] = 0
    return Quantized(codes, scale, -8 * low if "min" in form else None, bits, dtype)
