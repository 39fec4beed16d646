"""Servers under load, without a model: what is sent when, what is read of answers, what is said of them."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import serve
from bench.load import client, figures, race, servers, tables
from bench.load.answers import read_answer
from bench.load.arrivals import BURSTS_SHARE, bursts, parse_load, poisson
from bench.load.figures import Bounds
from bench.load.servers import THREADS, Lane, Server
from bench.peers import texts

Json = dict[str, Any]
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def delta(text: str) -> str:
    return event(choices=[{"delta": {"content": text}}])


def usage(tokens: int) -> str:
    return event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": tokens})


STREAM = [
    HEAD.encode(), chunk(delta("")), chunk(": still here\n\n" + delta("é")), chunk(delta("b") + delta("c")),
    chunk(usage(5)), chunk("data: [DONE]\n\n"), b"0\r\n\r\n",
]  # fmt: skip


def row(first: float = 0.1, last: float = 1.1, tokens: int = 11, **more: Any) -> Json:
    usual = {"at": 0.0, "late": 0.0, "status": 200, "error": None, "text": "a", "chunks": 2, "gap": 0.2}
    times = {"first": first, "last": last, "end": last, "tokens": tokens, "prompt_tokens": 5}
    return {**usual, **times, **more}


FAILED = {"at": 0.0, "late": 0.0, "error": "status 429: full", "status": 429, "text": ""}


# ---- when requests are sent ----------------------------------------------------------------------


def test_arrivals_are_those_of_the_seed() -> None:
    times = poisson(4.0, 4000, seed=1)
    assert times == poisson(4.0, 4000, seed=1) == sorted(times)
    assert times != poisson(4.0, 4000, seed=2)
    assert times[0] == 0
    waits = np.diff(times)
    assert statistics.mean(waits) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(waits) == pytest.approx(0.25, rel=0.1)  # an exponential's is its mean
    assert poisson(8.0, 10, seed=1) == pytest.approx([t / 2 for t in times[:10]])


def test_bursts() -> None:
    assert bursts(2, 3.0, 5) == [0, 0, 3, 3, 6]
    times = parse_load("burst:16").times(capacity=10.0, most=64, seconds=60, seed=0)
    assert len(times) == 64
    assert len(set(times)) == 4
    assert 16 / times[16] == pytest.approx(BURSTS_SHARE * 10)


def test_loads_are_shares_of_the_capacity() -> None:
    load = parse_load("poisson:0.5")
    assert load.name == "poisson:0.5"
    assert load.times(6.0, 9, 60, seed=3) == poisson(3.0, 9, seed=3)


def test_a_slow_machine_is_sent_fewer_requests() -> None:
    """Of bursts only whole ones, and one at least."""
    loads = [parse_load(name) for name in ("poisson:0.5", "burst:8", "burst:64")]
    assert [len(load.times(2.0, 64, 20, seed=0)) for load in loads] == [20, 24, 64]


@pytest.mark.parametrize("text", ["poisson", "poisson:x", "poisson:0", "burst:1.5", "burst:-1", "even:2", ""])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no load"):
        parse_load(text)


# ---- what is read of an answer -------------------------------------------------------------------


def test_events_have_the_time_of_their_last_byte() -> None:
    found = read_answer([(float(i), data) for i, data in enumerate(STREAM)])
    assert found == {
        "status": 200, "error": None, "text": "ébc", "chunks": 3, "prompt_tokens": 7, "tokens": 5,
        "first": 2, "last": 3, "gap": 1, "end": 5,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_an_answer_may_come_in_any_pieces(size: int) -> None:
    raw = b"".join(STREAM)
    found = read_answer([(i / len(raw), raw[i : i + size]) for i in range(0, len(raw), size)])
    assert found["error"] is None
    assert (found["text"], found["tokens"], found["chunks"]) == ("ébc", 5, 3)
    if size == 1:
        assert found["first"] == raw.index(b"\n", raw.index("é".encode())) / len(raw)
    assert 0 <= found["first"] <= found["last"] <= found["end"] <= 1


def test_completions_are_read_too_and_without_chunks() -> None:
    body = event(choices=[{"text": "abc"}]).replace("\n", "\r\n") + usage(2) + "data: [DONE]\n\n"
    found = read_answer([(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + body.encode())])
    assert (found["text"], found["tokens"], found["error"]) == ("abc", 2, None)


@pytest.mark.parametrize(
    ("pieces", "said", "status"),
    [
        ([], "no answer", 0),
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull"], "status 429: full", 429),
        (STREAM[:-2], "ended early", 200),
        ([*STREAM[:4], chunk(event(error={"message": "broken"}))], "broken", 200),
        ([*STREAM[:4], *STREAM[5:]], "no usage", 200),
        ([HEAD.encode(), chunk(usage(1)), *STREAM[5:]], "no text", 200),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: list[bytes], said: str, status: int) -> None:
    found = read_answer([(0.0, data) for data in pieces])
    assert said in found["error"]
    assert found["status"] == status


# ---- the client ----------------------------------------------------------------------------------

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def sent(handler: Handler, times: list[float], timeout: float = 60.0) -> list[Json]:
    """The rows of requests that were sent at these times to a server which does this."""

    async def run() -> list[Json]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(handle, client.HOST, 0)
        port = server.sockets[0].getsockname()[1]
        asked = [{"at": at, "body": {"i": i}} for i, at in enumerate(times)]
        work = {"port": port, "path": "/p", "timeout": timeout, "requests": asked}
        result = await client.send(work)
        server.close()
        assert result["seconds"] >= max(times)
        assert result["cpu_seconds"] > 0
        rows: list[Json] = result["requests"]
        return rows

    return asyncio.run(run())


async def number(reader: asyncio.StreamReader) -> int:
    """Which request it is."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("POST /p HTTP/1.1\r\n")
    length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
    return int(json.loads(await reader.readexactly(length))["i"])


