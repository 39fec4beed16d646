"""API keys, host checks, prefix-cache isolation between clients, page policy, and secrets in logs."""

from __future__ import annotations

import hmac
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanospec.apps.openai_format import CHAT, COMPLETIONS
from nanospec.apps.serve import gate
from nanospec.apps.serve.gate import MONITORING, PUBLIC
from nanospec.apps.serve.logs import Lines
from nanospec.apps.serve.settings import ServeConfig
from tests.nanospec.apps.serve.conftest import MODEL, Served, serving
from tests.nanospec.test_llm import after, folder, make

__all__ = ["folder"]
ALICE, BOB = "alice-key-1", "bob-key-22"
ROUTES = {CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models"}
BODY = {"prompt": after("abcd"), "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Served]:
    with serving(make(folder), api_key=(ALICE, BOB)) as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong-key"), {"authorization": ALICE}, bearer("é")])
def test_missing_or_wrong_key_is_rejected(guarded: Served, path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    response = guarded.post(path, BODY, headers=encoded)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_paths_without_key(guarded: Served) -> None:
    assert guarded.get("/health").status_code == guarded.get("/").status_code == 200
    assert guarded.get("/metrics").status_code == guarded.get("/v1/models").status_code == 401
    assert guarded.get("/metrics", headers=bearer(BOB)).status_code == 200


def test_unknown_paths_share_one_metric_label(guarded: Served, folder: Path) -> None:
    """With and without a key, also below existing paths."""
    before = len(guarded.app.responses)
    for path in ("/a", "/b", "/v1/models/c", "/page/d", "/health/e"):
        for headers in ({}, bearer(BOB)):
            guarded.get(path, headers=headers)
            guarded.post(path, {}, headers=headers)
    assert {path for path, _ in guarded.app.responses} <= {*PUBLIC, *MONITORING, *ROUTES, "other"}
    assert len(guarded.app.responses) <= before + 4
    assert guarded.app.responses["other", 401] >= 6


def test_each_key_is_accepted(guarded: Served) -> None:
    for key in (ALICE, BOB):
        assert guarded.client(api_key=key).completions.create(model=MODEL, **BODY).choices[0].text  # type: ignore
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key=ALICE + "x").completions.create(model=MODEL, **BODY)  # type: ignore


def test_keys_are_compared_in_constant_time(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(gate.hmac, "compare_digest", spy)
    for key in (ALICE, "x", "y" * 1000):
        compared.clear()
        guarded.get("/v1/models", headers=bearer(key))
        assert len(compared) == 2  # with all keys, even after a match
        assert {len(side) for pair in compared for side in pair} == {32}  # independent of the key's length
    assert hmac.compare_digest is spy


def test_prefix_cache_is_not_shared_between_keys_or_salts(folder: Path) -> None:
    def cached(served: Served, key: str, **more: Any) -> int:
        given = served.post("/v1/completions", {**BODY, **more}, headers=bearer(key)).json()
        return int(given["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(make(folder), api_key=(ALICE, BOB)) as served:
        assert cached(served, ALICE) == 0
        assert cached(served, ALICE) > 0
        assert cached(served, BOB) == 0
        assert cached(served, BOB) > 0
        assert cached(served, BOB, cache_salt="mine") == 0
        assert cached(served, BOB, cache_salt="mine") > 0
        assert cached(served, BOB, cache_salt="yours") == cached(served, ALICE, cache_salt="mine") == 0


def test_cache_salt_does_not_enable_prefix_caching(folder: Path) -> None:
    with serving(make(folder, enable_prefix_caching=False), api_key=(ALICE,)) as served:
        for _ in range(3):
            given = served.post("/v1/completions", {**BODY, "cache_salt": "a"}, headers=bearer(ALICE)).json()
            assert given["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("evil.example", 403),
        ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403),
    ],
)  # fmt: skip
def test_foreign_host_header_is_rejected(server: Served, host: str, status: int) -> None:
    """DNS rebinding: a foreign host name that resolves to 127.0.0.1."""
    assert server.get("/health", headers={"host": host}).status_code == status


def test_cors_is_disabled(server: Served) -> None:
    response = server.post("/v1/completions", BODY, headers={"origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "name",
    ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "..\\app.py", "index.html%00", "x.js", ""],
)
def test_only_page_files_are_served(server: Served, name: str) -> None:
    assert server.get(f"/page/{name}").status_code == 404


def test_content_security_policy(server: Served) -> None:
    policy = server.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_logs_contain_neither_text_nor_keys(guarded: Served) -> None:
    logger = logging.getLogger("nanospec.apps.serve")
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(Lines())
    logger.addHandler(handler)
    logger.setLevel("DEBUG")

    def logged() -> dict[str | int, dict[str, Any]]:  # an earlier test's request may be logged late
        result = map(json.loads, lines.getvalue().splitlines())
        return {key: line for line in result for key in (line["id"], line["status"])}

    try:
        headers = {**bearer(ALICE), "x-request-id": "this-one"}
        guarded.post("/v1/completions", BODY, headers=headers)
        guarded.post("/v1/completions", {**BODY, "secret": "swordfish"}, headers=bearer("wrong-key"))
        guarded.wait_until(lambda: {"this-one", 401} <= logged().keys())
    finally:
        logger.removeHandler(handler)
    first, second = logged()["this-one"], logged()[401]
    assert (first["id"], first["status"], first["completion_tokens"]) == ("this-one", 200, 2)
    assert first["path"] == "/v1/completions"
    assert first["ms"] >= first["first_token_ms"] > 0
    assert (second["status"], second["level"]) == (401, "info")
    for secret in (ALICE, "wrong-key", "swordfish", "abcdefgh"):
        assert secret not in lines.getvalue()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("me", False),
    ],
)  # fmt: skip
def test_is_local(host: str, local: bool) -> None:
    assert ServeConfig(host=host).is_local is local
