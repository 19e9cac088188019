"""Remote servers of one model: connections, headers and attempts.

Each address has a channel, in which gRPC balances over the addresses of its name. Calls take turns
between the channels. A call that a server could not take (UNAVAILABLE) goes to the next one:
inference is pure, so a call may run twice.

Runs on: worker main. A call waits in steps, with a heartbeat after each.

Source: gRPC Python; gRPC's channel arguments (`grpc_types.h`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from iskander import __version__
from iskander.contract.backend_manifest import RemoteSection, RemoteTls
from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    ManifestError,
    RemoteDenied,
    RemoteTimeout,
    RemoteUnavailable,
)
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander_worker.backends import Run
from iskander_worker.remote.statuses import error_of, target_text

SERVICE: Final = "inference.GRPCInferenceService"
INFER: Final = "ModelInfer"
ATTEMPTS_MIN: Final = 2
"""A connection that the server closed while it was idle fails its next call once."""
WAIT_S: Final = 0.1
RECONNECT_MS: Final = (100, 500)
"""First and longest wait between two attempts to connect. The longest is below a second, so that
every readiness check has had a new attempt."""
TOKEN_BYTES_MAX: Final = 16_384

Headers = tuple[tuple[str, str], ...]


class RemoteServers:
    """Channels to the servers of `[remote]`; `folder` is the folder of the model."""

    def __init__(self, section: RemoteSection, folder: Path) -> None:
        self._section = section
        self._token = _TokenFile(folder / section.token_file) if section.token_file else None
        self._channels = [_channel(address, section, folder) for address in section.addresses]
        self._turn = 0

    def call(
        self, method: str, request: bytes, run: Run, *, headers: Headers, timeout_s: float
    ) -> tuple[bytes, str]:
        """Call a method; return the response, and the name of the answering server for errors.

        Raises:
            Cancelled: The run was aborted.
            DeadlineExceeded: The deadline of the run passed.
            LimitExceeded: The request has more than `message_bytes`.
            IskanderError: From `error_of`, or RemoteTimeout.
        """
        bytes_max = self._section.message_bytes
        if len(request) > bytes_max:
            raise LimitExceeded(
                f"request of {len(request)} bytes to {self.target(0)}, limit {bytes_max} "
                "(`remote.message_bytes` of the manifest)"
            )
        end_ns = now_ns() + int(timeout_s * NS_PER_S)
        ends_at_deadline = 0 < run.deadline_ns < end_ns
        end_ns = run.deadline_ns if ends_at_deadline else end_ns
        failures: list[IskanderError] = []
        for index in self._turns():
            target = self.target(index)
            left_s = (end_ns - now_ns()) / NS_PER_S
            answer = self._attempt(index, method, request, run, headers, left_s)
            if isinstance(answer, bytes):
                return answer, target
            status = answer.fields.get("remote_status")
            if status == "DEADLINE_EXCEEDED" and now_ns() >= end_ns:
                if ends_at_deadline:
                    raise DeadlineExceeded(f"deadline passed while {target} computed the batch")
                setting = "timeout_s" if method == INFER else "connect_s"
                limit = f"{timeout_s:g} s (`remote.{setting}`)"
                raise RemoteTimeout(f"{target} did not answer within {limit}")
            failures.append(answer)
            if status != "UNAVAILABLE":
                break
        raise _final_error(failures)

    def target(self, index: int) -> str:
        """Name the model and a server in errors."""
        section = self._section
        return target_text(section.model, section.version, section.addresses[index])

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def _turns(self) -> Iterator[int]:
        """Yield the channel of each attempt."""
        count = len(self._channels)
        first, self._turn = self._turn, (self._turn + 1) % count
        for attempt in range(max(count, ATTEMPTS_MIN)):
            yield (first + attempt) % count

    def _attempt(
        self, index: int, method: str, request: bytes, run: Run, headers: Headers, left_s: float
    ) -> bytes | IskanderError:
        """Make one call; return the response, or the error that another server may not have."""
        token = self._token.header() if self._token is not None else ()
        metadata = (*self._section.metadata.items(), *token, *headers)
        stub = self._channels[index].unary_unary(f"/{SERVICE}/{method}")
        call = stub.future(request, timeout=max(left_s, 0.0), metadata=metadata)
        run.cancel = call.cancel
        if run.is_aborted:  # Checked after the assignment: a later abort cancels it itself.
            call.cancel()
        try:
            return _wait_for_result(call, run)
        except grpc.FutureCancelledError:
            raise Cancelled("batch cancelled: its callers are gone") from None
        except grpc.RpcError as error:
            trailers = {name: str(value) for name, value in call.trailing_metadata() or ()}
            status, detail = error.code().name, error.details() or ""
            return error_of(status, detail, trailers, self.target(index))
        finally:
            run.cancel = None


def _wait_for_result(call: Any, run: Run) -> bytes:  # noqa: ANN401
    while True:
        try:
            response: bytes = call.result(WAIT_S)
            return response
        except grpc.FutureTimeoutError:
            run.heartbeat()


def _final_error(failures: list[IskanderError]) -> IskanderError:
    """Return a server's own answer if there is one, else the last lost connection."""
    answers = [failure for failure in failures if not isinstance(failure, RemoteUnavailable)]
    return (answers or failures)[-1]


def _channel(address: str, section: RemoteSection, folder: Path) -> grpc.Channel:
    target = address if address.startswith("unix:") else f"dns:///{address}"
    first_ms, longest_ms = RECONNECT_MS
    options: list[tuple[str, str | int]] = [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_send_message_length", section.message_bytes),
        ("grpc.max_receive_message_length", section.message_bytes),
        ("grpc.min_reconnect_backoff_ms", int(section.connect_s * 1000)),  # Timeout of an attempt.
        ("grpc.initial_reconnect_backoff_ms", first_ms),
        ("grpc.max_reconnect_backoff_ms", longest_ms),
        ("grpc.primary_user_agent", f"iskander/{__version__}"),
    ]
    if section.tls is None:
        return grpc.insecure_channel(target, options)
    if section.tls.server_name:
        options.append(("grpc.ssl_target_name_override", section.tls.server_name))
    return grpc.secure_channel(target, _credentials(section.tls, folder), options)


def _credentials(tls: RemoteTls, folder: Path) -> grpc.ChannelCredentials:
    def read(key: str) -> bytes | None:
        name = getattr(tls, key)
        try:
            return (folder / name).read_bytes() if name else None
        except OSError as error:
            problem = f"`{name}` cannot be read: {error.strerror}"
            raise ManifestError(f"remote.tls.{key}: {problem}") from None

    if bool(tls.certificate) != bool(tls.key):
        raise ManifestError("remote.tls: certificate and key belong together, and one is missing")
    return grpc.ssl_channel_credentials(read("ca"), read("key"), read("certificate"))


class _TokenFile:
    """A bearer token in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._header: Headers = ()

    def header(self) -> Headers:
        """Return the header; raise RemoteDenied if the file has no token."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                with self._path.open("rb") as file:
                    token = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
                if not token.isprintable() or not token or " " in token:
                    raise ValueError("it has no token")
                self._header, self._stamp = (("authorization", f"Bearer {token}"),), stamp
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RemoteDenied(f"remote.token_file cannot be used: {reason}") from None
        return self._header
