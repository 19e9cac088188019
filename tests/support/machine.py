"""A small Debian machine with systemd as PID 1, in namespaces of systemd-nspawn. It needs root.

Its root file system is made once by mmdebstrap, in `build/deb`. It has no network but loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.models import ROOT
from support.processes import eventually

BUILD = ROOT / "build" / "deb"
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "dpkg-buildpackage": "dpkg-dev",
    "dh": "debhelper",
}
# Of a machine with systemd, and what the package depends on: nothing is downloaded later.
PACKAGES = "systemd,systemd-sysv,dbus,procps,man-db,python3,libstdc++6"
BOOT_WITHIN_S, COMMAND_WITHIN_S = 60.0, 240.0
ENVIRONMENT = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8")


def require_tools() -> None:
    """Skip without root or a tool."""
    if os.geteuid() != 0:
        pytest.skip("a machine is started by root only")
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"tools are missing: apt-get install {' '.join(missing)}")


class Machine:
    """A running machine.

    Attributes:
        root: Its root file system.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        subprocess.run(["tar", "-xf", _archive(), "-C", self.root, "--exclude=./dev/*"], check=True)
        self._log = folder / "boot.log"
        command = ["systemd-nspawn", "--quiet", "--directory", str(self.root), "--boot"]
        command += ["--console=pipe", "--private-network", "--register=no", "--resolv-conf=off"]
        # Without systemd on this machine, nothing can create a scope for it.
        command += [] if Path("/run/systemd/system").is_dir() else ["--keep-unit"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._leader: int = eventually(self._find_leader, BOOT_WITHIN_S, "the machine's PID 1")
            eventually(self._is_running, BOOT_WITHIN_S, "the boot of the machine")
        except BaseException:
            sys.stderr.write(self._log.read_text(errors="replace")[-4000:])
            self.end()
            raise

    def run(self, *command: str, code: int | None = 0) -> str:
        """Run a command in the machine; return its output. `code` None: any exit code."""
        enter = ["nsenter", f"--target={self._leader}", "--all", "--wd=/"]
        done = subprocess.run(
            [*enter, "env", "-i", "-C", "/", *ENVIRONMENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_WITHIN_S,
            check=False,
        )
        assert code in (None, done.returncode), f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout.strip()

    def files(self) -> set[str]:
        """Return the paths of all files that a package can create."""
        left_out = ("-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/dev", "-o")
        left_out += ("-path", "/var/log", "-o", "-path", "/var/cache/man", "-o", "-path", "/tmp")
        found = self.run("find", "/", "(", *left_out, ")", "-prune", "-o", "-print", code=None)
        # What the service manager writes for every service.
        skipped = ("/run/systemd/", "/run/log/", "/run/credentials/", "/var/tmp/systemd-private")
        return {path for path in found.splitlines() if not path.startswith(skipped)}

    def end(self) -> None:
        """Stop the machine."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(BOOT_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _find_leader(self) -> int | None:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        children = psutil.Process(self._process.pid).children()
        found = [each.pid for each in children if each.name() == "systemd"]
        return found[0] if found else None

    def _is_running(self) -> bool:
        return self.run("systemctl", "is-system-running", code=None) in ("running", "degraded")


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A machine for the time of the block."""
    booted = Machine(folder)
    try:
        yield booted
    finally:
        booted.end()


def _archive() -> Path:
    """Return the root file system of Debian's release of this machine."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )["VERSION_CODENAME"]
    archive = BUILD / f"{release}.tar"
    if not archive.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
        source = f"deb http://deb.debian.org/debian {release} main"
        subprocess.run([*command, release, partial, source], check=True)
        partial.rename(archive)
    return archive
