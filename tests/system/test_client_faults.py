"""Client with retries: gateways that are killed, restarted, or drained under its calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.processes import MIB, Gateway, eventually

from iskander.client import OFF, AsyncClient, Client, Retry
from iskander.errors import (
    ConnectionFailed,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    ModelNotFound,
    Unauthenticated,
)
from iskander.gateway.auth.tokens import digest

ROWS = 20_000
"""Above the minimum of shared memory."""
PATIENT = Retry(attempts=200, wait_max_s=0.2)
"""Outlasts a restart on a slow machine."""
THREADS = 8


def start(folder: Path, server: dict[str, Any] | None = None) -> Gateway:
    """A gateway with its workers; `server` may name the address of an ended one."""
    folder.mkdir(exist_ok=True)
    served: list[dict[str, object]] = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 100)), "intra_threads": 1},
    ]
    return Gateway(
        folder,
        served,
        workers={"groups": ["0"], "reattach_s": 20.0},
        shared_memory={"path": str(folder / "memory")},
        server=server or {},
    ).start()


def restart(gateway: Gateway) -> Gateway:
    """A gateway with the same address and runtime directory, which adopts the workers."""
    server = {"address": gateway.address, "runtime_directory": str(gateway.runtime)}
    return start(gateway.folder, server)


def kill(gateway: Gateway) -> None:
    gateway.signal(signal.SIGKILL)
    gateway.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Gateway]]:
    with contextlib.ExitStack() as stack:
        gateways = []
        for name in ("a", "b"):
            gateways.append(start(tmp_path / name))
            stack.callback(gateways[-1].end)
        yield gateways


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that no test ends."""
    gateway = start(tmp_path_factory.mktemp("steady"))
    try:
        yield gateway
    finally:
        gateway.end()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = start(tmp_path)
    try:
        yield gateway
    finally:
        gateway.end()


def client_of(gateways: list[Gateway], **options: Any) -> Client:
    return Client([gateway.address for gateway in gateways], **options)


def batch(first: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"x": np.arange(first, first + rows)})


def is_right(result: Any, first: int, rows: int) -> bool:
    return bool(result["y"].to_pylist() == (3 * np.arange(first, first + rows) + 1).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, ROWS], ids=["small", "shared"])
def test_suspended_gateway_is_left_until_it_runs_again(pair: list[Gateway], rows: int) -> None:
    with client_of(pair) as client:

        def requests(gateway: Gateway) -> int:
            assert is_right(client.score("ids", batch(5, rows)), 5, rows)
            return int(gateway.stats()["lanes"]["ids/1"].get("requests", 0))

        for gateway in pair:
            eventually(lambda each=gateway: requests(each), what="a request at each")
        pair[0].signal(signal.SIGSTOP)
        failures = 0
        for _ in range(20):
            try:
                assert is_right(client.score("ids", batch(5, rows), timeout_s=0.5), 5, rows)
            except DeadlineExceeded:
                failures += 1
        pair[0].signal(signal.SIGCONT)
        assert failures <= 1
        before = requests(pair[0])
        eventually(lambda: requests(pair[0]) > before, what="a request at the gateway")


