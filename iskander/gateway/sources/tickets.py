"""Signed tickets for parts of sources, redeemed by any gateway with the key.

    ticket   magic, HMAC-SHA256 of the payload, payload
    payload  `Ticket` as msgpack

Nothing of a ticket is decoded before its signature is checked. It is signed and not encrypted: its
holder can read the names of the files and the filter.

Pure. Runs on: gateway loop. Source: RFC 2104 (HMAC).
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

import msgspec

from iskander.errors import LimitExceeded, TicketRejected
from iskander.foundation.decoders import thread_safe

MAGIC: Final = b"iskander-ticket-1\0"
"""Identifies the version of the format; part of the signed text."""
MAC_BYTES: Final = 32
TICKET_BYTES_MAX: Final = 49_152
"""Below the limit of a request message, 64 KiB."""


@thread_safe
class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A part of a source that one caller may read until a time.

    Attributes:
        source: Name of the source.
        model: Name of the model.
        version: Version of the model when the ticket was made.
        grant: Name of the grant of the caller; empty without tokens.
        rules: Digest of the columns and the condition that the source permits.
        expires_s: End of validity, in seconds of the wall clock.
        part: Files and columns, encoded by the reader process.
    """

    source: str
    model: str
    version: str
    grant: str
    rules: bytes
    expires_s: float
    part: bytes


def sign_ticket(key: bytes, ticket: Ticket) -> bytes:
    """Encode and sign a ticket.

    Raises:
        LimitExceeded: It is larger than `TICKET_BYTES_MAX`.
    """
    payload = msgspec.msgpack.encode(ticket)
    signed = MAGIC + _mac(key, payload) + payload
    if len(signed) > TICKET_BYTES_MAX:
        raise LimitExceeded(
            f"a ticket of source `{ticket.source}` has {len(signed)} bytes, limit "
            f"{TICKET_BYTES_MAX}; read fewer columns or files"
        )
    return signed


def read_ticket(key: bytes, raw: bytes, now_s: float) -> Ticket:
    """Check the signature and the end of validity of a ticket, and decode it.

    Raises:
        TicketRejected: It was altered, has another key or version, or has expired.
    """
    mac, payload = raw[len(MAGIC) :][:MAC_BYTES], raw[len(MAGIC) + MAC_BYTES :]
    if not raw.startswith(MAGIC) or len(raw) > TICKET_BYTES_MAX:
        raise TicketRejected("the ticket is none of this server's; GetFlightInfo returns tickets")
    if not hmac.compare_digest(mac, _mac(key, payload)):
        raise TicketRejected(
            "the signature of the ticket is not valid: it was altered, or another gateway made it "
            "with another key (`source_reads.key_file`)"
        )
    ticket = msgspec.msgpack.decode(payload, type=Ticket)
    if ticket.expires_s <= now_s:
        raise TicketRejected(
            f"the ticket expired {now_s - ticket.expires_s:.0f} s ago (`source_reads.ticket_s`); "
            "request a new one with GetFlightInfo"
        )
    return ticket


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, MAGIC + payload, sha256)
