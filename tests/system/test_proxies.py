"""HAProxy, nginx and Envoy with the files of `configs/proxies`, in front of three gateways."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from support.processes import eventually
from support.proxies import (
    CONFIGS,
    LAME_DUCK_S,
    SPREAD_MAX,
    Load,
    adapted,
    fleet,
    free_ports,
    program,
    proxy,
)

CALLS = 6
REQUESTS = 1500
FILES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf", "envoy": "envoy.yaml"}


def command(name: str, path: Path) -> list[str]:
    """The command that runs a proxy in the foreground."""
    words = {
        "haproxy": ["-db", "-f", str(path)],
        "nginx": ["-e", "stderr", "-c", str(path), "-g", "daemon off;"],
        "envoy": ["--disable-hot-restart", "--concurrency", "2", "-l", "warn", "-c", str(path)],
    }
    return [program(name), *words[name]]


@pytest.mark.parametrize(
    ("name", "words"),
    [("haproxy", ["-c", "-f"]), ("nginx", ["-t", "-c"]), ("envoy", ["--mode", "validate", "-c"])],
    ids=FILES,
)
def test_files_are_valid(name: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / FILES[name]
    path.write_text((CONFIGS / FILES[name]).read_text().replace("/run/", f"{tmp_path}/"))
    check = [program(name), *words, str(path)]
    run = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "warning" not in (run.stdout + run.stderr).lower()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["haproxy", "nginx", "envoy"])
def test_no_request_of_retrying_clients_is_lost(name: str, tmp_path: Path) -> None:
    """One gateway is drained, another one killed while it is away; then both start again.

    With all three, the calls are spread within 20 %.
    """
    program(name)
    (port,) = free_ports(1)
    # nginx does not check the readiness, so it would not notice the lame duck.
    lame_duck_s = 0.0 if name == "nginx" else LAME_DUCK_S
    with fleet(tmp_path, lame_duck_s=lame_duck_s) as gateways:
        path = adapted(FILES[name], tmp_path, gateways, port)
        address = f"127.0.0.1:{port}"
        with (
            proxy(command(name, path), tmp_path, port),
            Load(address, calls=CALLS, streams=0) as calls,
        ):
            for index in range(3):
                gateways.wait_served(index)
            assert gateways.spread(REQUESTS) <= SPREAD_MAX
            with Load(address, calls=0, streams=3) as streams:
                loads = [calls, streams]
                _wait(loads)
                gateways.drain(0)
                _wait(loads)
                gateways.kill(1)
                _wait(loads)
                for index in (0, 1):
                    gateways.restart(index)
                    gateways.wait_served(index)
            assert calls.failures == []
            assert streams.failures == []
            # HAProxy's `slowstart` is over after this many requests.
            for index in range(3):
                gateways.wait_served(index, REQUESTS)
            assert gateways.spread(REQUESTS) <= SPREAD_MAX
        assert calls.failures == []
        print(f"{name}: {calls.results} calls, {streams.results} batches, none lost")  # noqa: T201


def _wait(loads: list[Load]) -> None:
    for load in loads:
        load.wait(100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["direct", *FILES])
def test_streams_move_at_the_maximum_age_of_a_connection(name: str, tmp_path: Path) -> None:
    """Open streams end with a retryable error after the grace, and continue; calls see nothing.

    `direct` is the client with the addresses of all gateways, without a proxy.
    """
    (port,) = free_ports(1)
    age = {"max_connection_age_s": 1.0, "max_connection_age_grace_s": 1.0}
    with fleet(tmp_path, **age) as gateways, contextlib.ExitStack() as stack:
        target: str | list[str] = gateways.addresses
        if name != "direct":
            path = adapted(FILES[name], tmp_path, gateways, port)
            stack.enter_context(proxy(command(name, path), tmp_path, port))
            target = f"127.0.0.1:{port}"
        with Load(target, calls=2, streams=2) as load:
            eventually(lambda: load.failures or gateways.expired() >= 4, 90.0, "the end of streams")
            load.wait(100)
        assert load.failures == []
