"""Batches of local clients in shared-memory regions, from correct and hostile clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support import models, raw
from support.dealt import client_of
from support.processes import MIB, Gateway, eventually, running, shared_mappings

from iskander.client import OFF, Client, Retry
from iskander.client.calls.shared_memory import IDLE_REGIONS_MAX, Region, RegionPool
from iskander.client.calls.sharing import WORTH_BYTES, Sharing
from iskander.errors import (
    ContractError,
    IskanderError,
    LimitExceeded,
    NotReady,
    Overloaded,
    RegionNotFound,
    Unauthenticated,
    Unsupported,
)
from iskander.gateway.auth.tokens import add_token
from iskander.interprocess.control.shared_regions import (
    REGION_HEADER,
    BodyLocation,
    encode,
    read_body_location,
)

ROWS = 20_000
SHARED_BYTES = 2 * MIB


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_with_regions(tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway


def running_with_regions(folder: Path, **sections: Any) -> Any:
    served = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids"))},
        {"name": "all", "path": str(passthrough_model(folder / "all"))},
        {"name": "wide", "path": str(models.WIDE)},
    ]
    sections.setdefault("shared_memory", {"path": str(folder / "memory")})
    return running(folder, served, workers={"groups": ["0"]}, **sections)


def passthrough_model(folder: Path) -> Path:
    models.row_ids(folder)
    (folder / "manifest.toml").write_text(models.MANIFEST_ALL)
    return folder


def sharing(gateway: Gateway, shared_bytes: int = SHARED_BYTES) -> Client:
    return Client(gateway.address, token=gateway.token, shared_bytes=shared_bytes, retry=OFF)


def ids(first: int, rows: int = ROWS) -> pa.RecordBatch:
    return pa.record_batch([pa.array(np.arange(first, first + rows))], names=["x"])


def expected(first: int, rows: int = ROWS) -> list[int]:
    return list(3 * np.arange(first, first + rows) + 1)


def regions(gateway: Gateway) -> dict[str, int]:
    counts: dict[str, int] = gateway.stats()["shared_memory"]
    return counts


def test_results_equal_those_without_shared_memory(gateway: Gateway) -> None:
    generator = np.random.default_rng(1)
    batches = []
    for rows in (8192, 100, 4096, 8192, 1):
        values = pa.array(generator.standard_normal(rows * 64, np.float32))
        batches.append(
            pa.record_batch([pa.FixedSizeListArray.from_arrays(values, 64)], names=["features"])
        )
    with gateway.client() as plain, sharing(gateway, 8 * MIB) as client:
        plain_results = list(plain.stream("wide", batches))
        results = list(client.stream("wide", batches))
        assert regions(gateway) == {"regions": 1, "lent_bytes": 8 * MIB}
    for one, other in zip(plain_results, results, strict=True):
        np.testing.assert_allclose(one.column("score"), other.column("score"), rtol=1e-5)
    eventually(lambda: regions(gateway)["regions"] == 0, what="the release of the region")
    gateway.wait_idle()


def test_more_batches_than_the_region_holds(gateway: Gateway) -> None:
    batches = (ids(number * ROWS) for number in range(100))
    with sharing(gateway, 400_000) as client:
        for number, result in enumerate(client.stream("ids", batches)):
            assert result.column("y").to_pylist() == expected(number * ROWS)


def test_passthrough_columns(gateway: Gateway) -> None:
    words = pa.array([f"row {row}" if row % 3 else None for row in range(ROWS)])
    pairs = pa.array([[row, None] for row in range(ROWS)], pa.list_(pa.int32(), 2))
    lists = pa.array([[1] * (row % 4) for row in range(ROWS)])
    batch = pa.record_batch(
        [words, ids(0).column("x"), pairs, lists], names=["word", "x", "pair", "list"]
    )
    coded = pa.record_batch([words.dictionary_encode(), ids(0).column("x")], names=["word", "x"])
    with sharing(gateway) as client:
        for sent in (batch, coded, batch.slice(700, 9000), batch.select(["x", "pair"])):
            (result,) = client.stream("all", [sent])
            assert result.column("y").to_pylist() == [
                3 * row + 1 for row in sent.column("x").to_pylist()
            ]
            for name in sent.schema.names:
                if name != "x":
                    assert result.column(name).equals(sent.column(name))


def test_terms_and_errors_belong_to_their_batches(gateway: Gateway) -> None:
    late = {"deadline_ms": 0}
    items = [ids(0), (ids(1), late), ids(2), (ids(3), late), ids(4)]
    with sharing(gateway, 400_000) as client:
        outcomes = list(client.outcomes("ids", items))
        assert [isinstance(outcome, IskanderError) for outcome in outcomes] == [
            False, True, False, True, False,
        ]  # fmt: skip
        for number in (0, 2, 4):
            assert outcomes[number].column("y").to_pylist() == expected(number)
        with pytest.raises(IskanderError):
            list(client.stream("ids", items))
        # The region of the failed stream is reused.
        assert client.score("ids", ids(7)).column("y").to_pylist() == expected(7)
        assert regions(gateway)["regions"] == 1


def test_concurrent_streams_use_separate_regions(gateway: Gateway) -> None:
    failures: list[str] = []

    def score(client: Client, base: int) -> None:
        for turn in range(5):
            batches = [ids(base + turn * 10 + number) for number in range(5)]
            for number, result in enumerate(client.stream("ids", batches)):
                if result.column("y").to_pylist() != expected(base + turn * 10 + number):
                    failures.append(f"{base} {turn} {number}")

    with sharing(gateway, 500_000) as client:
        threads = [threading.Thread(target=score, args=(client, 10**6 * n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert 1 <= regions(gateway)["regions"] <= 4
    eventually(lambda: regions(gateway)["regions"] == 0, what="the release of the region")


def test_stream_closed_early_frees_its_region(gateway: Gateway) -> None:
    with sharing(gateway, 400_000) as client:
        for _ in range(3):
            stream = client.stream("ids", (ids(number) for number in range(1000)))
            assert next(stream).column("y").to_pylist() == expected(0)
            stream.close()  # type: ignore[attr-defined]
        assert client.score("ids", ids(5)).column("y").to_pylist() == expected(5)
    gateway.wait_idle()
    eventually(lambda: regions(gateway)["regions"] == 0, what="the release of the region")


KILLED = """
import os, signal, sys
import numpy as np, pyarrow as pa
from iskander.client import OFF, Client
client = Client(sys.argv[1], shared_bytes=1 << 20)
batch = pa.record_batch([pa.array(np.arange(20_000))], names=["x"])
for number, _ in enumerate(client.stream("ids", (batch for _ in range(10**9)))):
    if number == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_client_leaves_no_region(gateway: Gateway) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, gateway.address], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    eventually(
        lambda: regions(gateway) == {"regions": 0, "lent_bytes": 0},
        what="the release of the region",
    )
    gateway.wait_idle()
    eventually(
        lambda: not any("region" in name for name in shared_mappings(gateway.pid)),
        what="the unmapping of the region",
    )
    with sharing(gateway) as client:
        assert client.score("ids", ids(1)).column("y").to_pylist() == expected(1)