@pytest.mark.slow
def test_every_request_is_answered_while_one_of_two_gateways_is_killed(
    pair: list[Gateway],
) -> None:
    """Single batches and streams; both gateways get calls before and after."""
    answers: list[str] = []
    is_over = threading.Event()

    def load(client: Client, number: int) -> None:
        random = np.random.default_rng(number)
        while not is_over.is_set():
            first, rows = int(random.integers(1 << 40)), int(random.integers(1, 300))
            try:
                if number % 2:
                    result = client.score("ids", batch(first, rows))
                    answers.append("right" if is_right(result, first, rows) else "WRONG")
                else:
                    sent = [batch(first + each, rows) for each in range(8)]
                    results = list(client.stream("ids", sent))
                    assert len(results) == len(sent)
                    for each, result in enumerate(results):
                        answers.append("right" if is_right(result, first + each, rows) else "WRONG")
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")

    def has_more(count: int) -> bool:
        return len(answers) >= count

    def requests(gateway: Gateway) -> int:
        return int(gateway.stats()["lanes"]["ids/1"].get("requests", 0))

    with client_of(pair, retry=Retry()) as client:
        threads = [threading.Thread(target=load, args=(client, n)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            for gateway in pair:
                eventually(lambda each=gateway: requests(each) > 20, what="requests at both")
            kill(pair[0])
            count = len(answers)
            eventually(lambda: has_more(count + 200), what="answers of the other gateway")
            pair[0] = restart(pair[0])
            eventually(lambda: requests(pair[0]) > 20, what="requests at the new gateway")
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
            pair[0].end()
    assert set(answers) == {"right"}


@pytest.mark.parametrize(
    "shared_bytes", [pytest.param(0, marks=pytest.mark.slow), 2 * MIB], ids=["sent", "shared"]
)
def test_stream_continues_after_its_gateway_is_killed_and_started_again(
    gateway: Gateway, shared_bytes: int
) -> None:
    """Nothing is returned twice or missing, and the order is kept."""
    count, replaced = 60, []
    taken: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(count):
            taken.append(number)
            yield batch(number * ROWS, ROWS)

    starter = threading.Thread(target=lambda: replaced.append(restart(gateway)))
    with client_of([gateway], retry=PATIENT, shared_bytes=shared_bytes) as client:
        results = client.stream("ids", batches(), timeout_s=60.0)
        try:
            for number, result in enumerate(results):
                assert is_right(result, number * ROWS, ROWS), number
                if number == 20:
                    kill(gateway)
                    starter.start()
            assert number == count - 1
            assert taken == list(range(count))
            (second,) = replaced
            # The new gateway got only the batches without a result.
            assert 0 < second.wait_idle()["lanes"]["ids/1"]["requests"] < count
        finally:
            starter.join()
            for second in replaced:
                second.end()


@pytest.mark.slow
def test_batches_without_a_result_are_sent_again_while_the_feed_waits(gateway: Gateway) -> None:
    """A closed loop: the next batch depends on the result of the one before."""
    result_of: dict[int, int] = {}
    has_result = threading.Event()
    replaced: list[Gateway] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(4):
            yield pa.record_batch({"x": [1000 + number]})
            assert has_result.wait(60)
            has_result.clear()

    def replace() -> None:
        eventually(lambda: gateway.stats()["workers"][0]["in_flight"], what="a running batch")
        kill(gateway)
        replaced.append(restart(gateway))

    killer = threading.Thread(target=replace)
    killer.start()
    try:
        with client_of([gateway], retry=PATIENT) as client:
            results = client.stream("slow", batches(), timeout_s=120.0)
            for number, result in enumerate(results):
                result_of[number] = result["y"][0].as_py()
                has_result.set()
    finally:
        has_result.set()
        killer.join()
        for second in replaced:
            second.end()
    assert result_of == {number: 1000 + number for number in range(4)}


def test_failures_are_raised_without_retries(gateway: Gateway) -> None:
    got = []
    with client_of([gateway], retry=OFF) as client:
        assert is_right(client.score("ids", batch(5, 3)), 5, 3)
        with pytest.raises(ConnectionFailed):
            for number, result in enumerate(
                client.stream("ids", (batch(n, 100) for n in range(1_000_000)))
            ):
                got.append(is_right(result, number, 100))
                if number == 20:
                    kill(gateway)
        with pytest.raises(ConnectionFailed):
            client.score("ids", batch(5, 3))
    assert got and all(got)


def test_stream_without_resume_raises_the_failure(gateway: Gateway) -> None:
    with client_of([gateway], retry=PATIENT) as client:
        results = client.stream("ids", (batch(n, 100) for n in range(1_000_000)), resume=False)
        assert is_right(next(results), 0, 100)
        kill(gateway)
        with pytest.raises(ConnectionFailed):
            list(results)


def test_gateway_that_stays_away_is_an_error_with_the_number_of_attempts(gateway: Gateway) -> None:
    retry = Retry(attempts=3, first_wait_s=0.01, jitter_s=0.0)
    kill(gateway)
    with client_of([gateway], retry=retry) as client:
        for call in (
            lambda: client.score("ids", batch(0, 3)),
            lambda: list(client.stream("ids", [batch(0, 3)] * 2)),
        ):
            with pytest.raises(ConnectionFailed) as caught:
                call()
            assert caught.value.__notes__ == ["failed after 3 attempts: limit 3 (`attempts`)"]
        with pytest.raises(ConnectionFailed, match="no gateway answers"):
            client.health()


def test_invalid_requests_are_not_retried(steady: Gateway) -> None:
    with client_of([steady], retry=PATIENT) as client:
        for model, data, kind in (
            ("absent", batch(0, 3), ModelNotFound),
            ("ids", pa.record_batch({"z": [1]}), ContractError),
        ):
            for call in (client.score, lambda name, data: list(client.stream(name, [data] * 2))):
                with pytest.raises(kind) as caught:
                    call(model, data)
                assert not hasattr(caught.value, "__notes__")
    steady.wait_idle()


def test_errors_of_batches_are_outcomes_of_a_resumed_stream(gateway: Gateway) -> None:
    """A batch whose deadline has passed gets its error once; the others get their results."""
    replaced: list[Gateway] = []
    items = [(batch(n, 10), {"deadline_ms": 0} if n % 5 == 0 else {}) for n in range(200)]
    outcomes = []
    with client_of([gateway], retry=PATIENT) as client:
        for number, outcome in enumerate(client.outcomes("ids", items, timeout_s=60.0)):
            outcomes.append(outcome)
            if number == 50:
                kill(gateway)
                replaced.append(restart(gateway))
    replaced[0].end()
    assert len(outcomes) == len(items)
    for number, outcome in enumerate(outcomes):
        if number % 5 == 0:
            assert isinstance(outcome, IskanderError)
        else:
            assert is_right(outcome, number, 10)


def test_streams_and_calls_move_from_a_draining_gateway(pair: list[Gateway]) -> None:
    go_on = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch(0, 10)
        assert go_on.wait(60)
        for number in range(1, 50):
            yield batch(number, 10)

    with client_of(pair, retry=PATIENT) as client:
        results = client.stream("ids", batches(), timeout_s=60.0)
        assert is_right(next(results), 0, 10)
        (draining,) = [each for each in pair if each.stats()["streams"]]
        (other,) = [each for each in pair if each is not draining]
        draining.signal(signal.SIGTERM)
        assert draining.wait() == 0
        go_on.set()
        count = 1
        for number, result in enumerate(results, start=1):
            assert is_right(result, number, 10)
            count += 1
        assert count == 50
        for number in range(20):
            assert is_right(client.score("ids", batch(number, 4)), number, 4)
    assert other.wait_idle()["lanes"]["ids/1"]["requests"] == 49 + 20


@pytest.mark.slow
def test_flowing_stream_moves_from_a_draining_gateway(pair: list[Gateway]) -> None:
    """Batches are on their way to the gateway when it begins to drain."""
    count = 400
    with client_of(pair, retry=PATIENT, shared_bytes=0) as client:
        results = client.stream("ids", (batch(n * ROWS, ROWS) for n in range(count)))
        assert is_right(next(results), 0, ROWS)
        (draining,) = [each for each in pair if each.stats()["streams"]]
        (other,) = [each for each in pair if each is not draining]
        draining.signal(signal.SIGTERM)
        number = 0
        for number, result in enumerate(results, start=1):
            assert is_right(result, number * ROWS, ROWS), number
        assert number == count - 1
        assert draining.wait() == 0
    assert 0 < other.wait_idle()["lanes"]["ids/1"]["requests"] < count


@pytest.mark.slow
def test_call_waits_for_a_gateway_that_drains_and_starts_again(gateway: Gateway) -> None:
    replaced: list[Gateway] = []
    with client_of([gateway], retry=PATIENT) as client:
        assert is_right(client.score("ids", batch(0, 4)), 0, 4)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        starter = threading.Thread(target=lambda: replaced.append(restart(gateway)))
        starter.start()
        try:
            assert is_right(client.score("ids", batch(7, 4), timeout_s=60.0), 7, 4)
        finally:
            starter.join()
            for second in replaced:
                second.end()


def test_early_end_of_a_resumable_stream_cancels_it_at_the_server(steady: Gateway) -> None:
    """The feed has no end."""
    with client_of([steady], retry=PATIENT) as client:
        results = client.stream("ids", (batch(n, 10) for n in itertools.count()))
        assert is_right(next(results), 0, 10)
        assert steady.stats()["streams"] == 1
        results.close()  # type: ignore[attr-defined]
        steady.wait_idle()


TOKENS = ("isk_" + "first" * 9, "isk_" + "second" * 8)


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that requires a token."""
    folder = tmp_path_factory.mktemp("protected")
    write_tokens(folder, datetime.now(UTC) + timedelta(days=1))
    gateway = Gateway(
        folder,
        [{"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}],
        workers={"groups": ["0"]},
        access={"tokens": str(folder / "tokens.toml")},
    )
    gateway.token = TOKENS[1]
    try:
        yield gateway.start()
    finally:
        gateway.end()


def write_tokens(folder: Path, first_expires: datetime) -> None:
    """Write a file in which the first token expires, and the second does not."""
    expires = f"{first_expires:%Y-%m-%dT%H:%M:%SZ}"
    entries = [
        f'[[tokens]]\nname = "{name}"\nsha256 = "{digest(token)}"\n{line}'
        for name, token, line in zip(
            ("first", "second"), TOKENS, (f"expires = {expires}\n", ""), strict=True
        )
    ]
    (folder / "tokens.toml").write_text("\n".join(entries))


class Login:
    """Token function of a caller who logs in again when the first token is about to expire."""

    def __init__(self) -> None:
        self.has_expired = threading.Event()
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        return TOKENS[self.has_expired.is_set()]


def expire(protected: Gateway) -> None:
    """Let the first token expire, and wait until the gateway rejects it."""
    write_tokens(protected.folder, datetime.now(UTC) - timedelta(seconds=1))

    def is_rejected() -> bool:
        with Client(protected.address, token=TOKENS[0], retry=OFF) as client:
            try:
                client.score("ids", batch(0, 1))
            except Unauthenticated:
                return True
        return False

    eventually(is_rejected, what="a rejected token")


@pytest.fixture
def both_valid(protected: Gateway) -> Gateway:
    """The gateway, with both tokens valid."""
    write_tokens(protected.folder, datetime.now(UTC) + timedelta(days=1))

    def is_accepted() -> bool:
        with Client(protected.address, token=TOKENS[0], retry=OFF) as client:
            try:
                return is_right(client.score("ids", batch(0, 1)), 0, 1)
            except Unauthenticated:
                return False

    eventually(is_accepted, what="an accepted token")
    return protected


def six(go_on: threading.Event) -> Iterator[pa.RecordBatch]:
    """Three batches, then three more after the token has expired."""
    yield from (batch(n, 10) for n in range(3))
    assert go_on.wait(60)
    yield from (batch(n, 10) for n in range(3, 6))


def test_stream_is_resumed_with_the_next_token_after_one_expired(both_valid: Gateway) -> None:
    login, go_on = Login(), threading.Event()
    with Client(both_valid.address, token=login, retry=PATIENT) as client:
        results = client.stream("ids", six(go_on), timeout_s=60.0)
        for number in range(3):
            assert is_right(next(results), number, 10)
        login.has_expired.set()
        expire(both_valid)
        go_on.set()
        for number in range(3, 6):
            assert is_right(next(results), number, 10)
        assert next(results, None) is None
        before = login.calls
        assert is_right(client.score("ids", batch(7, 10)), 7, 10)
        assert login.calls > before


def test_expired_token_is_an_error_of_stream_and_score_without_retries(
    both_valid: Gateway,
) -> None:
    """Also with a function that returns the same token."""
    go_on = threading.Event()
    with Client(both_valid.address, token=TOKENS[0], retry=PATIENT) as client:
        results = client.stream("ids", six(go_on), timeout_s=60.0)
        for number in range(3):
            assert is_right(next(results), number, 10)
        expire(both_valid)
        go_on.set()
        with pytest.raises(Unauthenticated, match="expired or was revoked") as caught:
            list(results)
        assert (caught.value.model, caught.value.retryable) == ("ids", False)
        assert not hasattr(caught.value, "__notes__")
    for token in (TOKENS[0], lambda: TOKENS[0]):
        with (
            Client(both_valid.address, token=token, retry=PATIENT) as client,
            pytest.raises(Unauthenticated) as caught,
        ):
            client.score("ids", batch(0, 3))
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.slow
def test_score_of_asyncio_uses_the_current_token(both_valid: Gateway) -> None:
    login = Login()

    async def score() -> None:
        async with AsyncClient(both_valid.address, token=login, retry=OFF) as client:
            assert is_right(await client.score("ids", batch(1, 10)), 1, 10)
            login.has_expired.set()
            await asyncio.to_thread(expire, both_valid)
            assert is_right(await client.score("ids", batch(2, 10)), 2, 10)
            results = client.stream("ids", [batch(3, 10)])
            assert [is_right(each, 3, 10) async for each in results] == [True]

    asyncio.run(score())
