"""The Debian package, on a machine with systemd: install, serve, restart, upgrade, purge.

Takes minutes, so it runs with ISKANDER_DEB=1 only (`make test-deb`), or with ISKANDER_DEB=FILE.deb
for a package that is built already. Each test continues where the one before it ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine import BUILD, Machine, machine, require_tools
from support.models import ROOT
from support.processes import eventually

import iskander

SWITCH = "ISKANDER_DEB"
MODELS = ROOT / "configs" / "models"
MODEL = "movielens-two-tower"
GATEWAY = "iskander-gateway"
CONFIG = Path("etc/iskander/iskander.toml")
SPLIT = """
[server]
address = "127.0.0.1:50051"
processes = 1
[workers]
spawn = false
reattach_s = 0
[repository]
path = "/var/lib/iskander/models"
"""
KEPT = {"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-"}
"""Backups of account files: the account stays, as that of every Debian package."""
MAINTAINER = {"DEBFULLNAME": "Iskander tests", "DEBEMAIL": "tests@iskander.org"}


@pytest.fixture(scope="module")
def package() -> Path:
    given = os.environ.get(SWITCH)
    if not given:
        pytest.skip(f"the Debian package: `make test-deb`, or {SWITCH}=1")
    require_tools()
    if given != "1":
        return Path(given)
    folder = BUILD / "package"
    command = [sys.executable, str(ROOT / "scripts" / "build_deb.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | MAINTAINER, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-8000:]
    return next(folder.glob(f"iskander_{iskander.__version__}-*.deb"))


@pytest.fixture(scope="module")
def host(package: Path) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="isk-machine-") as folder, machine(Path(folder)) as it:
        shutil.copy(package, it.root / "root" / "iskander.deb")
        yield it


@pytest.fixture(scope="module")
def before(host: Machine) -> set[str]:
    return host.files()


def score(host: Machine) -> None:
    """Score a sample with the package's own command, on the machine."""
    words = f"{MODEL} /root/sample.parquet -o /root/scored.parquet --overwrite replace"
    host.run("iskander", "score", *words.split(), "--server", "127.0.0.1:50051", "--restart")


def wait_ready(host: Machine) -> None:
    eventually(lambda: "\nready" in host.run("iskander", "stats", code=None), 60.0, "readiness")


def main_pid(host: Machine, unit: str) -> int:
    return int(host.run("systemctl", "show", "--property=MainPID", "--value", unit))


def test_package_has_no_error_of_lintian(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("`lintian` is missing: apt-get install lintian")
    command = ["lintian", "--allow-root", "--fail-on", "error", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_installation_starts_nothing(host: Machine, before: set[str]) -> None:
    host.run("dpkg", "-i", "/root/iskander.deb")
    assert host.run("iskander", "--version").startswith(f"iskander {iskander.__version__} ")
    assert host.run("systemctl", "is-enabled", GATEWAY, code=None) == "disabled"
    assert host.run("systemctl", "is-active", GATEWAY, code=None) == "inactive"
    assert "/usr/share/man/man1/iskander-gateway.1.gz" in host.files() - before
    assert "EXIT STATUS" in host.run("man", "iskander-worker")


def test_started_service_serves_with_its_restrictions(host: Machine) -> None:
    shutil.copytree(MODELS / MODEL, host.root / "var/lib/iskander/models" / MODEL)
    shutil.copy(MODELS / MODEL / "sample.parquet", host.root / "root")
    check = host.run("runuser", "-u", "iskander", "--", "iskander", "check", f"/{CONFIG}")
    assert MODEL in check
    # The start returns once a worker is ready.
    host.run("systemctl", "enable", "--now", GATEWAY)
    score(host)
    pids = host.run("pgrep", "-u", "iskander", "isk-").split()
    assert len(pids) >= 2
    for pid in pids:
        status = host.run("cat", f"/proc/{pid}/status")
        assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE), status
        assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE), status
    # Without `PrivateUsers=` and `ProtectProc=` the gateway can read the memory of its worker.
    (worker,) = json.loads(host.run("iskander", "stats", "--json"))["workers"]
    assert worker["resident_bytes"] > 0
    grep = ("--grep", "not permitted|denied")
    assert not host.run("journalctl", "--quiet", "--unit", GATEWAY, *grep, code=None)


def test_worker_of_its_own_unit_outlives_the_gateway(host: Machine) -> None:
    host.run("systemctl", "stop", "iskander.target")
    (host.root / CONFIG).write_text(SPLIT)
    host.run("systemctl", "enable", "--now", GATEWAY, "iskander-worker@0")
    wait_ready(host)
    score(host)
    worker, gateway = main_pid(host, "iskander-worker@0"), main_pid(host, GATEWAY)
    (row,) = json.loads(host.run("iskander", "stats", "--json"))["workers"]
    assert row["pid"] == worker and row["resident_bytes"] > 0
    host.run("systemctl", "kill", "-s", "KILL", "--kill-whom=main", GATEWAY)
    eventually(lambda: main_pid(host, GATEWAY) not in (0, gateway), 60.0, "the next gateway")
    wait_ready(host)
    score(host)
    assert main_pid(host, "iskander-worker@0") == worker


def test_reload_replaces_both_processes_of_the_gateway_and_no_worker(host: Machine) -> None:
    (host.root / CONFIG).write_text(SPLIT.replace("processes = 1", "processes = 2"))
    host.run("systemctl", "restart", GATEWAY)
    wait_ready(host)
    worker = main_pid(host, "iskander-worker@0")
    processes = host.run("pgrep", "isk-gateway-").split()
    host.run("systemctl", "reload", GATEWAY)
    eventually(
        lambda: not set(processes) & set(host.run("pgrep", "isk-gateway-").split()),
        60.0,
        "the end of the reload",
    )
    wait_ready(host)
    score(host)
    assert main_pid(host, "iskander-worker@0") == worker


def test_upgrade_restarts_the_running_service(host: Machine) -> None:
    gateway, worker = main_pid(host, GATEWAY), main_pid(host, "iskander-worker@0")
    # The changed configuration is kept without a question.
    host.run("dpkg", "-i", "/root/iskander.deb")
    assert "processes = 2" in (host.root / CONFIG).read_text()
    wait_ready(host)
    score(host)
    assert main_pid(host, GATEWAY) not in (0, gateway)
    assert main_pid(host, "iskander-worker@0") not in (0, worker)


def test_invalid_configuration_is_not_started_again(host: Machine) -> None:
    (host.root / CONFIG).write_text(f"{SPLIT}[limits]\nrows = 0\n")
    host.run("systemctl", "restart", GATEWAY, code=1)
    shown = host.run("systemctl", "show", "--property=NRestarts,Result,ExecMainStatus", GATEWAY)
    assert set(shown.split()) == {"NRestarts=0", "Result=exit-code", "ExecMainStatus=78"}
    (host.root / CONFIG).write_text(SPLIT)
    host.run("systemctl", "restart", GATEWAY)
    wait_ready(host)


def test_purge_leaves_nothing(host: Machine, before: set[str]) -> None:
    host.run("dpkg", "--remove", "iskander")
    assert not host.run("pgrep", "-u", "iskander", code=1)
    assert (host.root / CONFIG).exists()
    shutil.rmtree(host.root / "var/lib/iskander/models" / MODEL)
    shutil.rmtree(host.root / "root")
    (host.root / "root").mkdir()
    host.run("dpkg", "--purge", "iskander")
    left = host.files() - before - KEPT
    assert left == set()
