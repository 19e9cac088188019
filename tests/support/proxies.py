"""Three gateways at one port of three loopback addresses, proxies in front of them, and load."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.client import Client
from support import models
from support.processes import BIN, READY_WITHIN_S, STOP_WITHIN_S, Gateway, eventually

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs" / "proxies"
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
LANE = "ids/1"
SPREAD_MAX = 0.2
ROWS_MAX = 64
PAUSE_S = 0.002
LAME_DUCK_S = 2.5
"""Longer than the two failed health checks after which the proxies choose another gateway."""
_FOLDERS = os.pathsep.join([str(BIN), os.environ.get("PATH", ""), "/usr/sbin"])


def program(name: str) -> str:
    """The path of a program; the test is skipped without it."""
    path = shutil.which(name, path=_FOLDERS)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def free_ports(count: int) -> list[int]:
    """Ports that are free on all addresses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


class Fleet:
    """Three gateways with the model `ids`.

    Args:
        folder: For the model, and a folder for each gateway.
        paths: Another model for each gateway, under the same name.
        server: Settings of the section `server` of all gateways.
    """

    def __init__(self, folder: Path, paths: Sequence[Path] = (), **server: Any) -> None:
        self.port, self.admin_port = free_ports(2)
        paths = paths or [models.row_ids(folder / "ids")] * len(HOSTS)
        self.gateways = []
        for host, path in zip(HOSTS, paths, strict=True):
            (folder / host).mkdir()
            self.gateways.append(
                Gateway(
                    folder / host,
                    [{"name": "ids", "path": str(path), "intra_threads": 1}],
                    server={"address": f"{host}:{self.port}", **server},
                    admin={"address": f"{host}:{self.admin_port}"},
                    workers={"groups": ["0"], "reattach_s": 5.0},
                )
            )

    @property
    def addresses(self) -> list[str]:
        return [f"{host}:{self.port}" for host in HOSTS]

    def start(self) -> None:
        for gateway in self.gateways:
            gateway.start()
        for gateway in self.gateways:
            gateway.wait_full()

    def restart(self, index: int) -> None:
        gateway = self.gateways[index].start()
        gateway.wait_full()

    def drain(self, index: int) -> None:
        """SIGTERM; the gateway ends without an error."""
        assert self.gateways[index].stop() == 0

    def kill(self, index: int) -> None:
        """SIGKILL the gateway, then its workers."""
        process = self.gateways[index].process
        assert process is not None
        process.kill()
        process.wait(STOP_WITHIN_S)
        self.gateways[index].end()

    def completed(self) -> list[int]:
        """Completed requests of each gateway."""
        return [each.stats()["lanes"][LANE].get("completed", 0) for each in self.gateways]

    def wait_served(self, index: int, count: int = 20) -> None:
        """Wait until a gateway completes requests of the load."""
        first = self.completed_by(index)
        eventually(
            lambda: self.completed_by(index) >= first + count,
            READY_WITHIN_S,
            f"requests at gateway {index}",
        )

    def completed_by(self, index: int) -> int:
        count: int = self.gateways[index].stats()["lanes"][LANE].get("completed", 0)
        return count

    def expired(self) -> int:
        """Connections of all gateways that were closed after the grace of their maximum age."""
        return sum(map(self._expired, HOSTS))

    def _expired(self, host: str) -> int:
        url = f"http://{host}:{self.admin_port}/metrics"
        with urllib.request.urlopen(url, timeout=READY_WITHIN_S) as response:
            page = response.read().decode()
        found = re.search(r'ended_total\{reason="max_age_grace"\} (\d+)', page)
        return int(found[1]) if found else 0

    def shares(self, requests: int) -> list[int]:
        """Wait for a number of requests, and return those of each gateway; all of them run."""
        before = self.completed()

        def completed() -> list[int]:
            return [now - then for now, then in zip(self.completed(), before, strict=True)]

        eventually(lambda: sum(completed()) >= requests, READY_WITHIN_S, f"{requests} requests")
        return completed()

    def spread(self, requests: int) -> float:
        """The largest share of a number of requests less the smallest, divided by the mean."""
        each = self.shares(requests)
        spread = (max(each) - min(each)) / (sum(each) / len(each))
        sys.stdout.write(f"requests of each gateway: {each}, spread {spread:.1%}\n")
        return spread

    def stop(self) -> None:
        for gateway in self.gateways:
            assert gateway.stop() == 0, gateway.text()[-4000:]

    def end(self) -> None:
        for gateway in self.gateways:
            gateway.end()