def test_requests_do_not_wait_for_answers() -> None:
    """The server answers nobody until all have asked, and latency counts from the time of each."""
    times, asked = [0.0, 0.0, 0.1, 0.3], []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await number(reader))
        while len(asked) < len(times):
            await asyncio.sleep(0.001)
        writer.write(b"".join(STREAM))

    rows = sent(handler, times)
    assert sorted(asked) == [0, 1, 2, 3]
    assert [found["error"] for found in rows] == [None] * 4
    assert [found["at"] for found in rows] == times
    assert min(found["late"] for found in rows) >= 0
    assert all(found["at"] + found["first"] >= times[-1] for found in rows)  # nobody had an answer before


def test_failures_are_rows() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        i = await number(reader)
        if i == 0:
            await reader.read()  # until the client has gone
        elif i == 1:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\n\r\n{}")
        elif i == 2:
            writer.write(b"".join(STREAM[:3]))
        else:
            writer.write(b"".join(STREAM))

    rows = sent(handler, [0.0] * 4, timeout=2.0)
    late, refused, broken, whole = (found["error"] for found in rows)
    assert late == "no whole answer within 2 s"
    assert refused.startswith("status 429")
    assert broken == "the stream ended early"
    assert whole is None


def test_a_server_that_is_not_there_and_a_bound() -> None:
    asked = [{"at": 0.0, "body": {}}]
    work: Json = {"port": servers.free_port(), "path": "/", "timeout": 5.0, "requests": asked}
    [found] = asyncio.run(client.send(work))["requests"]
    assert found["error"]
    with pytest.raises(ValueError, match="more than 2000"):
        asyncio.run(client.send({**work, "requests": asked * 2001}))


