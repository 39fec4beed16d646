"""nanospec's server under load, beside vLLM's: requests that come at their own times and stream their
answers.

    make peers PEER=vllm
    python bench/serve.py [--rounds 2] [--loads poisson:0.3 poisson:0.6 poisson:0.9 burst:16 burst:64]
                          [--requests 64] [--seconds 30] [--servers nanospec vllm] [--every-guess] [--quick]

Every server runs on this machine, one at a time: started, warmed up, put under each load, ended. In the
next round they have their turns in the opposite order. A load is the same for all: the same chat messages
at the same times, greedy, EOS ignored, prefix caches off. Another process sends it
(`bench/load/client.py`), each request at its time, whatever became of those before; latency counts from
that time. Loads are shares of the capacity: the requests a second that nanospec without guesses answers
when 64 come at once, measured first (`--capacity` sets it).

Goodput is the share of requests of which both the time to the first token and the mean time of the others
are within the bounds. All settings of vLLM are in the table; ratios are to the one that is best under each
load. Where its threads run is what was fastest for it, with guesses and without, of all that
`bench/load/servers.py` lists.

Nothing else should run meanwhile. The messages come from evaluation text, which `bench/cpu.py` describes;
PEERS names the folder of vLLM's environment. `--quick` tries nanospec alone, in less than a minute.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.load.arrivals import Load, parse_load
from bench.load.race import Race
from bench.load.servers import THREADS, Lane, versions
from bench.load.tables import markdown, remarks, rows
from bench.peers.system import python_of
from bench.peers.texts import served_texts
from bench.peers.vllm_cpu import GUESSES
from nanospec.models.hub import resolve_model
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
SERVERS = ("nanospec", "vllm")
LOADS = ("poisson:0.3", "poisson:0.6", "poisson:0.9", "burst:16", "burst:64")
USUAL = (None, (2, 2, 4), (8, 1, 8))  # of vLLM's settings, what was best for some batch size in cpu.json
SETTINGS = ("rounds", "requests", "seconds", "max_tokens", "first", "token", "seed", "timeout")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", nargs="+", type=parse_load, default=list(map(parse_load, LOADS)))
    parser.add_argument("--requests", type=int, default=64, help="of each load, at most")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load; with fewer requests")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--capacity", type=float, help="requests a second, of which loads are shares")
    parser.add_argument("--first", type=float, default=1.0, help="seconds to the first token, for goodput")
    parser.add_argument("--token", type=float, default=0.05, help="mean seconds of the others, for goodput")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds until a request has failed")
    parser.add_argument("--seed", type=int, default=0, help="of the times; the next round has the next one")
    parser.add_argument("--every-guess", action="store_true", help=f"all {len(GUESSES)} settings of vLLM")
    parser.add_argument("--threads", choices=THREADS, help="of vLLM; without it: what is fastest")
    parser.add_argument("--quick", action="store_true", help="nanospec alone, few requests")
    parser.add_argument("--name", default="serve")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.servers, args.rounds, args.requests, args.max_tokens = ["nanospec"], 1, 8, 16
        args.loads = [Load("poisson", 0.6), Load("burst", 8)]
    if any(load.kind == "burst" and load.size > args.requests for load in args.loads):
        parser.error(f"a burst is larger than --requests {args.requests}.")
    for system in args.servers:  # before anything is measured
        python_of(system)
    return args


def main() -> None:
    """Command line."""
    args, begun = parse(), time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended from outside."))  # and the server with it
    folder = resolve_model(args.model).resolve()
    race = Race(folder, read_texts(folder, args.requests), args)
    lanes = [Lane(s, guess) for s in args.servers for guess in guesses(s, args.every_guess)]
    race.capacity = args.capacity or race.measure_capacity(lanes[0])
    print(f"about {race.minutes(lanes):.0f} minutes", flush=True)
    lanes = [lane._replace(threads=race.choose_threads(lane)) for lane in lanes]
    result: Json = {
        "machine": {**common.environment(), "servers": {s: versions(s) for s in args.servers}},
        "settings": {"model": folder.name, **{name: getattr(args, name) for name in SETTINGS}},
        "capacity": race.capacity,
        "tried_threads": race.tried,
    }
    for i in range(args.rounds):
        print(f"\nround {i + 1}", flush=True)
        race.round(i, lanes[:: -1 if i % 2 else 1])
        result["table"] = rows(race.runs)
        result["minutes"] = round((time.perf_counter() - begun) / 60, 1)
        common.write(args.name, result, args.out)  # a later round may fail
    print(f"\n{markdown(result['table'])}\n\n{remarks(result['table'])}\n")
    common.save(args.name, result, args.out)


def guesses(system: str, every: bool) -> tuple[Any, ...]:
    if system == "nanospec":
        return (None, "auto")
    return GUESSES if every else USUAL


def read_texts(folder: Path, count: int) -> list[str]:
    """User messages."""
    tokenizer = Tokenizer(folder)

    def chat(text: str) -> list[int]:
        asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        return tokenizer.encode(asked, add_special_tokens=False)

    return served_texts(chat, count)


if __name__ == "__main__":
    main()
