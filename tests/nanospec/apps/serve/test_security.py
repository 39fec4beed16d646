"""API keys, host checks, prefix-cache isolation between clients, page policy, and secrets in logs."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanospec.apps.openai_format import CHAT, COMPLETIONS
from nanospec.apps.serve import gate
from nanospec.apps.serve.gate import MONITORING, PUBLIC
from nanospec.apps.serve.logs import Lines
from nanospec.apps.serve.settings import ServeConfig
from tests.alphabet import after, make
from tests.nanospec.apps.serve.conftest import Served, serving
from tests.util import eventually

ALICE, BOB = "alice-key-1", "bob-key-22"
ROUTES = {CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models"}
BODY = {"prompt": after("abcd"), "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Served]:
    with serving(make(folder), api_key=(ALICE, BOB)) as served:
        yield served


def bearer(key: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {key}".encode()}


def test_requests_need_a_valid_key_compared_in_constant_time(guarded: Served, monkeypatch: Any) -> None:
    """All keys are compared, even after a match, and the time does not depend on a key's length."""
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(gate.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)  # type: ignore[func-returns-value]
    wrong = [bearer(key) for key in ("é", "x" * 1000, ALICE + "x")]
    for headers in ({}, {"authorization": f"Basic {ALICE}"}, {"x-api-key": ALICE[1:]}, *wrong):
        for path in ROUTES:
            response = guarded.post(path, BODY, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    for headers in (bearer(ALICE), bearer(BOB), {"authorization": f"bearer {BOB}"}, {"x-api-key": BOB}):
        assert guarded.post(COMPLETIONS, BODY, headers=headers).status_code == 200
    assert len(compared) == 2 * (6 * len(ROUTES) + 4)
    assert {len(side) for pair in compared for side in pair} == {32}
    statuses = [guarded.get(path).status_code for path in ("/health", "/", "/page/main.js", "/metrics")]
    assert statuses == [200, 200, 200, 401]


def test_unknown_paths_share_one_metric_label(guarded: Served) -> None:
    """Request unknown paths, also below existing ones, with and without a key."""
    for path in ("/a", "/v1/models/c", "/page/d", "/health/e"):
        for headers in ({}, bearer(BOB)):
            guarded.get(path, headers=headers)
            guarded.post(path, {}, headers=headers)
    assert {path for path, _ in guarded.app.responses} <= {*PUBLIC, *MONITORING, *ROUTES, "other"}
    assert {status for path, status in guarded.app.responses if path == "other"} >= {401, 404, 405}
    assert guarded.app.responses["other", 401] >= 6


def test_prefix_cache_is_not_shared_between_keys_or_salts(guarded: Served) -> None:
    def cached(key: str, salt: str | None) -> int:
        body = {"prompt": "zyxw" * 9, "max_tokens": 2, "cache_salt": salt}
        given = guarded.post(COMPLETIONS, body, headers=bearer(key)).json()
        return int(given["usage"]["prompt_tokens_details"]["cached_tokens"])

    clients = [(ALICE, None), (BOB, None), (BOB, "mine"), (BOB, "yours"), (ALICE, "mine")]
    assert [cached(*client) for client in clients] == [0] * 5
    assert min(cached(*client) for client in clients) > 0


@pytest.mark.parametrize(
    ("served", "key", "salt"), [("guarded", ALICE, None), ("server", "", "mine"), ("server", "", None)]
)
def test_texts_are_stored_for_lookup_only_with_a_key_or_salt(
    request: pytest.FixtureRequest, served: str, key: str, salt: str | None
) -> None:
    target: Served = request.getfixturevalue(served)
    history = target.llm.engine.history
    history._by_key.clear()
    body = {"prompt": "zyxw" * 5, "max_tokens": 2, "cache_salt": salt}
    target.post(COMPLETIONS, body, headers=bearer(key) if key else {})
    assert bool(history._by_key) == bool(key or salt)


def test_foreign_hosts_and_origins_are_rejected(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reject foreign host names, which could resolve to 127.0.0.1 (DNS rebinding)."""
    hosts = ("127.0.0.1", "127.3.2.1", "::1", "localhost", "0.0.0.0", "me")
    assert [ServeConfig(host=host).is_local for host in hosts] == [True] * 4 + [False] * 2
    containers = ("host.docker.internal:8000", "host.containers.internal")
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.9.9.9", "[::1]:80", *containers):
        assert server.get("/health", headers={"host": host}).status_code == 200
    suffix = ".evil.example"
    for host in ("evil.example", "localhost" + suffix, "127.0.0.1" + suffix, "", "localhost:80x"):
        response = server.get("/health", headers={"host": host})
        assert response.status_code == 403
        assert f"'{host}' is not a name of this machine; allow it with --allowed-hosts" in response.text
    for name, value, status in (
        ("allowed_hosts", ["my.box"], 200),
        ("host", "::", 200),
        ("host", "::1", 403),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(server.app.config.__dict__, name, value)
            assert server.get("/health", headers={"host": "My.Box:80"}).status_code == status
    response = server.post(COMPLETIONS, BODY, headers={"origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [("https://a.example", "https://b.example:8"), ("*",)], ids=len)
def test_pages_of_allowed_origins_can_use_the_api(folder: Path, origins: tuple[str, ...]) -> None:
    """Preflight requests need no key, and errors can be read too."""
    prefix = "access-control-"
    with serving(make(folder), api_key=(ALICE,), allowed_origins=origins) as served:
        for origin in ("https://b.example:8", "https://b.example"):
            headers = {"origin": origin, prefix + "request-method": "POST", prefix + "request-headers": "x-a"}
            allowed = "*" if "*" in origins else origin if origin in origins else None
            preflight = served.ask("OPTIONS", CHAT, headers=headers)
            assert preflight.status_code == (200 if allowed else 400)
            assert preflight.headers[prefix + "allow-headers"] == "x-a"
            for key, status in ((ALICE, 200), ("wrong", 401)):
                response = served.post(COMPLETIONS, BODY, headers={"origin": origin, **bearer(key)})
                assert (response.status_code, response.headers.get(prefix + "allow-origin")) == (
                    status,
                    allowed,
                )
                assert "x-request-id" in response.headers[prefix + "expose-headers"]
    for name, values in (
        ("allowed_hosts", ("x:80", "X", "//x")),
        ("allowed_origins", ("x", "http://x/", "http://X")),
    ):
        for value in values:
            given: Any = {name: ["*", value]}
            with pytest.raises(ValueError, match=f"^{name}='{value}' must be (a name|like http)"):
                ServeConfig(**given)


def test_errors_have_the_format_of_the_api(guarded: Served) -> None:
    unknown, missing = bearer(BOB), "authentication_error"
    for path, keys in (("/v1/messages/x", {"type", "error"}), ("/v1/x", {"error"})):
        for headers, kind in (({}, missing), (unknown, "not_found_error")):
            error = guarded.post(path, {}, headers=headers).json()
            assert (error.keys(), error["error"]["type"]) == (keys, kind)


def test_only_page_files_are_served(server: Served) -> None:
    """The Content-Security-Policy forbids scripts of other sites."""
    outside = ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "..\\app.py")
    for name in (*outside, "index.html%00", ""):
        assert server.get(f"/page/{name}").status_code == 404
    headers = server.get("/").headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert not {"unsafe", "http"} & set(headers["content-security-policy"].replace("-", " ").split())
    assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")


def test_logs_contain_neither_text_nor_keys(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, lines = logging.getLogger("nanospec.apps.serve"), io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(Lines())
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel("DEBUG")

    def logged() -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in map(json.loads, lines.getvalue().splitlines())}

    guarded.post(COMPLETIONS, BODY, headers={"x-request-id": "good", **bearer(ALICE)})
    wrong = {"x-request-id": "bad", **bearer("wrong-key")}
    guarded.post(COMPLETIONS, {**BODY, "secret": "swordfish"}, headers=wrong)
    guarded.get("/health", headers={"x-request-id": "health"})
    bodies: dict[str, Any] = {"unknown": {"secret": "swordfish"}, "value": {"stop": "swordfish" * 99}}
    for name, body in {**bodies, "text": {"sword fish": 1}}.items():
        headers = {"x-request-id": name, **bearer(ALICE)}
        guarded.post(COMPLETIONS, {**BODY, **body}, headers=headers)
    eventually(lambda: {"good", "bad", "health", "text"} <= logged().keys())
    good = logged()["good"]
    assert (good["path"], good["status"], good["level"]) == (COMPLETIONS, 200, "info")
    assert (good["prompt_tokens"], good["completion_tokens"]) == (35, 2)
    assert good["ms"] >= good["first_token_ms"] > 0
    assert (logged()["bad"]["status"], logged()["bad"]["level"]) == (401, "info")
    assert logged()["health"]["level"] == "debug"
    for name, code in (
        ("good", None), ("bad", "invalid_api_key"), ("unknown", "unknown_field"),
        ("value", "invalid_request_error"), ("text", "unknown_field"),
    ):  # fmt: skip
        assert logged()[name].get("code") == code
    for secret in (ALICE, "wrong-key", "swordfish", "sword fish", "abcdefgh"):
        assert secret not in lines.getvalue()
