"""Results of loads that fail, and damaged warm-up samples."""

from __future__ import annotations

import io
import weakref
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker.batches.tensors import error_text
from iskander_worker.devices.cuda import DeviceLost
from iskander_worker.loading import loader as loading
from support.processes import eventually
from support.scripted import model_spec

from iskander.contract.formats.samples import read_arrays
from iskander.contract.processing.row_relation import RowRelation
from iskander.errors import ManifestError
from iskander.interprocess.control.messages import LoadFailed


class PanicException(BaseException):
    """The panic of a Rust extension, which is not a subclass of Exception."""


def attached() -> Any:
    """A gateway process of a load."""
    return SimpleNamespace(executor=SimpleNamespace(sessions={}))


class UnprintableError(Exception):
    """An error whose conversion to text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


def load_result(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Any:
    """Returns the message to the gateway for a load that raises an error."""

    def fail(spec: Any, cores: int) -> None:
        raise error

    monkeypatch.setattr(loading, "Session", fail)
    loads = loading.LoadQueue(1)
    loads.put(attached(), model_spec(Path("/m"), key=7))
    result = eventually(loads.finish_load, what="end of the load")
    assert not loads.is_busy
    ((response),) = result[1]
    return response


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("too deep"),
        ValueError("embedded null byte"),
        OSError(36, "File name too long"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        MemoryError(),
        zlib.error("incorrect header check"),
        AssertionError("a library's"),
        PanicException("called `unwrap()` on a `None` value"),
        SystemExit(3),
        UnprintableError(),
    ],
)
def test_any_library_exception_fails_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    response = load_result(monkeypatch, error)

    assert isinstance(response, LoadFailed) and response.model == 7 and response.code == "manifest"
    assert response.message.startswith(f"it cannot be loaded: {type(error).__name__}")
    assert "Traceback" in caplog.text


def test_iskander_error_is_reported_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    response = load_result(monkeypatch, ManifestError("it is wrong"))

    assert (response.code, response.message) == ("manifest", "it is wrong")


def test_own_assertion_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = loading.LoadQueue(1)

    def fail(spec: Any, cores: int) -> None:
        unfinished: Any = SimpleNamespace(_fatal=None, _failed=None, session=None)
        loading._Load.answer(unfinished)

    monkeypatch.setattr(loading, "Session", fail)
    loads.put(attached(), model_spec(Path("/m")))
    with pytest.raises(AssertionError):
        eventually(loads.finish_load, what="end of the load")


@pytest.mark.parametrize("damage", ["deflate", "header"])
def test_damaged_sample_is_rejected(tmp_path: Path, damage: str) -> None:
    """Invalid deflate data, and an array of 2^50 elements with data for four."""
    file = tmp_path / "s.npz"
    if damage == "deflate":
        np.savez_compressed(file, x=np.arange(4000))
        raw = bytearray(file.read_bytes())
        raw[60:90] = b"\xff" * 30
        file.write_bytes(raw)
    else:
        array = io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
        np.lib.format.write_array_header_1_0(array, header)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.npy", array.getvalue() + bytes(32))

    with pytest.raises(ManifestError, match=r"`s\.npz` is no `\.npz` file of plain arrays"):
        read_arrays(tmp_path, "s.npz")


def test_long_error_text_is_truncated_before_paths_are_removed() -> None:
    assert len(error_text(ValueError("/" * 200_000))) <= 4000
    assert error_text(ValueError("at /a/b.cc:12 it failed\nstack")) == "at <source> it failed"


def test_error_of_tensorrt_has_the_names_of_the_inputs_without_a_profile() -> None:
    names = "Following input(s) has no associated shape profiles provided: /a/b.head/Cast,mask"
    text = f"User needs to provide all inputs.\nPlease note that\n{names}"
    assert error_text(RuntimeError(text)) == f"User needs to provide all inputs. {names}"


class FakeSession:
    """A session whose warm-up fails, if `error` is set, and that counts its ends."""

    device = None

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.closed = error, 0

    def warm_up(self, rows_max: int) -> None:
        if self.error is not None:
            raise self.error

    def measure(self, *, is_confined: bool) -> None:
        """Nothing is known about its rows."""

    def close(self) -> None:
        self.closed += 1


def test_failed_warm_up_closes_the_model_after_the_error_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frames of the error refer to parts of the model, which would live longer."""
    errors: list[weakref.ref[BaseException]] = []

    class Failing(FakeSession):
        def warm_up(self, rows_max: int) -> None:
            try:
                raise ManifestError("not enough memory")
            except ManifestError as error:
                errors.append(weakref.ref(error))
                raise

        def close(self) -> None:
            assert errors[0]() is None
            super().close()

    session = Failing()
    monkeypatch.setattr(loading, "Session", lambda spec, cores: session)
    loads, attachment = loading.LoadQueue(1), attached()
    loads.put(attachment, model_spec(Path("/m")))
    result = eventually(loads.finish_load, what="end of the load")
    assert [type(each) for each in result[1]] == [LoadFailed]
    assert session.closed == 1 and not loads.sessions and not attachment.executor.sessions


def test_lost_device_of_a_load_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(DeviceLost("illegal address"))
    monkeypatch.setattr(loading, "Session", lambda spec, cores: session)
    loads = loading.LoadQueue(1)
    loads.put(attached(), model_spec(Path("/m")))
    with pytest.raises(DeviceLost):
        eventually(loads.finish_load, what="end of the load")


def test_unused_sessions_wait_for_the_next_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Any] = []
    now = [0]

    def opened(spec: Any, cores: int) -> Any:
        sessions.append(FakeSession())
        sessions[-1].notices, sessions[-1].contract = (), None
        sessions[-1].providers, sessions[-1].threads, sessions[-1].files_sha256 = (), 1, ""
        sessions[-1].relation, sessions[-1].library = RowRelation(), ""
        return sessions[-1]

    def load(attachment: Any, name: str) -> None:
        loads.put(attachment, model_spec(Path(name)))
        loads.close_unused(set())
        eventually(loads.finish_load, what="end of the load")

    monkeypatch.setattr(loading, "Session", opened)
    monkeypatch.setattr(loading, "now_ns", lambda: now[0])
    loads = loading.LoadQueue(1)
    first, second = attached(), attached()
    load(first, "/x")
    loads.close_unused(set())
    load(second, "/x")
    assert len(sessions) == 1, "the second gateway reuses the session"
    assert list(second.executor.sessions.values()) == sessions
    third = attached()
    load(third, "/y")
    now[0] += loading.REUSE_NS - 1
    loads.close_unused(set(third.executor.sessions.values()))
    assert not sessions[0].closed
    now[0] += 1
    loads.close_unused(set(third.executor.sessions.values()))
    assert [each.closed for each in sessions] == [1, 0]
    assert list(loads.sessions.values()) == [sessions[1]] and not loads.kept_until_ns
