"""Memory of an engine: what is in use, the size of the KV cache, out-of-memory errors."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm import tqdm

from ..config import EngineConfig
from ..drafters import Drafter
from ..kernels.batch import Batch, Chunk
from ..kernels.sampling.sample import sample
from ..kernels.table import Table
from ..models.decoder import Model
from ..text.validation import shown
from .graphs import MAX_STEP_TOKENS

CPU_SHARE = 0.4  # share of the free memory to use for the KV cache
CPU_LIMIT = 4 << 30  # bytes; a CPU is too slow to need a larger KV cache
PARTS = (1, 2, 4, 8, 16, 32)  # divisors of the largest sizes: with fewer rows, attention splits the cache
MARGIN = 2.0  # multiple of the measured memory to reserve, as other sizes, rules and captures may need more


def used_memory(model: Model, drafters: Sequence[Drafter], table: Table, num_blocks: int) -> dict[str, int]:
    """Return the bytes that a worker with these parts occupies, by purpose."""
    tokens = num_blocks * table.block_size
    return {
        "weights": model.weight_bytes,
        "draft_weights": sum(drafter.memory.weights for drafter in drafters),
        "kv_cache": tokens * model.config.kv_bytes_per_token(model.dtype),
        "draft_kv_cache": tokens * sum(drafter.memory.kv_per_token for drafter in drafters),
        "rows": row_bytes(table),
    }


def row_bytes(table: Table) -> int:
    """Return the size of the request rows in bytes."""
    return sum(column.nbytes for column in table if isinstance(column, torch.Tensor))


def plan_cache(config: EngineConfig, model: Model, drafters: Sequence[Drafter] = ()) -> tuple[int, int]:
    """Return (number of KV cache blocks, max_model_len) for this model on this machine. The size of a block
    includes the K/V of the same tokens in the caches of the drafters.

    An unset max_model_len is reduced to fit. Raises ValueError if it exceeds a limit, or without memory.
    """
    limit, limited_by = model.config.max_position_embeddings, "model"
    for drafter in drafters:
        if drafter.memory.max_context is not None and drafter.memory.max_context < limit:
            limit, limited_by = drafter.memory.max_context, "draft model"
    max_len = config.max_model_len or limit
    if max_len > limit:
        raise ValueError(f"max_model_len={max_len} exceeds the {limited_by}'s limit of {limit} tokens.")
    size = config.block_size
    per_token = model.config.kv_bytes_per_token(model.dtype)
    per_block = size * (per_token + sum(drafter.memory.kv_per_token for drafter in drafters))
    source, budget = "kv_cache_memory", config.kv_cache_memory
    if budget is None:
        needed = step_bytes(config, model, drafters, max_len) if model.device.type == "cuda" else 0
        spare = spare_memory(model.device, model.num_devices, config.gpu_memory_utilization)
        source, budget = "free memory", max(spare - needed, 0)
    num_blocks = min(budget // per_block, config.max_num_seqs * -(-max_len // size))
    if config.max_model_len is None and 256 <= num_blocks * size < max_len:
        max_len = num_blocks * size
    if num_blocks * size < max_len:
        raise ValueError(
            f"{source} of {budget:,} bytes holds the K/V of {num_blocks * size} tokens, but max_model_len="
            f"{max_len} needs {per_block * -(-max_len // size):,} bytes; increase kv_cache_memory or lower "
            "max_model_len or max_num_seqs."
        )
    if model.device.type == "cpu":  # Linux overcommits, and would kill the process on writing the rows
        rows = row_bytes(Table.empty(config.max_num_seqs, max_len, size, model.config.vocab_size, "meta"))
        if rows > (free := _free_cpu_memory()):
            raise ValueError(
                f"max_num_seqs={config.max_num_seqs} needs {rows:,} bytes for request rows, but only "
                f"{free:,} bytes are free; lower max_num_seqs."
            )
    return num_blocks, max_len


@torch.inference_mode()
def step_bytes(config: EngineConfig, model: Model, drafters: Sequence[Drafter], max_len: int) -> int:
    """Return the bytes that request rows, steps and prefills take on a GPU in addition to weights and KV
    cache, measured by running the largest ones at the end of a full context, on a KV cache of one block.
    Captured steps share one pool; the steps before a capture run in memory that prefills use later."""
    c, size, max_rows, device = model.config, config.block_size, config.max_num_seqs, model.device
    table = Table.empty(max_rows, max_len, size, c.vocab_size, device)
    kv_cache = model.allocate_kv_cache(1, size)

    def peak(rows: int, width: int, prefill: bool = False) -> int:
        chunks = [Chunk(row, max_len - width, width) for row in range(rows)]
        batch = Batch.from_chunks(table, chunks, prefill)

        def score() -> None:
            hidden = model.forward(batch, kv_cache)
            if not prefill:
                sample(model.logits(hidden), table, batch)

        return peak_bytes(device, score)

    k = min(config.spec.max_k, max_drafts(drafters), max_len - 1)
    drafting = max(min(MAX_STEP_TOKENS // (k + 1), max_rows), 1)  # rows of the largest capture with drafts
    tokens = min(config.max_num_batched_tokens, max_rows * max_len)
    prompts, step, prefill = -(-tokens // max_len), 0, 0
    for part in tqdm(PARTS, desc="Measuring memory", disable=None, leave=False):
        step = max(step, peak(max(max_rows // part, 1), 1), peak(max(drafting // part, 1), k + 1))
        prefill = max(prefill, peak(prompts, -(-tokens // prompts // part), prefill=True))
    if any(drafter.runs_model for drafter in drafters):  # logits that it converts to float32
        step += 2 * max(max_rows, drafting * (k + 1)) * c.vocab_size * model.dtype.itemsize
    return row_bytes(table) + int(MARGIN * (step + max(step, prefill)))


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Return the peak memory in bytes that `run` allocates on a GPU."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def max_drafts(drafters: Sequence[Drafter]) -> int:
    """Return the maximum number of drafts per row and step."""
    return max((drafter.max_drafts for drafter in drafters), default=0)


def spare_memory(device: torch.device, sharing: int, gpu_share: float = 0.9) -> int:
    """Return the bytes available for the KV cache: on a GPU, the rest of the `gpu_share` of its memory; on a
    CPU, for that of each of the `sharing` processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # release the memory of earlier measurements
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - gpu_share) * total), 0)
    return min(int(_free_cpu_memory() * CPU_SHARE), CPU_LIMIT) // sharing


def _free_cpu_memory() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


class OutOfMemory(MemoryError):
    """Raised when memory runs out. The message gives the purpose and the settings to lower."""


def is_oom(error: BaseException) -> bool:
    """Return whether memory ran out, in Python, the system, PyTorch or the capture of a CUDA graph."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text, cause = str(error), error.__context__
    no_memory = "can't allocate memory" in text or ("captur" in text and cause is not None and is_oom(cause))
    return isinstance(error, RuntimeError) and no_memory


def oom_remedy(config: EngineConfig) -> str:
    """Return the remedy if a step runs out of memory: the settings to lower."""
    names = ("max_num_batched_tokens", "max_num_seqs", "kv_cache_memory", "max_model_len")
    settings = [f"{name}={value}" for name in names if (value := getattr(config, name)) is not None]
    return f"lower {', '.join(settings[:-1])} or {settings[-1]}"


@contextmanager
def explain_oom(purpose: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory if memory runs out in the `with` block, with the purpose and the remedy."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_oom(error):
            raise
        first = str(error).strip().split("\n")[0]
        raise OutOfMemory(f"Ran out of memory for {purpose} ({shown(first)}); {remedy}.") from error
