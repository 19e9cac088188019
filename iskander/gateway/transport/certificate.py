"""Expiry of X.509 certificates, read from PEM files.

The standard library decodes only certificates of a verified peer, and a TLS port should not need a
further package for one date.

Pure. Source: RFC 5280, sections 4.1 and 4.1.2.5 (Validity); X.690 (DER).
"""

from __future__ import annotations

import base64
import datetime
import re
from typing import Final

CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL
)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
"""Time with a year of two digits: 50 to 99 are 1950 to 1999."""
_LONG_LENGTH: Final = 0x80
_FIELDS_BEFORE_VALIDITY: Final = 3
"""Serial number, signature algorithm and issuer."""


def earliest_expiry_s(pem: bytes) -> float:
    """Return the Unix time at which the first certificate expires; 0 if none can be read."""
    try:
        return min(map(_expiry_s, CERTIFICATE.findall(pem)), default=0.0)
    except (ValueError, IndexError):
        return 0.0


def _expiry_s(encoded: bytes) -> float:
    der = base64.b64decode(encoded)
    start = _content(der, _content(der, 0).start).start
    if der[start] == _VERSION:
        start = _content(der, start).stop
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        start = _content(der, start).stop
    not_before = _content(der, _content(der, start).start)
    text = der[_content(der, not_before.stop)].decode("ascii")
    if der[not_before.stop] == _UTC_TIME:
        text = f"{'19' if text >= '50' else '20'}{text}"
    expiry = datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)
    return expiry.timestamp()


def _content(der: bytes, start: int) -> slice:
    """Return the position of the content of the element at `start`."""
    length, at = der[start + 1], start + 2
    if length >= _LONG_LENGTH:
        size = length - _LONG_LENGTH
        length, at = int.from_bytes(der[at : at + size], "big"), at + size
    return slice(at, at + length)
