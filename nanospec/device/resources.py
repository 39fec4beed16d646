"""The resources of an engine: its device, CPU threads and memory (for the KV cache; errors when it runs out).

The number of CPU threads is set before a model is loaded and does not change afterwards, because in bf16 it
shows in the last bit of PyTorch's sums.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..config import EngineConfig
from ..drafters import Drafter
from ..kernels.batch import Batch
from ..kernels.sampling.sample import sample
from ..kernels.table import Table
from ..models.cpu import computed_by
from ..models.decoder import Model
from ..text import shown
from .graphs import MAX_STEP_TOKENS

DEFAULT_THREADS = torch.get_num_threads()
GPU_SHARE = 0.9  # of the device's memory, weights included
CPU_SHARE = 0.4  # of what is free
CPU_LIMIT = 4 << 30  # bytes; a CPU is too slow to fill more
PARTS = (1, 2, 4, 8)  # of the largest sizes, as attention splits the cache among fewer tokens into more parts
MARGIN = 2.0  # of what is measured, as other sizes, other rules of acceptance and captures take more
Method = TypeVar("Method", bound=Callable[..., Any])


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is a GPU if there is one. A GPU without a number is the current
    one, and has its number from then on, since what is current may change. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(name)):
        raise ValueError(f"device={shown(name)} is not supported; use 'auto', 'cpu' or 'cuda'.")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={shown(name)} needs a GPU that this machine does not have; use 'cpu'.")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"device='cuda:{index}' is not there: this machine has {count} GPU{'s' * (count > 1)}, counted "
            f"from 0; use at most 'cuda:{count - 1}'."
        )
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one of this thread: that is where Triton launches, and whose streams, events
    and graphs `torch.cuda` deals with. Threads take turns, so it is done for every call."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(method: Method) -> Method:
    """Run a method of an object with a `device` while that is the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with current(self.device):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def compute_info(model: Model) -> dict[str, str | int]:
    """Return how a model is computed, for people."""
    dtype = str(model.dtype).removeprefix("torch.")
    found: dict[str, str | int] = {"device": str(model.device), "dtype": dtype, "by": computed_by(model)}
    return found | ({"threads": torch.get_num_threads()} if model.device.type == "cpu" else {})


def use_threads(wanted: int | Literal["auto"]) -> None:
    """Set the number of threads. "auto" keeps OMP_NUM_THREADS or takes PyTorch's default within the
    container's quota."""
    if wanted != "auto":
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(math.ceil(min(cpu_quota(), DEFAULT_THREADS)), 1))


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of processors that control groups (version 2) grant this process, or infinity."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        group = root / own.read_text().partition("::")[2].strip().strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
                quotas += [int(quota) / int(period)] if quota != "max" else []
    return min(quotas)


def used_memory(model: Model, drafters: Sequence[Drafter], table: Table, num_blocks: int) -> dict[str, int]:
    """Return the bytes that a worker with these parts keeps, with full caches."""
    tokens = num_blocks * table.block_size
    return {
        "weights": model.weight_bytes,
        "draft_weights": sum(drafter.memory.weights for drafter in drafters),
        "kv_cache": tokens * model.config.kv_bytes_per_token(model.dtype),
        "draft_kv_cache": tokens * sum(drafter.memory.kv_per_token for drafter in drafters),
        "rows": row_bytes(table),
    }


def row_bytes(table: Table) -> int:
    """Return the bytes of the request rows."""
    return sum(column.nbytes for column in table if isinstance(column, torch.Tensor))


