"""The server as a Ray Serve application, end to end (`make test-ray`)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanospec import SamplingParams
from nanospec.apps.serve.server import listen
from nanospec.apps.serve.settings import ServeConfig
from tests.alphabet import after, make
from tests.nanospec.apps.cluster.test_batch import ROOT, children, on_ray
from tests.nanospec.apps.serve.conftest import events_of

KEY = "key-of-a-client"
LONG = {"prompt": after("a"), "temperature": 100, "seed": 3, "max_tokens": 450, "ignore_eos": True}


@on_ray
def test_replica_start_failure_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    served = Served(folder, tmp_path / "log", "--kv-cache-memory", "1K", replicas=1)
    assert served.process.wait(150) == 2
    starting, line = served.log.read_text().splitlines()
    assert "starting" in starting
    assert "--kv-cache-memory of 1,024 bytes holds the K/V of 0 tokens, but --max-model-len" in line


class Served:
    """`nanospec serve --replicas` in a subprocess."""

    def __init__(self, folder: Path, log: Path, *more: str, replicas: int = 2) -> None:
        with listen(ServeConfig(port=0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        options = "--max-model-len 512 --max-num-seqs 2 --dtype float32 --spec none"
        command = [sys.executable, "-m", "nanospec", "serve", str(folder), *options.split()]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--replicas", str(replicas), "--api-key", KEY, "--port", str(port), *more],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=file,
            )

    def post(self, body: Any, key: str = KEY, path: str = "/v1/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def by_replica(self, metric: str) -> dict[str, float]:
        """Return the value of a metric by replica."""
        lines = self.get("/metrics").text.splitlines()
        result = [re.fullmatch(rf'nanospec:{metric}\{{.*replica="(\w+)"\}} (.*)', line) for line in lines]
        return {each[1]: float(each[2]) for each in result if each}

    def total(self, metric: str) -> float:
        return sum(self.by_replica(metric).values())


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(folder, tmp_path_factory.mktemp("served") / "log")
    end = time.monotonic() + 150
    while '"event": "ready"' not in made.log.read_text():
        assert made.process.poll() is None, made.log.read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    yield made
    made.process.kill()
    made.process.wait()


@on_ray
def test_answers_match_single_server(served: Served, folder: Path) -> None:
    params: Any = {name: value for name, value in LONG.items() if name != "prompt"}
    [output] = make(folder, max_model_len=512).generate(after("a"), SamplingParams(**params))
    assert served.post(LONG).json()["choices"][0]["text"] == output.text
    chunks = events_of(served.post({**LONG, "stream": True}).text)
    assert chunks.pop() == "[DONE]"
    assert len(chunks) > 50
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == output.text
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert served.post({"prompt": "abc"}, path="/tokenize").json()["count"] == 3
    assert served.post(LONG, key="wrong").status_code == 401
    assert served.post({**LONG, "top_P": 1}).json()["error"]["code"] == "unknown_field"
    assert "text/html" in served.get("/").headers["content-type"]


@on_ray
def test_disconnect_aborts_request(served: Served) -> None:
    before = served.total("num_aborted_total")
    headers = {"authorization": f"Bearer {KEY}"}
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    end = time.monotonic() + 20
    while served.total("num_aborted_total") == before:
        assert time.monotonic() < end


@on_ray
def test_killed_replica_is_replaced(served: Served) -> None:
    """Its requests end with an error, also in mid-stream."""
    names, kind = set(served.by_replica("steps_total")), "ray::ServeReplica:nanospec:Replica"
    before = [pid for pid, name in children(served.process.pid) if name.startswith(kind)]
    assert len(before) == len(names) == 2
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(served.post, {**LONG, "stream": i > 5}) for i in range(12)]
        end = time.monotonic() + 20
        while served.total("num_requests_running") < 4:  # two on each replica
            assert time.monotonic() < end
        os.kill(before[0], signal.SIGKILL)
    errors = {type(each.exception()) for each in running if each.exception() is not None}
    statuses = {each.result().status_code for each in running if each.exception() is None}
    assert errors <= {httpx.RemoteProtocolError}
    assert statuses <= {200, 500}
    assert errors or statuses == {200, 500}
    result = [served.post({"prompt": "ab" * i, "max_tokens": 2}).status_code for i in range(1, 9)]
    assert set(result) == {200}
    end = time.monotonic() + 100
    while len(now := set(served.by_replica("steps_total"))) < 2 or now == names:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert len(now & names) == 1


@on_ray
def test_running_requests_finish_before_exit(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(served.post, {**LONG, "stream": i > 2, "seed": i}) for i in range(1, 5)]
        end = time.monotonic() + 20
        while served.total("num_requests_running") < 2:
            assert time.monotonic() < end
        served.process.send_signal(signal.SIGINT)
        while (late := served.post({"prompt": "a", "max_tokens": 1})).status_code == 200:
            pass  # the signal has not been handled yet
        assert late.status_code == 404
        result = [each.result() for each in running]
    assert [r.json()["choices"][0]["finish_reason"] for r in result[:2]] == ["length"] * 2
    assert all(r.text.endswith("data: [DONE]\n\n") for r in result[2:])
    output, _ = served.process.communicate(timeout=60)
    assert (served.process.returncode, output) == (0, b"")
