"""Quantized checkpoints load as their formats define; invalid and unsupported ones are rejected."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.models.formats import open_checkpoint
from nanospec.models.weights import load_model
from tests.tiny import checkpoint, first_logits
from tests.util import assert_close

FILE = "model.safetensors"
Tensors = dict[str, Tensor]
Store = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def save_quantized(folder: Path, variant: str, config: dict[str, Any], store: Store, **changes: Any) -> Path:
    """Save the random checkpoint `variant` of `tests.tiny` with weights of linear layers as returned by
    `store`, given the module and the weight: tensors by the last part of their names, and the dequantized
    weight, which is saved in `folder / "plain"`."""
    plain = checkpoint(folder / "plain", variant, **changes)
    tensors, stored = load_file(plain / FILE), Tensors()
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        parts = {last: tensor}
        if name.endswith("_proj.weight"):
            parts, tensors[name] = store(module, tensor)
        stored |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / FILE)
    save_file(stored, folder / FILE)
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return folder


def assert_loads(folder: Path, variant: str, config: dict[str, Any], store: Store, **changes: Any) -> None:
    """Compare logits with those of the dequantized weights. Values agree up to rounding in float32."""
    folders = save_quantized(folder, variant, config, store, **changes), folder / "plain"
    models = (load_model(path, torch.float32, "cpu") for path in folders)
    actual, expected = map(first_logits, models)
    assert_close(actual, expected, 1e-5)


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 with 32 / bits adjacent codes of a dimension each, from the lowest bits in an `order`."""
    values = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    words = sum(values[..., order[place]] << (bits * place) for place in range(32 // bits))
    return torch.as_tensor(words).to(torch.int32).movedim(-1, dim)


UP = "model.layers.1.mlp.up_proj"
V2, ACT = {"checkpoint_format": "gptq_v2"}, {"desc_act": True}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns from the lowest bits of an int32
INTEGERS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {  # variant, method, bits, group, others
    "awq-group64-llama": ("llama", "awq", 4, 64, {"version": "gemm", "zero_point": True}),
    "awq-group32-phi3": ("phi3-window11", "awq", 4, 32, {}),
    "awq-rows-qwen2": ("qwen2-tied", "awq", 4, -1, {}),
    "gptq-int4-group32-llama": ("llama", "gptq", 4, 32, {"checkpoint_format": "gptq"}),
    "gptq-int4-group64-symmetric-phi3": ("phi3-window11", "gptq", 4, 64, {"sym": True}),
    "gptq-int4-group32-act-order-phi3": ("phi3-window11", "gptq", 4, 32, ACT),
    "gptq-int8-group32-qwen2": ("qwen2-tied", "gptq", 8, 32, {}),
    "gptq-int8-rows-v2-llama": ("llama", "gptq", 8, -1, V2 | ACT),
}


def integers(variant: str, method: str, bits: int, group: int, more: dict[str, Any]) -> Store:
    """Return a function that stores a weight as scale * (code - zero point). With "sym", weights other than
    those of `UP` are symmetric."""

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        groups = torch.arange(k) // (k if group < 0 else group)
        shape = int(groups[-1]) + 1, n
        codes, zeros = torch.randint(1 << bits, (k, n)), torch.randint(1 << bits, shape)
        zeros = torch.full(shape, 1 << (bits - 1)) if more.get("sym") and module != UP else zeros
        scales = (torch.rand(shape) * 0.3 / (1 << bits) + 1e-4).half()
        groups = groups[torch.randperm(k)] if more.get("desc_act") else groups
        dequantized = (scales.float()[groups] * (codes - zeros[groups])).T
        if method == "awq":
            stored = {"qweight": pack(codes, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER)}
            return {**stored, "scales": scales}, dequantized
        subtracted = 0 if more == V2 | ACT else pack(torch.ones_like(zeros), bits, 1)
        stored = {"qweight": pack(codes, bits, 0), "qzeros": pack(zeros, bits, 1) - subtracted}
        bias = {} if variant == "qwen2-tied" else {"bias": torch.zeros(n)}  # as stored by AutoGPTQ
        order = {"g_idx": groups.int()} if more else {}
        return {**stored, **bias, **order, "scales": scales}, dequantized

    return store


@pytest.mark.parametrize("case", INTEGERS.values(), ids=INTEGERS)
def test_integers(case: tuple[str, str, int, int, dict[str, Any]], tmp_path: Path) -> None:
    variant, method, bits, group, more = case
    config = {"quant_method": method, "bits": bits, "group_size": group, **more}
    assert_loads(tmp_path, variant, config, integers(*case))


@pytest.mark.parametrize(
    ("variant", "block"), [("qwen2-tied", (128, 128)), ("phi3-partly-rotated", (40, 64))]
)
def test_float8(variant: str, block: tuple[int, int], tmp_path: Path) -> None:
    """Test blocks with reordered rows, and unused scales."""
    rows, columns = block

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        scale = 0.001 * torch.rand(-(-n // rows), -(-k // columns)) + 0.0005
        spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale_inv": scale}
        unused = {f"{kind}_scale": torch.ones(1) for kind in ("input", "k", "v")}
        return stored | unused, codes.float() * spread

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    assert_loads(tmp_path, variant, config, store, hidden_size=64)


INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
ASYMMETRIC: dict[str, Any] = {"symmetric": False}
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [128, 64]}
LINEAR, MLP = "Linear", r"re:.*layers\.\d+\.mlp\.(up|down)_proj$"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # variant, format, targets with weights
    "int4-group32-llama": ("llama", "pack", {LINEAR: INT4}),
    "int4-group32-asymmetric-phi3": ("phi3-window11", "pack", {LINEAR: INT4 | ASYMMETRIC}),
    "int8-rows-packed-asymmetric-qwen2": ("qwen2-tied", "pack", {LINEAR: INT8 | ASYMMETRIC}),
    "int8-rows-phi3": ("phi3-window11", "int", {LINEAR: INT8}),
    "int8-rows-asymmetric-llama": ("llama", "int", {LINEAR: INT8 | ASYMMETRIC}),
    "fp8-one-scale-llama": ("llama", "float", {LINEAR: FLOAT8 | {"strategy": "tensor"}}),
    "fp8-rows-phi3": ("phi3-window11", "float", {LINEAR: FLOAT8 | {"strategy": "channel"}}),
    "fp8-blocks-qwen2": ("qwen2-tied", "float", {LINEAR: FLOAT8 | BLOCKS}),
    "fp8-group32-llama": ("llama", "float", {LINEAR: FLOAT8 | {"strategy": "group", "group_size": 32}}),
    "several-targets": ("llama", "pack", {LINEAR: INT4, MLP: INT8, UP: INT4 | ASYMMETRIC, "model": INT8}),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "format", "weights"), CASES.values(), ids=CASES)
def test_weights_equal_decompressed_ones(
    variant: str, format: str, weights: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    library = pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    arguments = {target: quantization.QuantizationArgs(**args) for target, args in weights.items()}
    schemes = {t: quantization.QuantizationScheme(targets=[t], weights=a) for t, a in arguments.items()}
    compressor = library.BaseCompressor.load_from_registry(f"{format}-quantized")

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        target = UP if module == UP else MLP if module.endswith(("up_proj", "down_proj")) else LINEAR
        scheme = schemes.get(target, schemes[LINEAR])
        (n, k), args = weight.shape, scheme.weights
        rows, columns = args.block_structure or (n if args.strategy == "tensor" else 1, args.group_size or k)
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale, zero = quantization.utils.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        if args.strategy == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    groups = {f"group_{i}": scheme for i, scheme in enumerate(schemes.values())}
    fields: dict[str, Any] = {"format": f"{format}-quantized", "ignore": ["lm_head"]}
    config = quantization.QuantizationConfig(config_groups=groups, **fields)
    assert_loads(tmp_path, variant, config.model_dump(mode="json"), store)


FP8: dict[str, Any] = {"quant_method": "fp8"}
AWQ, GPTQ = ({"quant_method": name, "bits": 4, "group_size": 32} for name in ("awq", "gptq"))


def grouped(target: object = "Linear", format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": [target], "weights": {"num_bits": 4, "group_size": 32, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, "quant_method=None is not supported; use awq or compressed-tensors or fp8 or gptq"),
    ({**GPTQ, "bits": 3}, "bits=3 is not supported; use 4 or 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported; use 'gptq' or"),
    ({**AWQ, "version": "gemv"}, "version='gemv' is not supported; use 'gemm'"),
    ({**AWQ, "zero_point": False}, "zero_point=False is not supported; use True"),
    ({**AWQ, "group_size": 48}, "group_size=48 is not supported; its columns must be a multiple of 32"),
    ({**FP8, "weight_block_size": [128, "x"]}, r"weight_block_size=\[128, 'x'\] is not supported"),
    (grouped(actorder="group"), "actorder='group' is not supported"),
    (grouped("re:("), "has invalid content .*missing \\)"),
    (grouped(5), "has invalid content"),
    (grouped(format="marlin-24"), "format='marlin-24' is not supported; use 'pack-quantized' or"),
    ({**grouped(), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config=.* is not supported"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=lambda value: str(value)[:40])
def test_unsupported_config_is_rejected(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    for raw in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
        with pytest.raises(ValueError, match=rf"config\.json:? {words}[^\n]*\.$"):
            open_checkpoint(tmp_path, raw)


gptq = integers("llama", "gptq", 4, 32, {"sym": True})


def fp8(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(len(weight), 1)}, weight


def test_symmetric_weights_have_no_minima(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, "llama", GPTQ, gptq)
    layer = load_model(folder, torch.bfloat16, "cpu").layers[1]
    symmetric, other = layer.down.weight, layer.gate_up.weight
    assert (symmetric.has_minima, symmetric.bits, symmetric.group) == (False, 4, 32)
    assert other.has_minima


def last(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces the last element of a tensor."""
    return lambda it: torch.cat((it.flatten()[:-1], torch.tensor([value]).to(it.dtype))).view(it.shape)


NAN, SCALE = float("nan"), f"{UP}.weight in .*: a scale that is NaN, too large, negative or zero"
Change = Callable[[Tensor], Tensor]
FILES: list[tuple[dict[str, Any], str, Change, str]] = [  # a tensor of UP, the change to it
    *((GPTQ, "scales", last(value), SCALE) for value in (NAN, float("inf"), -0.01, 0.0)),
    (FP8, "weight_scale", last(1e36), SCALE),
    (FP8, "weight", last(-NAN), f"{UP}.weight in .*: a value that is NaN"),
    *((GPTQ, "g_idx", last(i), f"{UP}.weight in .*: a g_idx outside 0 to 1") for i in (2, -1)),
    (GPTQ, "qweight", lambda it: it.long(), f"not stored as I32: {UP}.qweight I64"),
    (GPTQ, "qzeros", lambda it: it[:1], rf"wrong shape: {UP}.qzeros \[1, 12\] instead of \[2, 12\]"),
    (GPTQ, "bias", lambda it: torch.ones(96), f"1 tensor.s. unexpected: {UP}.bias"),
    ({**GPTQ, "group_size": 64}, "bias", lambda it: torch.zeros(96), "42 tensor.s. of the wrong .*qzeros"),
    ({**FP8, "weight_block_size": [128, 64]}, "bias", lambda it: torch.zeros(96), r"instead of \[1, 1\]"),
]


@pytest.mark.parametrize(("config", "name", "change", "words"), FILES, ids=range(len(FILES)))
def test_invalid_file_is_rejected(
    config: dict[str, Any], name: str, change: Change, words: str, tmp_path: Path
) -> None:
    folder = save_quantized(tmp_path, "llama", config, fp8 if config["quant_method"] == "fp8" else gptq)
    tensors = load_file(folder / FILE)
    tensors[f"{UP}.{name}"] = change(tensors.get(f"{UP}.{name}", torch.empty(0)))
    save_file(tensors, folder / FILE)
    with pytest.raises(ValueError, match=rf"{words}[^\n]*\.$"):
        load_model(folder, torch.float32, "cpu")
    os.truncate(folder / FILE, 9999)
    with pytest.raises(ValueError, match="has invalid content"):
        load_model(folder, torch.float32, "cpu")


def test_columns_must_be_a_multiple_of_32(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, "phi3-partly-rotated", FP8, fp8)  # hidden size 80
    with pytest.raises(ValueError, match="has 80 columns, not a multiple of 32"):
        load_model(folder, torch.float32, "cpu")