def test_client_reconnects_to_a_restarted_gateway(tmp_path: Path) -> None:
    with running_with_regions(tmp_path, server={"address": f"unix:{tmp_path}/grpc"}) as gateway:
        client = sharing(gateway)
        assert client.score("ids", ids(1)).column("y").to_pylist() == expected(1)
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
        gateway.start()

        def score() -> Any:
            try:
                return client.score("ids", ids(2)).column("y").to_pylist()
            except (NotReady, flight.FlightError, pa.ArrowException):
                return None

        assert eventually(score, what="a score") == expected(2)
        client.close()


def test_drain_completes_accepted_batches(tmp_path: Path) -> None:
    with running_with_regions(tmp_path) as gateway:
        client = sharing(gateway)
        stream = client.outcomes("ids", (ids(number) for number in range(100_000)))
        assert next(stream).column("y").to_pylist() == expected(0)  # type: ignore[union-attr]
        gateway.signal(signal.SIGTERM)
        number, error = 1, None
        try:
            for result in stream:
                if isinstance(result, IskanderError):
                    error = result
                    continue
                assert result.column("y").to_pylist() == expected(number)
                number += 1
        except IskanderError as caught:
            error = caught
        assert error is not None
        assert error.code == "draining"
        assert gateway.wait() == 0
        client.close()


# ---- Rejected and hostile clients


def test_server_without_shared_memory_rejects_regions(tmp_path: Path) -> None:
    with (
        running_with_regions(tmp_path, shared_memory={"path": ""}) as gateway,
        sharing(gateway) as client,
        pytest.raises(Unsupported, match=r"shared_memory\.path"),
    ):
        client.score("ids", ids(0))


