"""Clients of the same machine that hand their batches over in memory: real ones, and bad ones."""

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

from iskander.auth.tokens import add_token
from iskander.client import Client
from iskander.client.shared_memory import WORTH_BYTES, Region
from iskander.control.shared_regions import REGION_HEADER, BodyLocation, encode, read_body_location
from iskander.errors import (
    ContractError,
    IskanderError,
    LimitExceeded,
    NotReady,
    Overloaded,
    Unauthenticated,
    Unsupported,
)

ROWS = 20_000
SHARED_BYTES = 2 * MIB


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with lender(tmp_path) as up:
        yield up


def lender(folder: Path, **sections: Any) -> Any:
    served = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids"))},
        {"name": "all", "path": str(passing(folder / "all"))},
        {"name": "wide", "path": str(models.WIDE)},
    ]
    sections.setdefault("shared_memory", {"path": str(folder / "memory")})
    return running(folder, served, workers={"groups": ["0"]}, **sections)


def passing(folder: Path) -> Path:
    models.row_ids(folder)
    (folder / "manifest.toml").write_text(models.MANIFEST_ALL)
    return folder


def sharing(gateway: Gateway, shared_bytes: int = SHARED_BYTES) -> Client:
    return Client(gateway.address, token=gateway.token, shared_bytes=shared_bytes)


def ids(first: int, rows: int = ROWS) -> pa.RecordBatch:
    return pa.record_batch([pa.array(np.arange(first, first + rows))], names=["x"])


def answers(first: int, rows: int = ROWS) -> list[int]:
    return list(3 * np.arange(first, first + rows) + 1)


def lent(gateway: Gateway) -> dict[str, int]:
    found: dict[str, int] = gateway.stats()["shared_memory"]
    return found


def test_results_are_those_of_the_connection(gateway: Gateway) -> None:
    generator = np.random.default_rng(1)
    batches = []
    for rows in (8192, 100, 4096, 8192, 1):
        values = pa.array(generator.standard_normal(rows * 64, np.float32))
        batches.append(
            pa.record_batch([pa.FixedSizeListArray.from_arrays(values, 64)], names=["features"])
        )
    with gateway.client() as plain, sharing(gateway, 8 * MIB) as client:
        wanted = list(plain.stream("wide", batches))
        got = list(client.stream("wide", batches))
        assert lent(gateway) == {"regions": 1, "lent_bytes": 8 * MIB}
    for one, other in zip(wanted, got, strict=True):
        np.testing.assert_allclose(one.column("score"), other.column("score"), rtol=1e-5)
    eventually(lambda: lent(gateway)["regions"] == 0, what="memory that is given back")
    gateway.wait_idle()


def test_many_more_batches_than_there_is_room_for(gateway: Gateway) -> None:
    batches = (ids(number * ROWS) for number in range(100))
    with sharing(gateway, 400_000) as client:
        for number, result in enumerate(client.stream("ids", batches)):
            assert result.column("y").to_pylist() == answers(number * ROWS)


def test_columns_that_only_pass(gateway: Gateway) -> None:
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


def test_terms_and_errors_go_with_their_batches(gateway: Gateway) -> None:
    late = {"deadline_ms": 0}
    items = [ids(0), (ids(1), late), ids(2), (ids(3), late), ids(4)]
    with sharing(gateway, 400_000) as client:
        outcomes = list(client.outcomes("ids", items))
        assert [isinstance(outcome, IskanderError) for outcome in outcomes] == [
            False, True, False, True, False,
        ]  # fmt: skip
        for number in (0, 2, 4):
            assert outcomes[number].column("y").to_pylist() == answers(number)
        with pytest.raises(IskanderError):
            list(client.stream("ids", items))
        # The memory of a stream that failed serves the next one.
        assert client.score("ids", ids(7)).column("y").to_pylist() == answers(7)
        assert lent(gateway)["regions"] == 1


