"""Steps on `meta` tensors: record launches and memory without computing anything.

Triton launches (in the interpreter) are recorded instead of run, PyTorch operations by name. Operations that
launch nothing on a GPU, views and allocations, are omitted. Only tensors created inside count as memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from nanospec.config import SpecConfig
from nanospec.device.step import Step
from nanospec.drafters.methods import NgramDrafter
from nanospec.kernels.launch import forced
from nanospec.kernels.table import Table
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model


class DryRun(TorchDispatchMode):
    """Records the launches and memory of the `with` block.

    Attributes:
        launches: names of kernels and operations, in order.
        peak: maximum bytes of live tensors created inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Any:
        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self.launches.append(executor.fn.__name__)

        self._changes = ExitStack()
        self._changes.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        self._changes.enter_context(forced("triton"))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._changes.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _storage(leaf) not in given]
        name = func._schema.name.removeprefix("aten::")
        if (made and not name.startswith(("empty", "new_empty"))) or func._schema.is_mutable:
            self.launches.append(name)
        for tensor in made:
            storage = tensor.untyped_storage()
            self._alive[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.alive)
        return out

    @property
    def alive(self) -> int:
        """Return the bytes of live tensors created inside."""
        return sum(size for reference, size in self._alive.values() if not reference.expired())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def meta_model(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Return a model on `meta` tensors, without weights."""
    shapes = config.parameter_shapes()

    def weight(name: str) -> Tensor:
        return torch.empty(shapes[name], dtype=dtype, device="meta")

    with forced("triton"):  # weights in the kernels' layout
        return Model(config, dtype, "meta", weight)


def dry_step(model: Model, spec: SpecConfig, num_rows: int) -> Step:
    """Return a step of a `meta_model` with its maximum context length."""
    config, drafters = model.config, [NgramDrafter(spec)] if spec.method == "ngram" else []
    length = config.max_position_embeddings
    table = Table.empty(num_rows, length, 16, config.vocab_size, "meta")
    kv_cache = model.allocate_kv_cache(num_rows * length // 16, 16)
    return Step(model, kv_cache, table, drafters, (), spec.acceptance == "exact")
