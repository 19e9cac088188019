"""Requests of web pages of other sites: `Host`, `Origin` and `Sec-Fetch-Site`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from iskander.config.auth import AccessConfig
from iskander.config.loader import load_config
from iskander.errors import ConfigError
from iskander.gateway.transport.http1.sites import SitePolicy

OWN = "localhost:8000"
FRAME = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
LINK = FRAME | {"sec-fetch-dest": "document"}


def judge(
    headers: dict[str, str],
    *,
    method: str = "POST",
    target: str = "/v2/repository/models/m/load",
    scheme: str = "http",
    is_local: bool = True,
    address: str = "127.0.0.1:8000",
    has_tokens: bool = False,
    **access: Any,
) -> int:
    """Returns the status of a rejection, or 0."""
    policy = SitePolicy(
        AccessConfig(**access), address, has_tokens=has_tokens, probes=("/livez", "/readyz")
    )
    scope: dict[str, Any] = {
        "method": method,
        "scheme": scheme,
        "raw_path": target.encode(),
        "path": target,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
    refusal = policy.judge(scope, is_local=is_local)
    assert scope["is_own_host"] or refusal is not None or target in ("/livez", "/readyz")
    return 0 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("host", "on_loopback", "on_network"),
    [
        ("localhost", 0, 0),
        ("LOCALHOST:1", 0, 0),
        ("localhost.:1", 0, 0),
        ("page.localhost", 0, 0),
        ("127.0.0.1:8000", 0, 0),
        ("[::1]:8000", 0, 0),
        ("", 0, 0),
        ("192.0.2.1:8000", 421, 0),
        ("[2001:db8::1]", 421, 0),
        ("rebound.example", 421, 421),
        ("rebound.example:8000", 421, 421),
        ("127.0.0.1.rebound.example", 421, 421),
        ("localhost.example", 421, 421),
        ("localhost@rebound.example", 421, 421),
        ("rebound.example#localhost", 421, 421),
        ("rebound.example/localhost", 421, 421),
        ("rebound.example?localhost", 421, 421),
        ("[::1", 421, 421),
        ("\xff", 421, 421),
    ],
)
def test_host_must_be_a_name_of_the_server(host: str, on_loopback: int, on_network: int) -> None:
    assert judge({"host": host}) == on_loopback
    assert judge({"host": host}, is_local=False) == on_network


def test_request_without_host_is_served() -> None:
    """HTTP/1.0 needs no host; browsers send one."""
    assert judge({}) == 0


def test_name_of_the_address_and_of_the_machine_are_own_names_on_the_network() -> None:
    for name in ("scores.example", socket.gethostname()):
        headers = {"host": f"{name}:8000"}
        assert judge(headers, is_local=False, address="scores.example:8000") == 0
        assert judge(headers, address="scores.example:8000") == 421


@pytest.mark.parametrize("is_local", [True, False])
def test_allowed_hosts_are_patterns(is_local: bool) -> None:
    hosts = ("*.svc", "Scores.Example")
    for host, expected in (("a.b.svc:1", 0), ("SCORES.example", 0), ("svc", 421), ("a.svc.x", 421)):
        assert judge({"host": host}, is_local=is_local, allowed_hosts=hosts) == expected
    assert judge({"host": "\xff"}, is_local=is_local, allowed_hosts=("*",)) == 0


def test_tls_and_tokens_prove_the_host() -> None:
    rebound = {"host": "rebound.example"}
    assert judge(rebound, scheme="https") == 0
    assert judge(rebound | {"authorization": "Bearer a"}, has_tokens=True) == 0
    assert judge(rebound | {"authorization": "Bearer a"}) == 421
    assert judge(rebound, has_tokens=True) == 421


def test_host_of_an_absolute_target_counts() -> None:
    assert judge({"host": OWN}, target="http://rebound.example/v2") == 421
    assert judge({"host": "rebound.example"}, target="http://localhost/v2") == 0


def test_probes_answer_every_host() -> None:
    for path in ("/livez", "/readyz"):
        assert judge({"host": "gateway"}, method="GET", target=path) == 0


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://localhost:8000", OWN, 0),
        ("HTTP://LOCALHOST:8000", OWN, 0),
        ("https://localhost:8000", OWN, 0),  # A proxy with TLS in front.
        ("http://localhost", "localhost:80", 0),
        ("https://localhost:443", "localhost", 0),
        ("http://localhost:3000", OWN, 403),
        ("http://127.0.0.1:8000", OWN, 403),
        ("http://localhost:443", "localhost", 403),
        ("http://evil.example", OWN, 403),
        ("https://evil.example", OWN, 403),
        ("file://localhost:8000", OWN, 403),
        ("//localhost:8000", OWN, 403),
        ("null", OWN, 403),
        ("", OWN, 403),
    ],
)
def test_origin_must_be_of_the_same_site(origin: str, host: str, expected: int) -> None:
    for scheme in ("http", "https"):
        for method in ("POST", "GET"):
            headers = {"host": host, "origin": origin}
            assert judge(headers, scheme=scheme, method=method) == expected


def test_allowed_origins() -> None:
    allowed = ("https://UI.example",)
    sent = {"host": OWN, "origin": "https://ui.example", "sec-fetch-site": "cross-site"}
    assert judge(sent, allowed_origins=allowed) == 0
    assert judge(sent) == 403
    assert judge(sent | {"origin": "http://ui.example"}, allowed_origins=allowed) == 403


@pytest.mark.parametrize(
    ("sent", "on_get", "on_post"),
    [
        ({"sec-fetch-site": "same-origin"}, 0, 0),
        ({"sec-fetch-site": "none"}, 0, 0),
        ({"sec-fetch-site": "cross-site"}, 403, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403, 403),
        ({"sec-fetch-site": "\xff"}, 403, 403),
        (LINK, 0, 403),
        (FRAME, 403, 403),
    ],
)
def test_fetch_metadata(sent: dict[str, str], on_get: int, on_post: int) -> None:
    assert judge({"host": OWN} | sent, method="GET") == on_get
    assert judge({"host": OWN} | sent) == on_post


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('allowed_hosts = ["a.example:80"]', "`a.example:80` is no host name"),
        ('allowed_hosts = ["http://a.example"]', "is no host name"),
        ('allowed_origins = ["a.example"]', "`a.example` is no origin"),
        ('allowed_origins = ["https://a.example/"]', "is no origin"),
        ('allowed_origins = ["https://*.example"]', "is no origin"),
        ('allowed_origins = ["null"]', "is no origin"),
    ],
)
def test_settings_that_could_match_nothing_are_rejected(
    tmp_path: Path, setting: str, message: str
) -> None:
    file = tmp_path / "iskander.toml"
    file.write_text(f'[access]\n{setting}\n[repository]\npath = "models"\n')
    with pytest.raises(ConfigError, match=message):
        load_config(file, environment={})