@contextlib.contextmanager
def fleet(folder: Path, paths: Sequence[Path] = (), **server: Any) -> Iterator[Fleet]:
    """Three running gateways, drained at the end; after a failure, their logs are printed."""
    gateways = Fleet(folder, paths, **server)
    try:
        gateways.start()
        yield gateways
        gateways.stop()
    except BaseException:
        for gateway in gateways.gateways:
            sys.stderr.write(gateway.text()[-4000:])
        raise
    finally:
        gateways.end()


def adapted(name: str, folder: Path, gateways: Fleet, port: int) -> Path:
    """A file of `configs/proxies` with the addresses of a test; nothing else is changed."""
    text = (CONFIGS / name).read_text()
    listening = {
        "haproxy.cfg": ("bind :50050", f"bind 127.0.0.1:{port}"),
        "nginx.conf": ("listen 50050", f"listen 127.0.0.1:{port}"),
        "envoy.yaml": ("0.0.0.0, port_value: 50050", f"127.0.0.1, port_value: {port}"),
    }
    # The comments of the files have some of these texts too.
    replaced = [listening[name], ("50051", str(gateways.port)), ("50052", str(gateways.admin_port))]
    replaced += [(f"10.0.0.{11 + index}", host) for index, host in enumerate(HOSTS)]
    replaced += [("/run/nginx.pid", str(folder / "nginx.pid"))] if name == "nginx.conf" else []
    for old, new in replaced:
        assert old in text or old == "50052", f"{name} has no {old}"
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return path


@contextlib.contextmanager
def proxy(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """A proxy as a child process in the foreground, until it accepts connections."""
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        eventually(lambda: _accepts(port) or process.poll() is not None, what="the proxy's port")
        assert process.poll() is None, log.read_text()
        yield
        assert process.poll() is None, log.read_text()
    finally:
        sys.stdout.write(log.read_text()[-2000:])
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Load:
    """Retrying clients of one address or several, each with a thread; they check every result.

    The streams of `stream` are open until the end, and are resumed after a failure.

    Attributes:
        results: Correct results.
        failures: Errors that reached a caller, and wrong results.
    """

    def __init__(self, address: str | list[str], *, calls: int, streams: int) -> None:
        self.results = 0
        self.failures: list[str] = []
        self._address = address
        self._stop = threading.Event()
        self._lock = threading.Lock()
        targets: list[Callable[[Client, int], None]] = [self._call] * calls
        targets += [self._stream] * streams
        self._threads = [
            threading.Thread(target=self._run, args=(target, number), name=f"load {number}")
            for number, target in enumerate(targets)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_WITHIN_S)
            assert not thread.is_alive(), thread.name

    def wait(self, results: int) -> None:
        """Wait for more results."""
        wanted = self.results + results
        eventually(lambda: self.results >= wanted, READY_WITHIN_S, f"{results} results")

    def _run(self, target: Callable[[Client, int], None], number: int) -> None:
        try:
            with Client(self._address) as client:
                target(client, number)
        except Exception as error:
            self.failures.append(f"{threading.current_thread().name}: {error!r}")

    def _call(self, client: Client, number: int) -> None:
        for sent in self._batches(number):
            self._check(sent, client.score("ids", pa.record_batch({"x": sent})))

    def _stream(self, client: Client, number: int) -> None:
        sent: list[np.ndarray[Any, Any]] = []

        def batches() -> Iterator[pa.RecordBatch]:
            for each in self._batches(number):
                sent.append(each)
                yield pa.record_batch({"x": each})

        for result in client.stream("ids", batches()):
            self._check(sent.pop(0), result)
        assert not sent, "batches without a result"

    def _batches(self, number: int) -> Iterator[np.ndarray[Any, Any]]:
        for turn in itertools.count():
            if self._stop.wait(PAUSE_S):
                return
            start = number << 40 | turn << 10
            yield np.arange(start, start + 1 + turn % ROWS_MAX)

    def _check(self, sent: np.ndarray[Any, Any], result: Any) -> None:
        if result["y"].to_numpy().tolist() != (3 * sent + 1).tolist():
            self.failures.append("a wrong result")
        with self._lock:
            self.results += 1
