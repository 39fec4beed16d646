"""How long each kernel of a step should take on a GPU that need not be there, from how it is launched.

The account (`account.py`) says what a kernel must at least move and compute. This model adds what the
launch makes of it, asking the functions that decide how a kernel is cut into programs:

    start     a kernel in a graph has to start; less where it may start before the one before it ends
    chain     round trips that wait for each other: page look-ups, the first tile, tickets, partial sums
    waves     programs run in waves of as many as fit. A wave takes the longest of: the busiest
              multiprocessor's bytes at its share of the memory's bandwidth; all bytes through L2; the busiest
              one's FLOPs; a program's own loop, which loads only what is in flight at a time
    partials  partial sums written and read again through L2

Where the figures come from: 4.3e12 B/s copied and 790e12 FLOP/s in bf16 were measured on an H200, and nothing
else was, of our kernels least of all. The 1.3 us of a start are what is usual in CUDA graphs; `Gpu` says of
each other constant whether it is of a data sheet, of others' microbenchmarks of an H100, or a guess.

There are two models of an H200. `kernels/layer/tiling.py` decides: it compares ways to cut one product, so it
leaves out what all of them have in common, and a processor has its share of L2 with all others at work, 28
bytes per clock. This one judges what was decided, launch by launch, and so has two limits of L2: `cache`,
those 28 bytes for each of 132 processors, and `port`, what a processor gets while few are at work. Its memory
is the measured copy, there it is the data sheet's 4.8e12 B/s. Beside the 28 bytes they share no rule: a model
that judged as it decided would find every decision right.

Left out: how well tiles suit the tensor cores, and code between the loads. Pessimistic: bandwidth that an
idle multiprocessor leaves is not used by others, and what a kernel asks for ahead of its turn only saves the
wait for its first tiles. Optimistic: partial sums stay in L2, and all its slices are equally far.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from ...kernels.launch import next_power_of_2
from ...kernels.layer import paged
from ...kernels.layer.qkv_rope import holds_heads
from ...kernels.layer.tiling import plan
from ...models.config import ModelConfig
from ...models.hub import program, resolve_model
from ...text.checks import shown
from .account import Kernel, Machine, account
from .parser import Parser
from .shapes import SHAPES

REGISTERS = 240  # of a thread of attention, about: 198 to 255 as compiled for sm_90


@dataclass(frozen=True)
class Gpu(Machine):
    """An H200; what is measured is said in the module docstring.

    Attributes:
        processors: multiprocessors, each with `shared` bytes of shared memory, of which every program costs
            `reserved` more than it uses, and `registers` (data sheet).
        cache: bytes per second through L2 to all of them: 5.5 to 5.7e12 in microbenchmarks of an H100 with
            114 multiprocessors at 1.755 GHz, 28 per clock and processor; taken to grow with their number.
        port: bytes per second from L2 to one: 64 bytes per clock (microbenchmarks).
        latency: seconds until memory answers under load (H100, unloaded: 0.6 to 0.7 us).
        round_trip: seconds of a load, store or atomic through L2 that the next step waits for, with the
            barrier or the branch around it (a guess).
        hit: seconds until L2 answers a load (H100, of the far half: 270 to 500 clocks; a guess under load).
        early: seconds that a kernel costs that starts while the one before runs (a guess).
    """

    arch: str = "sm_90"
    processors: int = 132
    shared: int = 228 << 10
    reserved: int = 1 << 10
    registers: int = 65536
    cache: float = 28 * 132 * 1.755e9
    port: float = 64 * 1.755e9
    latency: float = 0.8e-6
    round_trip: float = 0.7e-6
    hit: float = 0.3e-6
    early: float = 0.3e-6


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        programs, resident: in all, and how many a multiprocessor runs at once.
        bytes: that come from memory.
        cached: bytes that all programs together load, mostly from L2.
        flops: that are computed, padding included.
        loop: seconds that a program takes alone, waiting for what its loop has in flight.
        partials: bytes of partial sums, of which each is written and read.
        round_trips: that wait for each other, outside of the loop.
        early: it may start before the kernel before it has ended.
        warm: what it reads first is in L2 by then (prefetched, or just written), or `loop` has the wait.
    """

    programs: int
    resident: int = 1
    bytes: float = 0.0
    cached: float = 0.0
    flops: float = 0.0
    loop: float = 0.0
    partials: float = 0.0
    round_trips: float = 2.0
    early: bool = False
    warm: bool = False

    def times(self, gpu: Gpu) -> dict[str, float]:
        """Seconds by what they are spent on; see the module docstring."""
        chain = self.round_trips * gpu.round_trip + (gpu.hit if self.warm else gpu.latency)
        return {
            "start": gpu.early if self.early else gpu.launch,
            "chain": chain,
            "waves": self._waves(gpu),
            "partials": 2 * self.partials / gpu.cache,
        }

    def _waves(self, gpu: Gpu) -> float:
        places = self.resident * gpu.processors
        full, rest = divmod(self.programs, places)
        return full * self._wave(gpu, places) + (self._wave(gpu, rest) if rest else 0.0)

    def _wave(self, gpu: Gpu, programs: int) -> float:
        part = 1 / self.programs  # of each total, per program
        busiest = ceil(programs / gpu.processors)
        return max(
            busiest * part * self.bytes / (gpu.bandwidth / gpu.processors),
            programs * part * self.cached / gpu.cache,
            busiest * part * self.cached / gpu.port,
            busiest * part * self.flops / (gpu.flops / gpu.processors),
            self.loop,
        )


