"""Tickets: signature, end of validity, and size."""

from __future__ import annotations

import secrets

import pytest
from msgspec.structs import replace

from iskander.errors import LimitExceeded, TicketRejected
from iskander.gateway.sources.tickets import (
    MAC_BYTES,
    MAGIC,
    TICKET_BYTES_MAX,
    Ticket,
    read_ticket,
    sign_ticket,
)

KEY = b"k" * 32
NOW_S = 1000.0
TICKET = Ticket("clicks", "churn", "3", "scorer", b"rules", NOW_S + 60, b"part")


def test_ticket_is_read_with_its_key() -> None:
    assert read_ticket(KEY, sign_ticket(KEY, TICKET), NOW_S) == TICKET


def test_each_altered_byte_is_rejected() -> None:
    signed = sign_ticket(KEY, TICKET)
    for index in range(len(signed)):
        altered = bytearray(signed)
        altered[index] ^= 1
        with pytest.raises(TicketRejected):
            read_ticket(KEY, bytes(altered), NOW_S)


@pytest.mark.parametrize("length", [0, 1, len(MAGIC), len(MAGIC) + MAC_BYTES, -1])
def test_cut_ticket_is_rejected(length: int) -> None:
    with pytest.raises(TicketRejected):
        read_ticket(KEY, sign_ticket(KEY, TICKET)[:length], NOW_S)


def test_ticket_of_another_key_is_rejected() -> None:
    with pytest.raises(TicketRejected, match="key_file"):
        read_ticket(b"j" * 32, sign_ticket(KEY, TICKET), NOW_S)


@pytest.mark.parametrize("late_s", [60.0, 61.0])
def test_expired_ticket_is_rejected(late_s: float) -> None:
    with pytest.raises(TicketRejected, match=r"expired .*ticket_s"):
        read_ticket(KEY, sign_ticket(KEY, TICKET), NOW_S + late_s)


def test_too_large_ticket_is_not_made_and_not_read() -> None:
    large = replace(TICKET, part=secrets.token_bytes(TICKET_BYTES_MAX))
    with pytest.raises(LimitExceeded, match=str(TICKET_BYTES_MAX)):
        sign_ticket(KEY, large)
    with pytest.raises(TicketRejected):
        read_ticket(KEY, sign_ticket(KEY, TICKET) + bytes(TICKET_BYTES_MAX), NOW_S)
