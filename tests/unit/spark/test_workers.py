"""Concurrent batches of a task, one scorer per process, and the addresses of an executor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from iskander.engines.addresses import Addresses
from iskander.errors import ConfigError, ContractError
from iskander.spark import workers
from iskander.spark.servers import node_servers
from iskander.spark.workers import OPENED_MAX, cut_tables, in_order, open_scorer


def test_results_are_in_the_order_of_the_items() -> None:
    """The first call ends after the second one."""
    is_second_done = threading.Event()

    def call(item: int) -> int:
        if item == 0:
            assert is_second_done.wait(60)
        if item == 1:
            is_second_done.set()
        return 2 * item

    assert list(in_order(call, range(9), calls=2)) == [2 * item for item in range(9)]


def test_items_are_read_one_ahead_of_the_calls() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(9):
            read.append(item)
            yield item

    results = in_order(lambda item: item, items(), calls=2)
    assert next(results) == 0
    assert read == [0, 1, 2]


def test_first_error_ends_the_results() -> None:
    def call(item: int) -> int:
        if item == 2:
            raise ContractError("wrong")
        return item

    results = in_order(call, range(9), calls=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ContractError, match="wrong"):
        next(results)


def test_batches_are_cut() -> None:
    batches = [pa.record_batch({"x": range(rows)}) for rows in (0, 5, 2)]
    found = [table["x"].to_pylist() for table in cut_tables(batches, 2)]
    assert found == [[0, 1], [2, 3], [4], [0, 1]]


def test_one_scorer_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_opened", type(workers._opened)())
    monkeypatch.setattr(workers, "Scorer", lambda spec: [spec])
    spec: Any = "spec"
    first = open_scorer("0", spec)
    assert open_scorer("0", spec) is first
    monkeypatch.setattr("os.getpid", lambda: -1)
    in_fork = open_scorer("0", spec)
    assert in_fork is not first
    for index in range(1, OPENED_MAX):
        open_scorer(str(index), spec)
    assert open_scorer("0", spec) is in_fork
    assert len(workers._opened) == OPENED_MAX


def test_addresses_of_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(name, raising=False)
    target = ["a:1", "127.0.0.1:1"]
    assert node_servers(target, None).look_up() == Addresses(None, tuple(target))
    assert node_servers("a:1", "unix:/s").look_up() == Addresses("unix:/s", ("a:1",))
    servers = node_servers(target, 1)
    assert servers.look_up() == Addresses("127.0.0.1:1", ("a:1",))
    assert servers.addresses() == tuple(target)
    monkeypatch.setenv("SPARK_LOCAL_IP", "::1")
    assert servers.look_up().preferred == "[::1]:1"
    monkeypatch.setenv("SPARK_LOCAL_HOSTNAME", "a")
    assert servers.look_up() == Addresses("a:1", ("127.0.0.1:1",))


def test_invalid_addresses() -> None:
    with pytest.raises(ConfigError, match="`target` has no address"):
        node_servers([], None)
    invalid: Any
    for invalid in ("", 0, 65_536, True, 1.5):
        with pytest.raises(ConfigError, match=r"`preferred` is .*a port from 1 to 65535"):
            node_servers("a:1", invalid)