@dataclass(frozen=True)
class Row:
    """A kernel of a step: its launches, and us of one of them at least and as estimated."""

    name: str
    count: int
    limit: float
    times: dict[str, float]
    programs: int | None  # None: not modelled

    @property
    def us(self) -> float:
        return sum(self.times.values())


def estimate(config: ModelConfig, B: int, K: int, context: int, gpu: Gpu) -> list[Row]:
    """The kernels of a step in bf16: B requests of `context` cached tokens, K drafts each."""
    T, H, I = B * (K + 1), config.hidden_size, config.intermediate_size  # noqa: E741
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    unit = config.head_dim if holds_heads(config.head_dim, config.qk_norm, gpu.arch) else 1
    qkv = product(gpu, T, q + 2 * kv, H, unit=unit)
    known = {
        "qkv_rope": qkv,
        "norm_linear qkv": qkv,
        "attention": attention(gpu, config, B, K + 1, context),
        "linear_add o": product(gpu, T, H, q),
        "norm_swiglu": product(gpu, T, 2 * I, H, unit=16),
        "linear_add down": product(gpu, T, H, I),
        "head": product(gpu, T, config.vocab_size, H),
    }
    rows = []
    for kernel in account(config, B, K, context, arch=gpu.arch).kernels:
        if kernel.launches:
            rows.append(_row(kernel, known.get(kernel.name), gpu))
    return rows


def _row(kernel: Kernel, launch: Launch | None, gpu: Gpu) -> Row:
    """What is not known more closely reads what it must, on all places."""
    moved, computed = kernel.bytes / kernel.launches, kernel.flops / kernel.launches
    assumed = launch or Launch(gpu.processors, bytes=moved, early=kernel.part == "products")
    times = {what: 1e6 * seconds for what, seconds in assumed.times(gpu).items()}
    programs = launch.programs if launch else None
    return Row(kernel.name, kernel.launches, 1e3 * gpu.ms(moved, computed), times, programs)