def test_streams_at_once_have_memory_of_their_own(gateway: Gateway) -> None:
    failures: list[str] = []

    def score(client: Client, base: int) -> None:
        for turn in range(5):
            batches = [ids(base + turn * 10 + number) for number in range(5)]
            for number, result in enumerate(client.stream("ids", batches)):
                if result.column("y").to_pylist() != answers(base + turn * 10 + number):
                    failures.append(f"{base} {turn} {number}")

    with sharing(gateway, 500_000) as client:
        threads = [threading.Thread(target=score, args=(client, 10**6 * n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert 1 <= lent(gateway)["regions"] <= 4
    eventually(lambda: lent(gateway)["regions"] == 0, what="memory that is given back")


def test_a_stream_that_is_left_early(gateway: Gateway) -> None:
    with sharing(gateway, 400_000) as client:
        for _ in range(3):
            stream = client.stream("ids", (ids(number) for number in range(1000)))
            assert next(stream).column("y").to_pylist() == answers(0)
            stream.close()  # type: ignore[attr-defined]
        assert client.score("ids", ids(5)).column("y").to_pylist() == answers(5)
    gateway.wait_idle()
    eventually(lambda: lent(gateway)["regions"] == 0, what="memory that is given back")


KILLED = """
import os, signal, sys
import numpy as np, pyarrow as pa
from iskander.client import Client
client = Client(sys.argv[1], shared_bytes=1 << 20)
batch = pa.record_batch([pa.array(np.arange(20_000))], names=["x"])
for number, _ in enumerate(client.stream("ids", (batch for _ in range(10**9)))):
    if number == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_leaves_nothing(gateway: Gateway) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, gateway.address], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    eventually(lambda: lent(gateway) == {"regions": 0, "lent_bytes": 0}, what="no memory lent")
    gateway.wait_idle()
    eventually(
        lambda: not any("region" in name for name in shared_mappings(gateway.pid)),
        what="nothing mapped",
    )
    with sharing(gateway) as client:
        assert client.score("ids", ids(1)).column("y").to_pylist() == answers(1)


def test_a_gateway_that_is_started_anew(tmp_path: Path) -> None:
    with lender(tmp_path, server={"address": f"unix:{tmp_path}/grpc"}) as up:
        client = sharing(up)
        assert client.score("ids", ids(1)).column("y").to_pylist() == answers(1)
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
        up.start()

        def score() -> Any:
            try:
                return client.score("ids", ids(2)).column("y").to_pylist()
            except (NotReady, flight.FlightError, pa.ArrowException):
                return None

        assert eventually(score, what="a score") == answers(2)
        client.close()


def test_a_drain_answers_what_was_handed_over(tmp_path: Path) -> None:
    with lender(tmp_path) as up:
        client = sharing(up)
        stream = client.outcomes("ids", (ids(number) for number in range(100_000)))
        assert next(stream).column("y").to_pylist() == answers(0)  # type: ignore[union-attr]
        up.signal(signal.SIGTERM)
        number, said = 1, None
        try:
            for result in stream:
                if isinstance(result, IskanderError):
                    said = result
                    continue
                assert result.column("y").to_pylist() == answers(number)
                number += 1
        except IskanderError as error:
            said = error
        assert said is not None
        assert said.code == "draining"
        assert up.wait() == 0
        client.close()


# ---- Who does not get any, and who misuses it


def test_a_server_that_lends_none(tmp_path: Path) -> None:
    with (
        lender(tmp_path, shared_memory={"path": ""}) as up,
        sharing(up) as client,
        pytest.raises(Unsupported, match=r"shared_memory\.path"),
    ):
        client.score("ids", ids(0))


def test_more_than_there_is(tmp_path: Path) -> None:
    settings = {"path": str(tmp_path / "memory"), "region_bytes": MIB, "total_bytes": MIB}
    with lender(tmp_path, shared_memory=settings) as up:
        with sharing(up, MIB + 1) as client, pytest.raises(LimitExceeded):
            client.score("ids", ids(0))
        with sharing(up, MIB) as first, sharing(up, MIB) as second:
            first.score("ids", ids(0))
            with pytest.raises(Overloaded) as caught:
                second.score("ids", ids(0))
            assert caught.value.retryable


def test_it_is_for_those_who_show_a_token(tmp_path: Path) -> None:
    token = add_token(tmp_path / "tokens.toml", "fleet", ("*",), manage=True)
    access = {"tokens": str(tmp_path / "tokens.toml")}
    with lender(tmp_path, access=access, token=token) as up:
        with Client(up.address, shared_bytes=MIB) as stranger, pytest.raises(Unauthenticated):
            stranger.score("ids", ids(0))
        with Client(up.address, token=token, shared_bytes=MIB) as client:
            assert client.score("ids", ids(0)).column("y").to_pylist() == answers(0)


class Handed:
    """Streams that name a region, and say of it what they like."""

    def __init__(self, gateway: Gateway, region: Region) -> None:
        self._client = raw.RawClient(gateway.address)
        self._metadata = [[REGION_HEADER, region.name]]

    def __enter__(self) -> Handed:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def exchange(self, model: str, schema: pa.Schema, message: bytes) -> dict[str, Any]:
        opening = raw.descriptor(model) + raw.schema_data(schema)
        frames = [opening, raw.field(3, message)]
        return self._client.exchange(frames, metadata=self._metadata)


@pytest.fixture
def region(gateway: Gateway) -> Iterator[Region]:
    lent = Region(gateway.folder / "memory", MIB, 5.0)
    lent.begin(ids(0).schema)
    yield lent
    lent.close()
    eventually(lambda: not gateway.stats()["shared_memory"]["regions"], what="no memory lent")


def test_names_that_nothing_is_lent_by(gateway: Gateway) -> None:
    opening = raw.descriptor("ids") + raw.schema_data(ids(0).schema)
    with raw.RawClient(gateway.address) as client:
        for name in ("0" * 32, "../../etc/passwd"):
            said = client.exchange([opening], metadata=[[REGION_HEADER, name]])
            assert said["code"] == "NOT_FOUND"
            assert said["trailers"]["iskander-code"] == "region_not_found"


def test_places_that_are_none_cost_nobody_else_anything(gateway: Gateway, region: Region) -> None:
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
    with sharing(gateway) as other, Handed(gateway, region) as handed:
        for message in bad:
            said = handed.exchange("ids", ids(0).schema, message)
            assert said["trailers"]["iskander-code"] == "malformed", message
            assert other.score("ids", ids(3)).column("y").to_pylist() == answers(3)
        said = handed.exchange("ids", ids(0).schema, good)
        (result,) = raw.read_batches(said["frames"])[0]
        assert result.column("y").to_pylist() == answers(0)


def test_a_region_that_was_given_back(gateway: Gateway, region: Region) -> None:
    good = region.put(ids(0))
    assert good is not None
    region.close()
    eventually(lambda: not lent(gateway)["regions"], what="memory that is given back")
    with Handed(gateway, region) as handed:
        said = handed.exchange("ids", ids(0).schema, good)
        assert said["trailers"]["iskander-code"] == "region_not_found"


def test_a_client_that_writes_while_it_is_read(gateway: Gateway, region: Region) -> None:
    """Its own results are anyone's guess, and nobody else's are."""
    words = pa.record_batch([pa.array(["word"] * ROWS), ids(0).column("x")], names=["w", "x"])
    region.begin(words.schema)
    message = region.put(words)
    assert message is not None
    is_over = threading.Event()

    def scribble() -> None:
        generator = np.random.default_rng(0)
        target = np.frombuffer(region._segment.view, np.uint8)
        while not is_over.is_set():
            start = int(generator.integers(0, 200_000))
            target[start : start + 5000] = generator.integers(0, 256, 5000, np.uint8)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        with sharing(gateway) as other, Handed(gateway, region) as handed:
            for turn in range(50):
                said = handed.exchange("all", words.schema, message)
                assert said["code"] in ("OK", "INVALID_ARGUMENT")
                result = other.score("ids", ids(turn))
                assert result.column("y").to_pylist() == answers(turn)
    finally:
        is_over.set()
        scribbler.join()
    gateway.wait_idle()


def test_each_process_lends_its_own(tmp_path: Path) -> None:
    with lender(tmp_path, server={"processes": 2}) as up:
        for number in (0, 1):
            found = client_of(up, number)
            found.close()
        assert sorted(path.name for path in tmp_path.glob("memory*")) == [
            "memory", "memory.1", "memory.1.lock", "memory.lock",
        ]  # fmt: skip
        for _ in range(8):  # To whichever process the kernel deals them.
            with sharing(up) as client:
                assert client.score("ids", ids(4)).column("y").to_pylist() == answers(4)
    assert not list(tmp_path.glob("memory*[!k]"))


def test_a_region_of_another_process_is_let_go(tmp_path: Path) -> None:
    with (
        lender(tmp_path, server={"processes": 2}) as up,
        client_of(up, 0) as first,
        client_of(up, 1) as second,
    ):
        for client in (first, second):
            client._regions._length_bytes = MIB
            client.score("ids", ids(0))
        # As where a connection was lost, and dealt to another process anew.
        (own,) = second._regions._idle
        own.close()
        first._regions._idle, second._regions._idle = [], first._regions._idle
        with pytest.raises(NotReady, match="another answers") as caught:
            second.score("ids", ids(1))
        assert caught.value.retryable
        assert second.score("ids", ids(2)).column("y").to_pylist() == answers(2)


def test_a_batch_of_another_schema_is_refused_here_and_there(gateway: Gateway) -> None:
    other = pa.record_batch([ids(0).column("x").cast(pa.float64())], names=["x"])
    for client in (sharing(gateway), gateway.client()):
        with client, pytest.raises(ContractError, match="one schema"):
            list(client.stream("ids", [ids(0), other], timeout_s=20))


def test_what_a_feed_raises_is_raised(gateway: Gateway) -> None:
    def feed(error: Exception) -> Iterator[pa.RecordBatch]:
        yield ids(0)
        raise error

    for error in (OSError("the file is gone"), pa.ArrowInvalid("no such column")):
        for client in (sharing(gateway), gateway.client()):
            with client, pytest.raises(type(error), match=str(error)):
                list(client.stream("ids", feed(error), timeout_s=20))


def test_small_batches_do_not_take_that_way(gateway: Gateway) -> None:
    with sharing(gateway) as client:
        small = ids(0, WORTH_BYTES // 8 - 1)
        assert client.score("ids", small).column("y").to_pylist() == answers(0, len(small))
