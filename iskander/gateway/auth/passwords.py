"""Passwords of the token file: Argon2id hashes, verified on one thread of low priority.

A verification costs milliseconds and megabytes by design, so few may wait, fewer of one host, and
a verified password is remembered for a minute by a keyed hash. Failures are not remembered.

Runs on: gateway loop, and the thread; the operator's tool. Source: RFC 9106 (Argon2), RFC 7617.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from iskander.errors import ConfigError, Overloaded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN, Origin

if TYPE_CHECKING:
    from argon2 import PasswordHasher

MEMORY_KIB: Final = 19_456
TIME_COST: Final = 2
"""With one lane, the least that OWASP recommends: 20 ms of one core."""
MEMORY_KIB_MAX: Final = 262_144
TIME_COST_MAX: Final = 16
LANES_MAX: Final = 8
PASSWORD_BYTES_MAX: Final = 1024
REMEMBERED_MAX: Final = 1024
REMEMBERED_S: Final = 60
WAITING_MAX: Final = 64
"""Verifications that wait for the thread: a second or two."""
WAITING_OF_HOST_MAX: Final = 8
RETRY_MS: Final = 1000
LOW_PRIORITY: Final = 19
SESSION: Final = "isk_basic_"
"""Prefix of a bearer token that is a user name and password, which a Flight handshake returns."""
INSTALL: Final = "`pip install 'iskander[passwords]'`"


class Credentials(NamedTuple):
    """User name and password of a call."""

    user: str
    password: str


class PasswordUnverified(Exception):
    """The password of a call has to be verified first."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__("the password is not verified")
        self.credentials = credentials


def read_credentials(header: str) -> Credentials | None:
    """Return the user name and password of an authorization header; None without any."""
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value.startswith(SESSION):
        value = value.removeprefix(SESSION)
    elif scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except ValueError:
        return None
    user, colon, password = decoded.partition(":")
    return Credentials(user, password) if colon and password else None


def session_token(credentials: Credentials) -> str:
    """Return a bearer token that stands for a user name and password."""
    raw = f"{credentials.user}:{credentials.password}".encode()
    return SESSION + base64.b64encode(raw).decode()


def hash_password(password: str) -> str:
    """Return the Argon2id hash of a password, as the token file has it."""
    if not password or len(password) > PASSWORD_BYTES_MAX:
        raise ConfigError(f"password: expected 1 to {PASSWORD_BYTES_MAX} characters")
    return str(_hasher().hash(password))


def hash_error(encoded: str) -> str:
    """Why a hash is not accepted; empty if it is."""
    try:
        from argon2 import Type, extract_parameters
        from argon2.exceptions import InvalidHashError
    except ImportError:
        return f"argon2-cffi is not installed: {INSTALL}"
    try:
        found = extract_parameters(encoded)
    except InvalidHashError:
        return "not an Argon2 hash"
    if found.type is not Type.ID:
        return "not an Argon2id hash"
    costs = (
        ("memory cost", found.memory_cost, MEMORY_KIB_MAX),
        ("time cost", found.time_cost, TIME_COST_MAX),
        ("parallelism", found.parallelism, LANES_MAX),
    )
    return next((f"{name} {n}, limit {most}" for name, n, most in costs if n > most), "")


class PasswordVerifier:
    """Verifies passwords of the users of the token file.

    Attributes:
        users: Argon2id hash of each user.
    """

    def __init__(self) -> None:
        self.users: Mapping[str, str] = {}
        self._key = secrets.token_bytes(32)
        self._remembered: OrderedDict[bytes, int] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._hasher: PasswordHasher | None = None
        self._decoy = ""
        self._thread: ThreadPoolExecutor | None = None

    def set_users(self, users: Mapping[str, str]) -> None:
        """Replace the users; a password of a changed hash is not remembered."""
        self.users = users
        if users and self._hasher is None:
            self._hasher = _hasher()
        # Its outcome does not count: an unknown user has no hash.
        self._decoy = max(users.values(), key=_cost, default="")

    def remembered(self, credentials: Credentials) -> str | None:
        """Return the hash of a password that was verified recently; None for any other."""
        encoded = self.users.get(credentials.user)
        if encoded is None:
            return None
        expires_ns = self._remembered.get(self._digest(encoded, credentials), 0)
        return encoded if now_ns() < expires_ns else None

    async def verify(self, credentials: Credentials, origin: Origin = UNKNOWN_ORIGIN) -> str | None:
        """Return the hash that a password matches, or None.

        An unknown user costs as much as a wrong password of the user with the most expensive hash.

        Raises:
            Overloaded: Too many verifications wait, of this host or of all.
        """
        if len(credentials.password) > PASSWORD_BYTES_MAX:
            return None
        host = origin.host
        self._require_room(host)
        encoded = self.users.get(credentials.user)
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "passwords", initializer=_lower_priority)
        self._waiting[host] += 1
        try:
            is_valid = await loop.run_in_executor(
                self._thread, self._matches, encoded or self._decoy, credentials.password
            )
        finally:
            self._waiting[host] -= 1
            self._waiting += Counter()  # Drops the zeros.
        if not is_valid or encoded is None or self.users.get(credentials.user) != encoded:
            return None
        if len(self._remembered) >= REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        self._remembered[self._digest(encoded, credentials)] = now_ns() + REMEMBERED_S * NS_PER_S
        return encoded

    def stop(self) -> None:
        """End the thread; verifications that wait are cancelled."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _require_room(self, host: str) -> None:
        waiting, of_host = self._waiting.total(), self._waiting[host]
        if waiting < WAITING_MAX and of_host < WAITING_OF_HOST_MAX:
            return
        text = f"too many passwords to verify: {waiting} waiting, limit {WAITING_MAX}; "
        text += f"{of_host} of this host, limit {WAITING_OF_HOST_MAX}"
        raise Overloaded(text, retry_after_ms=RETRY_MS)

    def _matches(self, encoded: str, password: str) -> bool:
        """Whether a password has a hash; runs on the thread."""
        from argon2.exceptions import Argon2Error, InvalidHashError

        assert self._hasher is not None
        with contextlib.suppress(Argon2Error, InvalidHashError):
            return self._hasher.verify(encoded, password)
        return False

    def _digest(self, encoded: str, credentials: Credentials) -> bytes:
        parts = (encoded.encode(), credentials.user.encode(), credentials.password.encode())
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()


def _hasher() -> Any:  # noqa: ANN401
    try:
        from argon2 import PasswordHasher
    except ImportError:
        raise ConfigError(f"passwords need argon2-cffi: {INSTALL}") from None
    return PasswordHasher(time_cost=TIME_COST, memory_cost=MEMORY_KIB, parallelism=1)


def _cost(encoded: str) -> int:
    """Return the work of a verification: blocks of memory times passes."""
    from argon2 import extract_parameters

    found = extract_parameters(encoded)
    return found.memory_cost * found.time_cost


def _lower_priority() -> None:
    """Give way to the event loop, which may share the core. Source: sched(7)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