def test_regions_above_the_limits_are_rejected(tmp_path: Path) -> None:
    settings = {"path": str(tmp_path / "memory"), "region_bytes": MIB, "total_bytes": MIB}
    with running_with_regions(tmp_path, shared_memory=settings) as gateway:
        with sharing(gateway, MIB + 1) as client, pytest.raises(LimitExceeded):
            client.score("ids", ids(0))
        with sharing(gateway, MIB) as first, sharing(gateway, MIB) as second:
            first.score("ids", ids(0))
            with pytest.raises(Overloaded) as caught:
                second.score("ids", ids(0))
            assert caught.value.retryable


def test_regions_require_a_token(tmp_path: Path) -> None:
    token = add_token(tmp_path / "tokens.toml", "fleet", ("*",), manage=True)
    access = {"tokens": str(tmp_path / "tokens.toml")}
    with running_with_regions(tmp_path, access=access, token=token) as gateway:
        with (
            Client(gateway.address, shared_bytes=MIB) as unauthorized,
            pytest.raises(Unauthenticated),
        ):
            unauthorized.score("ids", ids(0))
        with Client(gateway.address, token=token, shared_bytes=MIB) as client:
            assert client.score("ids", ids(0)).column("y").to_pylist() == expected(0)


class RegionStreams:
    """Streams with hand-made messages for a region."""

    def __init__(self, gateway: Gateway, region: Region) -> None:
        self._client = raw.RawClient(gateway.address)
        self._metadata = [[REGION_HEADER, region.name]]

    def __enter__(self) -> RegionStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def exchange(self, model: str, schema: pa.Schema, message: bytes) -> dict[str, Any]:
        head = raw.descriptor(model) + raw.schema_data(schema)
        frames = [head, raw.field(3, message)]
        return self._client.exchange(frames, metadata=self._metadata)


@pytest.fixture
def region(gateway: Gateway) -> Iterator[Region]:
    region = Region(gateway.folder / "memory", MIB, 5.0)
    region.begin(ids(0).schema)
    yield region
    region.close()
    eventually(
        lambda: not gateway.stats()["shared_memory"]["regions"], what="the release of the region"
    )


def test_unknown_region_names_are_rejected(gateway: Gateway) -> None:
    head = raw.descriptor("ids") + raw.schema_data(ids(0).schema)
    with raw.RawClient(gateway.address) as client:
        for name in ("0" * 32, "../../etc/passwd"):
            response = client.exchange([head], metadata=[[REGION_HEADER, name]])
            assert response["code"] == "NOT_FOUND"
            assert response["trailers"]["iskander-code"] == "region_not_found"


def test_invalid_body_locations_do_not_affect_other_clients(
    gateway: Gateway, region: Region
) -> None:
    good = region.put(ids(0))
    assert good is not None
    header = read_body_location(good).header
    bad = [
        encode(BodyLocation(header, (0, 8))),
        encode(BodyLocation(header, (MIB - 8, 8 * ROWS))),
        encode(BodyLocation(header, (-8, 8 * ROWS))),
        encode(BodyLocation(b"nonsense", (0, 1 << 50))),
        encode(BodyLocation(bytes(100), (1 << 62, 1 << 62))),
        b"nonsense",
        good[:-1],
    ]
    with sharing(gateway) as other, RegionStreams(gateway, region) as streams:
        for message in bad:
            response = streams.exchange("ids", ids(0).schema, message)
            assert response["trailers"]["iskander-code"] == "malformed", message
            assert other.score("ids", ids(3)).column("y").to_pylist() == expected(3)
        response = streams.exchange("ids", ids(0).schema, good)
        (result,) = raw.read_batches(response["frames"])[0]
        assert result.column("y").to_pylist() == expected(0)


def test_closed_region_is_rejected(gateway: Gateway, region: Region) -> None:
    good = region.put(ids(0))
    assert good is not None
    region.close()
    eventually(lambda: not regions(gateway)["regions"], what="the release of the region")
    with RegionStreams(gateway, region) as streams:
        response = streams.exchange("ids", ids(0).schema, good)
        assert response["trailers"]["iskander-code"] == "region_not_found"


