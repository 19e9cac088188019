"""Expiry of certificates, compared with the package `cryptography`."""

from __future__ import annotations

import datetime

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from iskander.gateway.transport.certificate import earliest_expiry_s


def certificate(expires: datetime.datetime, names: int = 1) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    units = [
        x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, f"unit {index}")
        for index in range(names)
    ]
    name = x509.Name(units)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))
    signed = builder.not_valid_after(expires).sign(key, hashes.SHA256())
    return signed.public_bytes(Encoding.PEM)


@pytest.mark.parametrize("year", [1975, 1999, 2001, 2049, 2050, 2999], ids=str)
@pytest.mark.parametrize("names", [1, 40], ids=["short", "long"])
def test_expiry_of_both_time_formats_and_length_forms(year: int, names: int) -> None:
    expires = datetime.datetime(year, 7, 9, 10, 11, 12, tzinfo=datetime.UTC)

    assert earliest_expiry_s(certificate(expires, names)) == expires.timestamp()


def test_first_certificate_of_a_chain_to_expire() -> None:
    soon = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
    later = datetime.datetime(2041, 1, 1, tzinfo=datetime.UTC)

    chain = certificate(later) + b"\n-----BEGIN PRIVATE KEY-----\n" + certificate(soon)

    assert earliest_expiry_s(chain) == soon.timestamp()


def test_expiry_of_a_rsa_chain() -> None:
    issued = trustme.CA().issue_cert("localhost", key_type=trustme.KeyType.RSA)
    pem = issued.private_key_and_cert_chain_pem.bytes()
    expected = x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc

    assert earliest_expiry_s(pem) == expected.timestamp()


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----",
    ],
)
def test_unreadable_file_has_no_expiry(pem: bytes) -> None:
    assert earliest_expiry_s(pem) == 0