def plan_cache(config: EngineConfig, model: Model, drafters: Sequence[Drafter] = ()) -> tuple[int, int]:
    """Return (number of KV blocks, max_model_len) for this model on this machine. A block has room for the
    same tokens in the caches of drafters.

    Raises ValueError when the window is longer than a model's, or the memory too small for it.
    """
    own, whose = model.config.max_position_embeddings, "model"
    for drafter in drafters:
        if drafter.memory.max_context is not None and drafter.memory.max_context < own:
            own, whose = drafter.memory.max_context, "draft model"
    window = config.max_model_len or own
    if window > own:
        raise ValueError(f"max_model_len={window} is beyond the {whose}'s own window of {own} tokens.")
    size = config.block_size
    per_token = model.config.kv_bytes_per_token(model.dtype)
    per_block = size * (per_token + sum(drafter.memory.kv_per_token for drafter in drafters))
    source, budget = "kv_cache_memory", config.kv_cache_memory
    if budget is None:
        needed = step_bytes(config, model, drafters, window) if model.device.type == "cuda" else 0
        source, budget = "spare memory", max(spare_memory(model.device, model.num_devices) - needed, 0)
    num_blocks = min(budget // per_block, config.max_num_seqs * -(-window // size))
    if config.max_model_len is None and 256 <= num_blocks * size < window:
        window = num_blocks * size
    if num_blocks * size < window:
        raise ValueError(
            f"{source} of {budget:,} bytes holds the K/V of {num_blocks * size} tokens, too few for "
            f"max_model_len={window}, which takes {per_block * -(-window // size):,} bytes; give more, or "
            "lower max_model_len or max_num_seqs."
        )
    if model.device.type == "cpu":  # Linux grants the rows, and kills the process when they are written
        rows = row_bytes(Table.empty(config.max_num_seqs, window, size, model.config.vocab_size, "meta"))
        if rows > (free := _free_cpu_memory()):
            raise ValueError(
                f"max_num_seqs={config.max_num_seqs} takes {rows:,} bytes for the rows of as many requests, "
                f"and {free:,} are free; lower max_num_seqs."
            )
    return num_blocks, window


@torch.inference_mode()
def step_bytes(config: EngineConfig, model: Model, drafters: Sequence[Drafter], window: int) -> int:
    """Return the bytes that request rows, steps and prefills take on a GPU beside weights and K/V, measured
    by running the largest ones at the end of a full window, on a cache of one block.

    Captured steps share one pool, as large as the largest of them. While that one is captured, another step
    warms up outside of the pool, where later prefills run.
    """
    c, size, most, device = model.config, config.block_size, config.max_num_seqs, model.device
    table = Table.empty(most, window, size, c.vocab_size, device)
    kv_cache = model.empty_cache(1, size)

    def peak(rows: int, width: int, prefill: bool = False) -> int:
        ids = torch.arange(rows, dtype=torch.int32, device=device)
        count = torch.full_like(ids, width)
        batch = Batch.of_grid(table, ids, window - count, count, width, window)

        def score() -> None:
            hidden = model.forward(replace(batch, prefill=prefill), kv_cache)
            if not prefill:
                sample(model.logits(hidden), table, batch)

        return peak_bytes(device, score)

    k = min(config.spec.max_k, most_drafts(drafters), window - 1)
    drafting = max(min(MAX_STEP_TOKENS // (k + 1), most), 1)  # rows of the largest captured step with drafts
    step = max(peak(max(rows // part, 1), q) for rows, q in ((most, 1), (drafting, k + 1)) for part in PARTS)
    tokens = min(config.max_num_batched_tokens, most * window)
    prompts = -(-tokens // window)
    prefill = max(peak(prompts, -(-tokens // prompts // part), prefill=True) for part in PARTS)
    if any(drafter.runs_model for drafter in drafters):  # its logits, twice while they are put together
        step += 2 * max(most, drafting * (k + 1)) * c.vocab_size * model.dtype.itemsize
    return row_bytes(table) + int(MARGIN * (step + max(step, prefill)))


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Return the most bytes that `run` has allocated on a GPU at a time."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def most_drafts(drafters: Sequence[Drafter]) -> int:
    """Return the most drafts that a row may get."""
    return max((drafter.max_drafts for drafter in drafters), default=0)


def spare_memory(device: torch.device, sharing: int) -> int:
    """Return the bytes that the KV cache may take, on a CPU that of one of the processes `sharing` it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what was measured
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - GPU_SHARE) * total), 0)
    return min(int(_free_cpu_memory() * CPU_SHARE), CPU_LIMIT) // sharing


def _free_cpu_memory() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


class OutOfMemory(MemoryError):
    """Memory ran out; the message says where, and what to lower."""


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory ran out (of Python, of the system, of PyTorch in two ways) or
    hides such an error, as that of a CUDA graph whose capture it has ended."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text, hidden = str(error), error.__context__
    told = "can't allocate memory" in text or ("captur" in text and hidden is not None and ran_out(hidden))
    return isinstance(error, RuntimeError) and told


def in_a_step(config: EngineConfig) -> str:
    """Return what to lower when a step runs out of memory."""
    lower = ("max_num_batched_tokens", "max_num_seqs", "kv_cache_memory", "max_model_len")
    given = [f"{name}={value}" for name in lower if (value := getattr(config, name)) is not None]
    return f"lower {', '.join(given[:-1])} or {given[-1]}"


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory if memory runs out in the `with` block, with what it was for and the remedy."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not ran_out(error):
            raise
        first = str(error).strip().split("\n")[0]
        raise OutOfMemory(f"Memory ran out for {what} ({shown(first)}); {remedy}.") from error