def test_concurrent_writes_to_a_region_do_not_affect_other_clients(
    gateway: Gateway, region: Region
) -> None:
    """Only the results of the writing client are undefined."""
    words = pa.record_batch([pa.array(["word"] * ROWS), ids(0).column("x")], names=["w", "x"])
    region.begin(words.schema)
    message = region.put(words)
    assert message is not None
    is_over = threading.Event()

    def overwrite() -> None:
        generator = np.random.default_rng(0)
        target = np.frombuffer(region._segment.view, np.uint8)
        while not is_over.is_set():
            start = int(generator.integers(0, 200_000))
            target[start : start + 5000] = generator.integers(0, 256, 5000, np.uint8)

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        with sharing(gateway) as other, RegionStreams(gateway, region) as streams:
            for turn in range(50):
                response = streams.exchange("all", words.schema, message)
                assert response["code"] in ("OK", "INVALID_ARGUMENT")
                result = other.score("ids", ids(turn))
                assert result.column("y").to_pylist() == expected(turn)
    finally:
        is_over.set()
        writer.join()
    gateway.wait_idle()


def test_each_process_has_its_own_socket(tmp_path: Path) -> None:
    with running_with_regions(tmp_path, server={"processes": 2}) as gateway:
        for number in (0, 1):
            client = client_of(gateway, number)
            client.close()
        assert sorted(path.name for path in tmp_path.glob("memory*")) == [
            "memory", "memory.1", "memory.1.lock", "memory.lock",
        ]  # fmt: skip
        for _ in range(8):  # The kernel selects the process.
            with sharing(gateway) as client:
                assert client.score("ids", ids(4)).column("y").to_pylist() == expected(4)
    assert not list(tmp_path.glob("memory*[!k]"))


def test_region_of_another_process_is_discarded(tmp_path: Path) -> None:
    with (
        running_with_regions(tmp_path, server={"processes": 2}) as gateway,
        client_of(gateway, 0) as first,
        client_of(gateway, 1) as second,
    ):
        pools = []
        for client in (first, second):
            connection = client._targets._targets[0].opened.connection
            pools.append(RegionPool(connection._ask_for_regions, MIB, is_reduced=False))
            connection._sharing = Sharing(pools[-1:].pop, is_required=True, timeout_s=10.0)
            client.score("ids", ids(0))
        # As after a reconnection to another process.
        (own,) = pools[1]._idle
        own.close()
        pools[0]._idle, pools[1]._idle = [], pools[0]._idle
        with pytest.raises(RegionNotFound, match="another answers"):
            second.score("ids", ids(1))
        assert second.score("ids", ids(2)).column("y").to_pylist() == expected(2)


def test_connection_is_used_in_place_of_regions_of_another_process(tmp_path: Path) -> None:
    with (
        running_with_regions(tmp_path, server={"processes": 2}) as gateway,
        client_of(gateway, 0) as first,
        client_of(gateway, 1) as second,
    ):
        foreign, connection = (
            client._targets._targets[0].opened.connection for client in (first, second)
        )
        pool = RegionPool(foreign._ask_for_regions, MIB, is_reduced=False)
        leases = [pool.acquire(ids(0).schema, 10.0) for _ in range(IDLE_REGIONS_MAX)]
        for lease in leases:
            lease.release()
        connection._sharing = Sharing(lambda: pool, is_required=False, timeout_s=10.0)
        second._retry = Retry(attempts=2)
        assert second.score("ids", ids(1)).column("y").to_pylist() == expected(1)
        assert not pool._idle


def test_batch_with_another_schema_is_rejected_with_and_without_regions(gateway: Gateway) -> None:
    other = pa.record_batch([ids(0).column("x").cast(pa.float64())], names=["x"])
    for client in (sharing(gateway), gateway.client()):
        with client, pytest.raises(ContractError, match="one schema"):
            list(client.stream("ids", [ids(0), other], timeout_s=20))


def test_exception_of_the_batch_iterator_is_raised(gateway: Gateway) -> None:
    def failing_batches(error: Exception) -> Iterator[pa.RecordBatch]:
        yield ids(0)
        raise error

    for error in (OSError("the file is gone"), pa.ArrowInvalid("no such column")):
        for client in (sharing(gateway), gateway.client()):
            with client, pytest.raises(type(error), match=str(error)):
                list(client.stream("ids", failing_batches(error), timeout_s=20))


def test_small_batches_are_sent_over_the_connection(gateway: Gateway) -> None:
    with sharing(gateway) as client:
        small = ids(0, WORTH_BYTES // 8 - 1)
        assert client.score("ids", small).column("y").to_pylist() == expected(0, len(small))
