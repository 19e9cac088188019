"""Which listeners are refused, allowed, and checked for every shipped configuration."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.models import ROOT

from iskander.config.loader import load_config
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.transport.addresses import require_addresses, require_extension_protected
from iskander.gateway.transport.exposure import Listener, exposure_error

OPEN = Listener("server.address", "host:1", ("TLS", "tokens"))
PROTECTED = {
    "access": {"tokens": "tokens.toml"},
    "tls": {"certificate": "chain.pem"},
}
QUIET = {"admin": {"address": ""}}


def configured(**sections: Any) -> Config:
    return msgspec.convert(QUIET | sections, Config)


@pytest.mark.parametrize(
    "resolved",
    [["127.0.0.1"], ["127.9.9.9"], ["::1"], ["::1%lo", "127.0.0.1"], ["::ffff:127.0.0.1"]],
)
def test_loopback_needs_nothing(resolved: list[str]) -> None:
    assert not exposure_error(OPEN, resolved, ())


@pytest.mark.parametrize(
    "resolved",
    [
        [],
        ["0.0.0.0"],
        ["::"],
        ["::ffff:0.0.0.0"],
        ["::ffff:10.0.0.1"],
        ["10.0.0.1"],
        ["192.0.2.1"],
        ["fe80::1%eth0"],
        ["127.0.0.1", "10.0.0.1"],
    ],
)
def test_network_is_refused_unless_the_listener_is_named(resolved: list[str]) -> None:
    error = exposure_error(OPEN, resolved, ("admin.address", "http.address"))
    assert error.startswith("server.address host:1 is open to the network without TLS and tokens")
    assert error.endswith('permit it by access.allow_unprotected_network = ["server.address"]')
    assert ("unknown here" in error) == (not resolved)
    assert not exposure_error(OPEN, resolved, ("server.address",))
    assert not exposure_error(OPEN._replace(lacks=()), resolved, ())


@pytest.mark.parametrize(
    ("sections", "lacks"),
    [
        ({"server": {"address": "0.0.0.0:1"}}, "without TLS (`tls.certificate`) and tokens"),
        ({"server": {"address": "[::]:1"}}, "without TLS"),
        ({"server": {"address": "0:1"}}, "server.address 0:1"),
        ({"server": {"address": ["127.0.0.1:1", "0.0.0.0:1"]}}, "server.address 0.0.0.0:1"),
        ({"server": {"address": "no-such-host.invalid:1"}}, "host is unknown here"),
        ({"http": {"address": "0.0.0.0:1"}}, "http.address 0.0.0.0:1"),
        ({"inferential": {"address": "tcp://*:1"}}, "inferential.address 0.0.0.0:1"),
        ({"admin": {"address": "0.0.0.0:1"}}, "which it cannot have"),
        (
            {"server": {"address": "0.0.0.0:1"}, "tls": PROTECTED["tls"]},
            "without tokens (`access.tokens`)",
        ),
        (
            {"server": {"address": "0.0.0.0:1"}, "access": PROTECTED["access"]},
            "without TLS (`tls.certificate`):",
        ),
        ({"inferential": {"address": "tcp://0.0.0.0:1"}, **PROTECTED}, "which it cannot have"),
        ({"admin": {"address": "0.0.0.0:1"}, **PROTECTED}, "admin.address"),
        (
            {
                "server": {"address": "0.0.0.0:1"},
                "access": {"allow_unprotected_network": ["admin.address"]},
            },
            "server.address",
        ),
    ],
)
def test_every_listener_is_checked(sections: dict[str, Any], lacks: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_addresses(configured(**sections))
    assert lacks in caught.value.message


@pytest.mark.parametrize(
    "sections",
    [
        {"server": {"address": ["127.0.0.1:1", "[::1]:1", "localhost:2"]}},
        {"server": {"address": "unix:/tmp/x.sock"}, "inferential": {"address": "ipc:///tmp/y"}},
        {"server": {"address": "0.0.0.0:1"}, "http": {"address": "0.0.0.0:2"}, **PROTECTED},
    ],
)
def test_protected_listeners_are_accepted(
    sections: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    require_addresses(configured(**sections))
    assert not caplog.records


def test_permitted_listener_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    permitted = {"allow_unprotected_network": ["admin.address"]}
    with caplog.at_level(logging.WARNING):
        require_addresses(configured(admin={"address": "0.0.0.0:1"}, access=permitted))
    (record,) = caplog.records
    assert "admin.address 0.0.0.0:1 is open to the network" in record.getMessage()


def test_host_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"inside.example": ["127.0.0.1", "::1"], "outside.example": ["127.0.0.1", "10.0.0.1"]}

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    require_addresses(configured(server={"address": "inside.example:1"}))
    with pytest.raises(ConfigError, match=r"server\.address outside\.example:1 is open"):
        require_addresses(configured(server={"address": "outside.example:1"}))


def test_extension_is_checked_by_its_bound_address() -> None:
    config = configured(extensions={"protocols": {"lines": {}}})
    for harmless in ("127.0.0.1:5", "unix:/tmp/lines.sock"):
        require_extension_protected(config, "lines", harmless)
    with pytest.raises(ConfigError, match=r"extensions\.protocols\.lines 0\.0\.0\.0:5"):
        require_extension_protected(config, "lines", "0.0.0.0:5")


def test_unknown_listener_is_no_permission(tmp_path: Path) -> None:
    file = tmp_path / "iskander.toml"
    text = '[access]\nallow_unprotected_network = ["server"]\n[repository]\npath = "models"\n'
    file.write_text(text)
    with pytest.raises(ConfigError, match="server is no listener; expected one of"):
        load_config(file, environment={})
    file.write_text(text.replace('"server"', '"extensions.protocols.lines"'))
    with pytest.raises(ConfigError, match="is no listener"):
        load_config(file, environment={})
    file.write_text(
        text.replace('"server"', '"extensions.protocols.lines"') + "[extensions.protocols.lines]"
    )
    load_config(file, environment={})


def shipped(folder: Path) -> list[Path]:
    """Configurations in `configs`, also those inside manifests."""
    found = [each for each in (ROOT / "configs").rglob("*.toml") if "server" in each.read_text()]
    for manifest in (ROOT / "configs" / "kubernetes").rglob("configmap.yaml"):
        text = manifest.read_text().partition("iskander.toml: |\n")[2].partition("\n---")[0]
        name = manifest.parent.name
        text = "\n".join(line[4:] for line in text.splitlines()).replace("/sockets", str(folder))
        (folder / f"{name}.toml").write_text(text)
        found.append(folder / f"{name}.toml")
    return [each for each in found if "[server]" in each.read_text()]


def test_shipped_configurations_are_accepted(tmp_path: Path) -> None:
    files = shipped(tmp_path)
    assert {"server.toml", "sidecar.toml", "quickstart.toml"} <= {each.name for each in files}
    for file in files:
        try:
            config = load_config(file, environment={}).config
        except ConfigError as error:
            assert "nothing to serve" in error.message, file
            continue
        require_addresses(config)


def test_each_listener_without_protection_can_be_permitted(tmp_path: Path) -> None:
    """The name that the error tells to set is accepted."""
    addresses = {
        "server": "0.0.0.0:1",
        "http": "0.0.0.0:2",
        "inferential": "tcp://*:3",
        "admin": "0.0.0.0:4",
    }
    file = tmp_path / "iskander.toml"
    for section, address in addresses.items():
        text = f'[repository]\npath = "models"\n[{section}]\naddress = "{address}"\n'
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            require_addresses(load_config(file, environment={}).config)
        permit = caught.value.message.rpartition("permit it by access.")[2]
        file.write_text(f"{text}[access]\n{permit}\n")
        require_addresses(load_config(file, environment={}).config)