# ---- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 10, 63])
def test_percentiles(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    for percent in (0, 50, 90, 99, 100):
        assert figures.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_goodput_needs_both_bounds_and_counts_all() -> None:
    rows = [row(), row(first=0.6), row(last=9.1), FAILED, row(at=4.0, last=1.0)]
    found = figures.figures({"seconds": 20.0, "cpu_seconds": 0.1, "requests": rows}, Bounds(0.5, 0.2))
    assert found["goodput_share"] == 2 / 5
    assert found["seconds"] == 9.1  # until the last answer
    assert found["goodput_per_second"] == pytest.approx(2 / 9.1, abs=1e-4)
    assert (found["requests"], found["answered"], found["refused"], found["failed"]) == (5, 4, 1, 0)
    assert found["tokens_per_second"] == pytest.approx(44 / 9.1, abs=0.01)
    assert found["first_token_seconds"]["p50"] == 0.1
    assert found["token_seconds"]["p99"] > 0.8
    assert not figures.met(row(first=0.5001), Bounds(0.5, 0.2))
    assert figures.met(row(first=0.5, last=0.5, tokens=1), Bounds(0.5, 0.2))


def test_a_load_without_answers_has_figures() -> None:
    found = figures.figures({"seconds": 2.0, "cpu_seconds": 0.1, "requests": [FAILED]}, Bounds(1, 1))
    assert found["tokens_per_second"] == found["goodput_share"] == 0
    assert "first_token_seconds" not in found
    assert figures.errors([FAILED, row(), FAILED]) == {"status 429: full": 2}


def said(scale: float, share: float = 1.0) -> Json:
    times = {name: {"p50": scale, "p90": scale, "p99": 2 * scale} for name, _ in figures.RATIOS}
    times["longest_gap_seconds"] = {"p50": scale, "p90": scale, "p99": scale}
    return {**times, "tokens_per_second": 1 / scale, "goodput_share": share, "refused": 0, "failed": 0}


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is half as fast in the second round changes no ratio."""
    found = figures.ratios([said(1.0), said(2.0)], [said(3.0), said(6.0)])
    assert len(found) == len(figures.RATIOS) + 1
    assert all(ratio == {"median": 3, "min": 3, "max": 3} for ratio in found.values())


def test_medians_stand_beside_their_rounds() -> None:
    found = figures.over_rounds([said(1.0), said(4.0), said(2.0)])
    assert found["end_to_end_seconds"]["p99"] == {"median": 4, "rounds": [2, 8, 4]}


def run_of(scale: float, share: float = 1.0, text: str = "a") -> Json:
    return {"figures": said(scale, share), "errors": {}, "requests": [row(text=text), row(text="b"), FAILED]}


def test_rows_compare_with_the_best_setting_of_the_other() -> None:
    load, lanes = parse_load("poisson:0.5"), [Lane("nanospec", None), Lane("nanospec", "auto")]
    peers = [Lane("vllm", None), Lane("vllm", (2, 2, 4)), Lane("vllm", (8, 1, 8))]
    runs = {(load, lane): [run_of(1.0)] for lane in lanes}
    runs |= {(load, peers[0]): [run_of(1.5, 0.8)], (load, peers[1]): [run_of(3.0, 1.0, text="c")]}
    runs |= {(load, peers[2]): [run_of(2.0, 1.0)]}
    found = {each["server"]: each for each in tables.rows(runs)}
    assert found["nanospec plain"]["peer"]["server"] == "vllm K = 8, 1–8"
    assert found["nanospec K = auto"]["peer"]["ratios"]["tokens_per_second"]["median"] == 2
    assert found["vllm K = 2, 2–4"]["equal_to_plain"] == [1, 2]
    assert found["nanospec K = auto"]["equal_to_plain"] == [2, 2]
    assert found["vllm plain"]["equal_to_first_load"] == [2, 2]
    lines = tables.markdown(list(found.values())).splitlines()
    assert lines[2] == (
        "| poisson:0.5 | nanospec plain | 1000 / 2000 | 1000.0 / 2000.0 | 1000 / 1000 | 1.00 / 2.00 "
        "| 1 | 100% | 0, 0 |"
    )
    assert "1 of 2 equal to plain" in tables.remarks(list(found.values()))


def test_loads_of_unequal_lengths_are_compared_as_far_as_both_go() -> None:
    """Request i of all loads is the same; a later load may send more, or fewer, than the first."""
    lane, loads = Lane("nanospec", None), [parse_load(f"poisson:{share}") for share in (0.3, 0.8, 0.2)]
    texts = "aab", "aacdd", "a"
    runs = {
        (load, lane): [{**run_of(1.0), "requests": [row(text=text) for text in each]}]
        for load, each in zip(loads, texts, strict=True)
    }
    assert [found["equal_to_first_load"] for found in tables.rows(runs)] == [[3, 3], [2, 3], [1, 1]]


# ---- servers and their turns ---------------------------------------------------------------------

ANSWERS = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "a model"}]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_and_ended() -> None:
    port = servers.free_port()
    with Server("fake", [sys.executable, "-c", ANSWERS, str(port)], port, {}) as server:
        assert server.model() == "a model"
        assert server.usage()["rss_mb"] > 1
        assert server.start_seconds > 0
        assert '"GET /health' in server.log()
    assert server._process.returncode is not None
    assert not server._answers()


def test_a_server_that_ends_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    failing = Server("fake", command, servers.free_port(), {})
    with pytest.raises(RuntimeError, match="no such model"), failing:
        pass
    assert failing._process.returncode == 1


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "python_of", lambda system: Path(f"/{system}/bin/python"))
    model = Path("/a/model")
    for lane, words in (
        (Lane("nanospec", None), ["serve", "--spec", "none"]),
        (Lane("nanospec", "auto"), ["serve", "--spec", "ngram"]),
        (Lane("vllm", None), ["vllm.entrypoints.openai.api_server"]),
        (Lane("vllm", (2, 3, 4)), ["--speculative-config"]),
    ):
        found = servers.command(lane, model, 1234, 512)
        assert set(words) | {"--no-enable-prefix-caching", "1234", "512", "bfloat16"} <= set(found)
        assert ("--speculative-config" in found) == (lane == Lane("vllm", (2, 3, 4)))
    assert json.loads(found[-1]) == {
        "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 4
    }  # fmt: skip


def test_threads_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "cache_gib", lambda work: work["cache_tokens"] // 512)
    monkeypatch.setattr(servers, "python_of", lambda system: Path("/vllm/bin/python"))
    found = {name: servers.environment(Lane("vllm", None, name), Path("/"), 512) for name in THREADS}
    binds = {name: env["VLLM_CPU_OMP_THREADS_BIND"] for name, env in found.items()}
    assert binds["unbound"] == "nobind"
    assert binds["bound"].split(",")[0].isdigit()
    assert len({tuple(sorted(env.items())) for env in found.values()}) == len(THREADS)
    assert all(env["VLLM_CPU_KVCACHE_SPACE"] == "64" for env in found.values())
    assert servers.environment(Lane("nanospec", None), Path("/"), 512) == {}


class Fake:
    """In place of a server."""

    started: list[Lane] = []  # noqa: RUF012
    port, start_seconds, name = 1, 0.5, "fake"

    def __init__(self, lane: Lane, *_: Any) -> None:
        self.lane = lane
        Fake.started.append(lane)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None: ...

    def model(self) -> str:
        return self.lane.name

    def usage(self) -> Json:
        return {"rss_mb": 1.0, "cpu_seconds": 1.0}


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """What the fake servers were sent; "bound" threads are twice as fast."""
    found: list[Json] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def send(work: Json) -> Json:
        found.append(work)
        last = 1.0 if Fake.started[-1].threads == "bound" else 2.0
        asked = [(r["at"], r["body"]["messages"][0]["content"]) for r in work["requests"]]
        rows = [row(at=at, last=last, text=text) for at, text in asked]
        return {"seconds": 3.0, "cpu_seconds": 0.1, "requests": rows}

    monkeypatch.setattr(Fake, "started", [])
    monkeypatch.setattr(race, "start", Fake)
    monkeypatch.setattr(race, "send", send)
    monkeypatch.setattr(serve, "python_of", lambda system: Path(sys.executable))
    monkeypatch.setattr(serve, "versions", lambda system: {system: "1"})
    monkeypatch.setattr(serve, "resolve_model", lambda name: Path("/") / name)
    monkeypatch.setattr(serve, "read_texts", lambda folder, count: [f"text {i}" for i in range(count)])
    return found


def test_servers_take_turns_under_the_same_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: list[Json]
) -> None:
    options = ["--out", str(tmp_path), "--requests", "64", "--loads", "poisson:0.5", "burst:4"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *options])
    serve.main()
    found = json.loads((tmp_path / "serve.json").read_text())
    assert found["capacity"] == 32  # 64 answers in 2 s
    assert {name: max(rates, key=rates.__getitem__) for name, rates in found["tried_threads"].items()} == {
        "vllm plain": "bound", "vllm K = 2, 2–4": "bound"
    }  # fmt: skip
    turns = Fake.started[1 + 2 * len(THREADS) :]
    assert turns[5:] == turns[4::-1]
    assert [lane.system for lane in turns[:5]] == ["nanospec", "nanospec", "vllm", "vllm", "vllm"]
    assert {lane.threads for lane in turns if lane.system == "vllm"} == {"bound"}
    assert len(found["table"]) == 2 * 5
    assert all(len(each["figures"]["tokens_per_second"]["rounds"]) == 2 for each in found["table"])
    for measured in range(2):  # the loads after each server's warm-up
        per_server = len(race.WARM) + 2
        loads = works[-10 * per_server :][len(race.WARM) + measured :: per_server]
        asked = [[(r["at"], r["body"]["messages"]) for r in work["requests"]] for work in loads]
        assert len(asked) == 10
        assert asked[:5] == asked[:1] * 5  # the same for all
        assert asked[5:] == asked[-1:] * 5
        assert (asked[0] == asked[-1]) == (measured == 1)  # times at random are others in the next round
    assert {r["body"]["model"] for r in works[0]["requests"]} == {"nanospec plain"}


def test_quick_is_nanospec_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: list[Json]) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", "--out", str(tmp_path), "--quick", "--capacity", "5"])
    serve.main()
    assert [lane.name for lane in Fake.started] == ["nanospec plain", "nanospec K = auto"]
    assert all(r["body"]["stream"] and r["body"]["temperature"] == 0 for w in works for r in w["requests"])


def test_messages_are_by_turns_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = [("x" * 300, ""), *((f"edit {i}", "") for i in range(3))]
    monkeypatch.setattr(texts.common, "code_edit_pairs", lambda count: edits)
    monkeypatch.setattr(texts.common, "spec_bench", lambda count, kind: [f"{kind} {i}" for i in range(2)])

    def chat(text: str) -> list[int]:
        return list(text.encode())

    assert texts.served_texts(chat, 4) == ["edit 0", "chat 0", "edit 1", "chat 1"]
    with pytest.raises(ValueError, match="4 messages"):
        texts.served_texts(chat, 5)
