"""Origin of a connection: address or process of its peer, and names in its certificate.

The names are written as `openssl x509 -ext subjectAltName` does: `URI:`, `DNS:` (in lower case),
`email:`. The common name, as `CN:`, counts only if the certificate has none of them.

Pure. Source: RFC 5280, section 4.2.1.6; SPIFFE X.509-SVID.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

NAMES_MAX: Final = 64
"""Names of a certificate that are used."""
KINDS: Final = ("URI", "DNS", "email")


class Origin(NamedTuple):
    """Origin of a connection.

    Attributes:
        peer: IP address and port, or `unix:uid=UID,pid=PID`; empty if unknown.
        certificate: Names of the client's verified certificate; empty without one.
    """

    peer: str = ""
    certificate: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """The peer without its port or process."""
        separator = "," if self.peer.startswith("unix:") else ":"
        return self.peer.rpartition(separator)[0]


UNKNOWN_ORIGIN: Final = Origin()


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a certificate in the form of `ssl.SSLSocket.getpeercert`."""
    alternatives: Iterable[tuple[str, Any]] = certificate.get("subjectAltName", ())
    names = [normalized(f"{kind}:{name}") for kind, name in alternatives if kind in KINDS]
    if not names:
        subject = (pair for entry in certificate.get("subject", ()) for pair in entry)
        names = [f"CN:{value}" for key, value in subject if key == "commonName"]
    return tuple(names[:NAMES_MAX])


def normalized(name: str) -> str:
    """Return a name for comparison: DNS names do not depend on case."""
    return name[:4] + name[4:].lower() if name.startswith("DNS:") else name