def product(gpu: Gpu, T: int, N: int, K: int, unit: int = 1) -> Launch:
    """x [T, K] with a weight [N, K]; see `tiling.plan` for `unit`."""
    tiling = plan(T, N, K, gpu.arch, unit=unit)
    tiles, blocks = ceil(T / tiling.width), ceil(N / tiling.rows)
    apart = tiling.splits if tiling.apart else 1
    size = 2 * (tiling.width + tiling.rows)  # bytes of a column of both tiles
    threads = 32 * tiling.warps
    registers = 64 * threads + tiling.rows * tiling.width * (2 if apart < tiling.splits else 1)
    room = gpu.shared // (tiling.stages * size * tiling.block_k + gpu.reserved)
    columns = tiling.part if tiling.apart else K
    return Launch(
        programs=tiles * blocks * apart,
        resident=max(min(room, gpu.registers // registers), 1),
        bytes=2 * (N * K + T * (K + N)),
        cached=tiles * blocks * size * K,
        flops=2 * tiles * tiling.width * blocks * tiling.rows * K,
        loop=ceil(columns / tiling.block_k) * gpu.latency / max(tiling.stages - 1, 1),
        partials=4 * apart * T * N if tiling.apart else 0,
        round_trips=3 if tiling.apart else 0,  # leave a part, take a ticket, read the parts
        early=True,
        warm=True,  # it asks for the weight before it waits
    )


def attention(gpu: Gpu, config: ModelConfig, B: int, queries: int, context: int) -> Launch:
    """Over `context` cached tokens of each of B rows."""
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    D = config.head_dim
    columns, pairs, (programs, _, units) = paged.cut(B, queries, context, heads, gpu.arch)
    pairs *= B
    block_d = max(next_power_of_2(D), 64)
    widest, tile, warps, stages = paged.CONFIGS[gpu.arch][block_d]
    shared = stages * 2 * 2 * tile * block_d + 2 * columns * (block_d + tile) + gpu.reserved
    threads = 32 * (8 if columns >= widest else warps)
    tiles, kv_tile = ceil(context / tile), 2 * 2 * tile * D
    return Launch(
        programs=pairs * programs,
        resident=max(min(gpu.shared // shared, gpu.registers // (threads * REGISTERS)), 1),
        bytes=B * config.num_kv_heads * tiles * kv_tile,
        cached=pairs * tiles * kv_tile,
        flops=4 * pairs * columns * tiles * tile * D,
        loop=(1 + ceil(tiles / programs) / max(stages - 2, 1)) * gpu.latency,
        partials=4 * units * B * queries * config.num_heads * D if programs > 1 else 0,
        # Its pages, which like the row's length it has looked up once before it waited for the kernel ahead;
        # then the ticket and the parts, eight at a time.
        round_trips=1 + (2 + ceil(units / 8) if programs > 1 else 0),
        early=True,
        warm=True,
    )


def total(rows: list[Row]) -> float:
    """ms of the step."""
    return sum(row.us * row.count for row in rows) / 1e3


def explain(config: ModelConfig, B: int, K: int, context: int, gpu: Gpu) -> str:
    """The estimate of every kernel beside its limit, and where the difference goes."""
    rows = estimate(config, B, K, context, gpu)
    parts = list(rows[0].times)
    cells = [["", "launches", "programs", "least us", "us", *parts]]
    for row in rows:
        times = (row.limit, row.us, *(row.times[part] for part in parts))
        programs = "–" if row.programs is None else str(row.programs)
        cells.append([row.name, str(row.count), programs, *(f"{one:.1f}" for one in times)])
    first, *widths = (max(map(len, column)) + 2 for column in zip(*cells))
    lines = [
        name.ljust(first) + "".join(one.rjust(width) for one, width in zip(others, widths))
        for name, *others in cells
    ]
    least = sum(row.limit * row.count for row in rows) / 1e3
    what = f"a step of {B} x {K + 1} tokens after {context} cached ones"
    lines.append(f"{what}: {least:.2f} ms at least, {total(rows):.2f} estimated")
    return "\n".join(lines)


LEGEND = """\
us per launch: the least that its bytes and FLOPs take, and the estimate, which is the sum of
  start     of the kernel in the graph; less where it may start before the one before it ends
  chain     round trips that wait for each other: page look-ups, first tile, tickets, partial sums
  waves     its programs, of which as many run at once as fit
  partials  partial sums written and read again
programs –: not modelled; as if it read what it must on all of the machine.
Estimated for an H200; no kernel has been measured."""


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: a whole number."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of {least} or more")
        return value

    return parse


def find_config(model: str) -> ModelConfig:
    """Of a shape that is built in, or of a model that is there or on the hub."""
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    try:
        return ModelConfig.from_path(resolve_model(model))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Shapes that are built in: {', '.join(SHAPES)}.") from None


def main(argv: Sequence[str]) -> int:
    """`nanospec explain MODEL`: what its kernels would take on an H200. Only its config.json is read."""
    parser = Parser(prog=f"{program()} explain", description=main.__doc__)
    parser.add_argument("model", help=f"a model, or one of {', '.join(SHAPES)}")
    count, drafts = at_least(1), at_least(0)
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 64], metavar="B", help="default: 1 64")
    parser.add_argument("--drafts", type=drafts, nargs="+", default=[0, 4], metavar="K", help="default: 0 4")
    parser.add_argument("--context", type=count, default=1024, help="cached tokens each (default: 1024)")
    args = parser.parse_args(argv)
    try:
        config = find_config(args.model)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    window, most = config.max_position_embeddings, max(args.drafts)
    if args.context + most + 1 > window:
        asked = f"{args.context} cached tokens, {most} drafts and one more"
        parser.error(f"{asked} are {args.context + most + 1}; the window of {args.model} is {window}")
    for B in args.batch:
        for K in args.drafts:
            print(f"{args.model}: {_count(B, 'request')}, {_count(K, 'draft')}{' each' if B > 1 else ''}")
            print(explain(config, B, K, args.context, Gpu()) + "\n")
    print(LEGEND)
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
