"""Run the requests of a scenario over HTTP: a server in a thread; clients that stream, wait or disconnect.
Times are real, so runs are not reproducible; the expected outputs are the same."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from campaigns.simulate.driver import Simulation
from campaigns.simulate.oracle import limited
from campaigns.simulate.scenario import Scenario
from nanospec import LLM, SamplingParams
from nanospec.apps.serve.logs import log
from nanospec.engine.request import Request, derive_seed
from tests.nanospec.apps.serve.conftest import serving

STEP_SECONDS = 0.002  # seconds per step of arrival time


class Served(Simulation):
    """A run of a scenario over HTTP."""

    def run(self) -> Counter[str]:
        self.prepare()
        self.violations: list[BaseException] = []
        llm = LLM.__new__(LLM)
        llm.config, llm.engine, llm.shared = self.engine.config, self.engine, self.shared
        assert self.engine.tokenizer is not None
        llm.tokenizer, llm.default_params = self.engine.tokenizer, SamplingParams()
        self._numbers = {oracle.params.seed: i for i, oracle in enumerate(self.oracles)}
        self._scheduler_add = self.engine.scheduler.add
        self.engine.scheduler.add = self._queued  # type: ignore[method-assign]
        log.disabled = True  # injected failures would be logged
        try:
            with serving(llm) as server, limited(self.scenario.engine):
                asyncio.run(self._clients(server.url))
        finally:
            log.disabled = False
            if self.violations:  # the clients' errors are consequences
                raise self.violations[0]
        return self.finish()

    def _queued(self, request: Request) -> None:
        assert request.params.seed is not None
        self.requests[self._numbers[request.params.seed]] = request
        self._scheduler_add(request)

    def _step(self) -> list[Request]:
        try:
            return super()._step()
        except AssertionError as error:  # the server would handle it as a failed step
            self.violations.append(error)
            raise

    async def _clients(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await asyncio.gather(*(self._client(client, i) for i in range(len(self.oracles))))

    async def _client(self, client: httpx.AsyncClient, i: int) -> None:
        job = self.scenario.jobs[i]
        await asyncio.sleep(STEP_SECONDS * job["arrives"])
        limit = job["params"].get("max_tokens") or self.scenario.engine["window"]
        least = min(job["params"].get("min_tokens", 0), limit)
        body = {**job["params"], "max_tokens": limit, "min_tokens": least, "prompt": job["prompt"]}
        if job["ends"] is None and i % 2:
            self._check_response(i, await client.post("/v1/completions", json=body))
            return
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._check_response(i, response)
                return
            await self._read_stream(i, response)

    async def _read_stream(self, i: int, response: httpx.Response) -> None:
        """Read a stream to its end, or disconnect as the job specifies."""
        events: list[dict[str, Any]] = []
        ends = self.scenario.jobs[i]["ends"]
        async for line in _lines(response):
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == ends:
                self.seen["disconnected"] += 1
                self.cut.add(i)
                return
        choices = [choice for event in events for choice in event.get("choices", ())]
        if any("error" in event for event in events):
            self._check_failure(i)
            return
        self._compare_choices(i, choices)

    def _read(self, i: int, request: Request) -> None:
        """Do nothing, since the server reads the pieces."""

    def _check_response(self, i: int, response: httpx.Response) -> None:
        body = response.json()
        if response.status_code == 500:
            self._check_failure(i)
            return
        assert response.status_code == 200, f"job {i}: {response.text}"
        assert body["usage"]["completion_tokens"] == len(self.requests[i].output_ids)
        self._compare_choices(i, body["choices"])

    def _check_failure(self, i: int) -> None:
        """Check that a failed request was running when a fault was injected, or is expected to fail."""
        self.seen["failed"] += 1
        assert i in self.cut or self.expected[i].finish_reason == "abort", f"job {i} failed"

    def _compare_choices(self, i: int, choices: list[dict[str, Any]]) -> None:
        """Compare all choices of a stream, or the choice of a response, with the oracle."""
        expected, n = self.expected[i], self.oracles[i].params.logprobs
        if not self.exact[i] or self.requests[i].finish_reason == "abort":
            return
        text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        assert (text, reason) == (expected.text, expected.finish_reason), f"job {i}"
        logprobs = [p for choice in choices for p in (choice["logprobs"] or {}).get("token_logprobs", ())]
        pairs = zip(expected.scores, expected.token_ids, strict=True)
        reference = [float(scores.float().log_softmax(0)[token]) for scores, token in pairs]
        reference = reference[: self.requests[i].output.num_text_tokens]
        assert logprobs == pytest.approx(reference if n is not None else [], abs=1e-4), f"job {i}"
        self.seen["logprobs"] += len(logprobs)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of an event stream. httpx would also split at characters such as U+0085."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()


def simulate_served(scenario: Scenario) -> Counter[str]:
    """Run a scenario over HTTP. Raises on any violation. Its threads are ignored, and so are all faults but
    errors: only clients abort requests, and Ctrl-C does not reach the engine's thread."""
    scenario.threads = 0
    scenario.faults = [fault for fault in scenario.faults if fault["kind"] in ("error", "memory", "nan")]
    for i, job in enumerate(scenario.jobs):
        job.pop("index", None)
        job["params"]["seed"] = derive_seed(job["params"]["seed"], i, 0)  # identifies the request
    return Served(scenario).run()
