"""Random weights for tests and benchmarks, created on the device."""

import math

import torch
from torch import Tensor

from nanospec.drafters.medusa import Heads, lm_head_for
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
    shapes = config.parameter_shapes()
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


def random_heads(model: Model, num_heads: int, vocab: int | None = None, seed: int = 0) -> Heads:
    """Return random heads of one block that share the target's lm_head. `vocab` limits the drafts to this
    many random tokens."""
    generator = torch.Generator().manual_seed(seed)
    size, hidden = model.config.vocab_size, model.config.hidden_size
    token_map = None
    if vocab is not None:
        token_map = torch.randperm(size, generator=generator)[:vocab].sort().values.to(model.device)

    weight = torch.randn(num_heads, hidden, hidden, generator=generator) / hidden**0.5
    bias = 0.1 * torch.randn(num_heads, 1, hidden, generator=generator)
    block = weight.to(model.device, model.dtype), bias.to(model.device, model.dtype)
    return Heads((block,), (lm_head_for(model, token_map),), token_map)


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
