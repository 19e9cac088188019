"""Readiness check of a container: exit code 0 if the server is ready, else 1 with the reason.

    healthcheck.py http://127.0.0.1:50052/readyz      admin port
    healthcheck.py unix:/sockets/flight.sock          gRPC health check over a unix socket
    healthcheck.py 127.0.0.1:50051                    the same over TCP, without TLS

It runs every few seconds, so it imports the standard library only: 20 ms of CPU time over a unix
socket, and 250 ms with a gRPC client. Neither check needs a token.

Source: gRPC health checking protocol v1; RFC 9113 (frames), RFC 7541 6.2.2 (literal headers).
"""

from __future__ import annotations

import socket
import struct
import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 4.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
METHOD_POST, SCHEME_HTTP, PATH, AUTHORITY, NEW_NAME = b"\x83", b"\x86", b"\x04", b"\x01", b"\x00"
EMPTY_MESSAGE = bytes(5)
SERVING = b"\x00\x00\x00\x00\x02\x08\x01"
"""A message of two bytes: field 1, value SERVING."""


def main() -> None:
    """Check the address of the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: healthcheck.py http://HOST:PORT/PATH | unix:PATH | HOST:PORT")
    address = sys.argv[1]
    try:
        problem = _http(address) if address.startswith("http:") else _grpc(address)
    except (OSError, ValueError, HTTPException) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        sys.exit(f"{address}: {problem.strip()}")


def _http(address: str) -> str:
    # Unlike urllib's `urlopen`, this ignores the proxies of the environment.
    target = urlsplit(address)
    connection = HTTPConnection(target.netloc, timeout=TIMEOUT_S)
    connection.request("GET", target.path)
    response = connection.getresponse()
    reason = response.read(1000).decode(errors="replace")
    return "" if response.status == 200 else f"status {response.status}: {reason}"


def _grpc(address: str) -> str:
    headers = METHOD_POST + SCHEME_HTTP + PATH + _text("/grpc.health.v1.Health/Check")
    headers += AUTHORITY + _text("localhost")
    headers += NEW_NAME + _text("content-type") + _text("application/grpc")
    headers += NEW_NAME + _text("te") + _text("trailers")
    request = PREFACE + _frame(SETTINGS, 0, 0) + _frame(HEADERS, END_HEADERS, 1, headers)
    request += _frame(DATA, END_STREAM, 1, EMPTY_MESSAGE)
    with _connect(address) as connection:
        connection.sendall(request)
        stream = connection.makefile("rb")
        while len(head := stream.read(9)) == 9:
            length, kind, flags = struct.unpack(">I", b"\0" + head[:3])[0], head[3], head[4]
            payload = stream.read(length)
            if kind == DATA:
                return "" if payload == SERVING else "not ready"
            if kind == HEADERS and flags & END_STREAM:
                break
    return "no response to the health check"


def _connect(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(address.removeprefix("unix:"))
    return connection


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


if __name__ == "__main__":
    main()
