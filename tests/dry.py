"""Run steps on `meta` tensors, to measure memory without computing anything."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanospec.config import SpecConfig
from nanospec.device.step import Step
from nanospec.drafters.methods import NgramDrafter
from nanospec.kernels.table import Table
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model


class DryRun(TorchDispatchMode):
    """Measures the memory of the `with` block: `peak` is the maximum bytes of live tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage_of(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.alive)
        return out

    @property
    def alive(self) -> int:
        """Return the bytes of live tensors created inside."""
        return sum(size for reference, size in self._alive.values() if not reference.expired())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def meta_step(config: ModelConfig, spec: SpecConfig, num_rows: int) -> Step:
    """Return a step of a bfloat16 model on `meta` tensors, with its maximum context length."""
    shapes, length = config.parameter_shapes(), config.max_position_embeddings

    def weight(name: str) -> Tensor:
        return torch.empty(shapes[name], dtype=torch.bfloat16, device="meta")

    model = Model(config, torch.bfloat16, "meta", weight)
    table = Table.empty(num_rows, length, 16, config.vocab_size, "meta")
    kv_cache = model.allocate_kv_cache(num_rows * length // 16, 16)
    return Step(model, kv_cache, table, [NgramDrafter(spec)], (), spec.acceptance == "exact")
