"""Rejection of HTTP requests that a web page of another site makes in a browser.

A page may send requests to every address that its browser reaches. Two rules reject them:

- `Host` must be a name of the server. A site whose name is rebound to the server's address sends
  its own name. The rule does not apply to TLS, where the certificate would not match, and not to a
  request with a token, because the page has no token.
- `Origin` and `Sec-Fetch-Site`, which browsers add, must be of the same site as `Host`. Programs
  do not send them. A link that a user follows is permitted: the page with the link cannot read the
  answer.

Pure. Source: RFC 9110, section 7.2 (`Host`) and 15.5.20 (421); RFC 6454 (`Origin`); W3C Fetch
Metadata Request Headers.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from iskander.config.auth import AccessConfig
from iskander.errors import CrossSiteRequest

HOSTS_SETTING: Final = "access.allowed_hosts"
ORIGINS_SETTING: Final = "access.allowed_origins"
MISDIRECTED: Final = 421
_SHOWN: Final = 100
_FETCH: Final = b"sec-fetch-"
_OWN_SITES: Final = (b"same-origin", b"none")
_PORTS: Final = {"http": ":80", "https": ":443"}


class Refusal(NamedTuple):
    """A rejected request: its error and HTTP status."""

    error: CrossSiteRequest
    status: int


class SitePolicy:
    """The rules of one listener.

    Args:
        access: The permitted names and origins.
        address: `HOST:PORT` of the listener; its host is a name of the server.
        has_tokens: Whether the listener verifies tokens; `Host` is then not checked with a token.
        probes: Paths that are served for every host; a foreign host gets no content.
    """

    def __init__(
        self,
        access: AccessConfig,
        address: str,
        *,
        has_tokens: bool = False,
        probes: Collection[str] = (),
    ) -> None:
        own = (address.rpartition(":")[0].strip("[]").lower(), socket.gethostname().lower())
        self._hosts = tuple(host.lower() for host in access.allowed_hosts)
        self._network_hosts = (*self._hosts, *(host for host in own if host))
        self._origins = frozenset(origin.lower() for origin in access.allowed_origins)
        self._has_tokens = has_tokens
        self._probes = probes

    def judge(self, scope: MutableMapping[str, Any], *, is_local: bool) -> Refusal | None:
        """Return the rejection of a request, or None; `is_local`: it came by loopback.

        Adds `is_own_host` to the scope: whether the host is a name of the server.
        """
        host, has_token = b"", False
        origins: list[bytes] = []
        fetch: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origins.append(value.lower())
            elif name == b"authorization":
                has_token = self._has_tokens
            elif name.startswith(_FETCH):
                fetch[name] = value
        if not scope["raw_path"].startswith(b"/"):
            host = _target_authority(scope["raw_path"]) or host
        authority = host.decode("latin-1").lower()
        is_own = scope["scheme"] == "https" or has_token or self.is_own_host(authority, is_local)
        scope["is_own_host"] = is_own
        if not is_own and scope["path"] not in self._probes:
            return _wrong_host(authority)
        for origin in origins:
            if not self._is_permitted(origin.decode("latin-1"), authority):
                return _wrong_origin(origin.decode("latin-1"))
        site = fetch.get(b"sec-fetch-site", b"none")
        if site in _OWN_SITES or origins or _is_link(scope["method"], fetch):
            return None  # Each origin was permitted.
        return _wrong_origin(f"`Sec-Fetch-Site: {site.decode('latin-1')}`")

    def is_own_host(self, authority: str, is_local: bool) -> bool:
        """Whether the value of `Host` is a name of the server; an empty value counts as one."""
        if "*" in self._hosts:
            return True
        name = host_name(authority)
        if name is None:
            return False
        if not name or is_loopback_name(name):
            return True
        if is_local:
            return _matches(name, self._hosts)
        # Another site can rebind its name to the address of the server, but not an address.
        return is_address(name) or _matches(name, self._network_hosts)

    def _is_permitted(self, origin: str, authority: str) -> bool:
        return origin in self._origins or _is_same(origin, authority)


def host_name(authority: str) -> str | None:
    """The host of `HOST:PORT` in lower case, without a port; None if it is invalid."""
    try:
        parts = urlsplit(f"//{authority}")
        is_plain = parts.netloc == authority and "@" not in authority and not parts.path
        return (parts.hostname or "").rstrip(".") if is_plain else None
    except ValueError:
        return None


def is_loopback_name(name: str) -> bool:
    """Whether a host is `localhost` or a loopback address; no name is resolved."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_address(name: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_same(origin: str, authority: str) -> bool:
    """Whether an origin is that of a host; the scheme may differ, as behind a proxy with TLS."""
    scheme, separator, place = origin.partition("://")
    default = _PORTS.get(scheme)
    if not separator or default is None or not place:
        return False
    return place.removesuffix(default) == authority.removesuffix(default)


def _is_link(method: str, fetch: Mapping[bytes, bytes]) -> bool:
    """Whether the browser opens the answer as a page, which other pages cannot read."""
    is_page = fetch.get(b"sec-fetch-dest") == b"document"
    return method in ("GET", "HEAD") and is_page and fetch.get(b"sec-fetch-mode") == b"navigate"


def _target_authority(target: bytes) -> bytes:
    """The host of an absolute target, which replaces `Host`. Source: RFC 9112, section 3.2.2."""
    return target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]


def _wrong_host(authority: str) -> Refusal:
    shown, use = authority[:_SHOWN], "use an address of the server or `localhost`"
    text = f"`Host: {shown}` is not a name of this server: {use}, or add it to `{HOSTS_SETTING}`"
    return Refusal(CrossSiteRequest(text), MISDIRECTED)


def _wrong_origin(origin: str) -> Refusal:
    fix = f"add its origin to `{ORIGINS_SETTING}` to permit it"
    text = f"request from a web page of another site rejected: {origin[:_SHOWN]}; {fix}"
    return Refusal(CrossSiteRequest(text), CrossSiteRequest.http_status)
