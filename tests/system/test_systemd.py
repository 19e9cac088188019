"""systemd: valid and restricted units, `iskander install-systemd`, and notifications.

`tests/packaging` runs the units under a real systemd.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from support import models
from support.gpus import ScriptedNvml
from support.processes import (
    BIN,
    READY_WITHIN_S,
    STOP_WITHIN_S,
    Gateway,
    PlainClient,
    eventually,
    render_config,
)

UNITS = models.ROOT / "configs" / "systemd"
EXPOSURE_MAX = 2.0
SERVICES = ("iskander-gateway.service", "iskander-worker@.service", "iskander-score@.service")
DROP_INS = {
    "credentials.conf": "iskander-gateway.service",
    "gpu.conf": "iskander-worker@0.service",
    "two-sockets.conf": "iskander-worker@0.service",
}
# As root, commands keep no capability, as in the units.
UNPRIVILEGED = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
WATCHDOG_S = 0.9


def run(*command: object, code: int = 0) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def require_systemd() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("`systemd-analyze` is missing: apt-get install systemd")


def verify(units: Path) -> str:
    """Return the complaints of systemd; also an unknown key, for which it exits with 0."""
    files = sorted(path for path in units.iterdir() if path.is_file())
    return run("systemd-analyze", "verify", "--man=no", *files)


def exposure(unit: Path) -> float:
    """Return the exposure level of a service, from 0 to 10."""
    text = run("systemd-analyze", "security", "--offline=true", unit)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert found, text
    return float(found[1])


def instances(target: Path) -> Path:
    """Copy the units, with an instance of each template and the commands of this Python."""
    for path in UNITS.iterdir():
        if path.suffix in (".service", ".timer", ".target", ".slice"):
            text = path.read_text().replace("/usr/local/bin", str(BIN))
            (target / path.name.replace("@.", "@0.")).write_text(text)
    return target


def test_units_are_valid(tmp_path: Path) -> None:
    require_systemd()
    units = instances(tmp_path)
    assert len(list(units.iterdir())) == 6
    assert verify(units) == ""
    assert {path.name for path in (UNITS / "drop-ins").iterdir()} == DROP_INS.keys()
    for name, unit in DROP_INS.items():
        (units / f"{unit}.d").mkdir(exist_ok=True)
        shutil.copy(UNITS / "drop-ins" / name, units / f"{unit}.d")
    assert verify(units) == ""
    (units / "iskander-gateway.service.d" / "typo.conf").write_text("[Service]\nTypo=yes\n")
    assert "Typo" in verify(units)


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_restricted(name: str) -> None:
    require_systemd()
    assert 0 < exposure(UNITS / name) <= EXPOSURE_MAX


def test_fragments_create_the_account_and_its_folders(tmp_path: Path) -> None:
    for tool in ("systemd-sysusers", "systemd-tmpfiles"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` is missing: apt-get install systemd")
    if os.geteuid() != 0:
        pytest.skip("folders of another account are created by root only")
    (tmp_path / "etc").mkdir()
    run("systemd-sysusers", f"--root={tmp_path}", UNITS / "iskander.sysusers")
    account = re.search(r"^iskander:x:(\d+):", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    assert account
    run("systemd-tmpfiles", f"--root={tmp_path}", "--create", UNITS / "iskander.tmpfiles")
    for name, mode in {"etc/iskander": 0o750, "run/iskander": 0o700}.items():
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
    assert (tmp_path / "run/iskander").stat().st_uid == int(account[1])
    # The services may not change what they serve.
    assert (tmp_path / "var/lib/iskander/models").stat().st_uid == 0


def write_config(folder: Path, model: dict[str, Any] | None = None, **sections: Any) -> Path:
    served = {"name": "ids", "path": str(models.row_ids(folder / "ids")), "version": "1"}
    served |= model or {}
    file = folder / "own.toml"
    file.write_text(
        render_config(
            models=[served],
            server={"address": "127.0.0.1:0", "runtime_directory": str(folder / "run")},
            admin={"address": ""},
            arena={"input_bytes": 80 << 20, "output_bytes": 16 << 20},
            loading={"sandbox": False},
            **sections,
        )
    )
    return file


def install(file: Path, prefix: Path, *options: str, code: int = 0) -> str:
    command = (BIN / "iskander", "install-systemd", "--config", file, "--prefix", prefix)
    return run(*command, *options, code=code)


def exec_start(units: Path, unit: str) -> list[str]:
    """Return the command of an installed unit, with its drop-ins."""
    template = re.sub(r"@\w+\.", "@.", unit)
    files = [units / template, *sorted((units / f"{unit}.d").glob("*.conf"))]
    command = ""
    for path in files:
        for line in path.read_text().splitlines():
            key, is_setting, value = line.partition("=")
            if is_setting and key == "ExecStart":
                command = value
    instance = re.search(r"@(\w+)\.", unit)
    return shlex.split(command.replace("%i", instance[1] if instance else ""))


def test_written_units_serve_the_configuration(tmp_path: Path) -> None:
    """Runs the commands of the units, without capabilities and without new privileges."""
    require_systemd()
    if shutil.which("setpriv") is None:
        pytest.skip("`setpriv` is missing: apt-get install util-linux")
    file = write_config(tmp_path, workers={"spawn": False, "groups": ["0"], "count": 1})
    text = install(file, tmp_path / "etc")
    assert "systemctl enable --now iskander-gateway iskander-worker@0\n" in text
    units = tmp_path / "etc/systemd/system"
    for name in SERVICES[:2]:
        assert exposure(units / name) <= EXPOSURE_MAX
    instance = units / "iskander-worker@0.service"
    instance.write_text((units / "iskander-worker@.service").read_text())
    assert verify(units) == ""
    with notified(tmp_path) as manager:
        environment = dict(os.environ, NOTIFY_SOCKET=manager.path)
        gateway, worker = (
            subprocess.Popen([*UNPRIVILEGED, *exec_start(units, unit)], env=environment)
            for unit in ("iskander-gateway.service", "iskander-worker@0.service")
        )
        try:
            address = manager.wait_for("X_ISKANDER_ADDRESS")
            with PlainClient(address) as client:
                eventually(lambda: client.health()["ready"], READY_WITHIN_S, "readiness")
                batch = pa.record_batch({"x": pa.array([3, 4], pa.int64())})
                assert client.score("ids", batch).num_rows == 2
            status = Path(f"/proc/{worker.pid}/status").read_text()
            assert re.search(r"^CapBnd:\s+0+$", status, re.MULTILINE)
            for each in (gateway, worker):  # A stopped gateway leaves the workers to the manager.
                assert each.poll() is None
                each.terminate()
                assert each.wait(STOP_WITHIN_S) == 0
        finally:
            for each in (gateway, worker):
                each.kill()
                each.wait()


def test_units_of_workers_with_a_card_are_restricted_to_it(tmp_path: Path) -> None:
    """The exposure is that of the template, with the lines of the drop-ins of one instance."""
    require_systemd()
    nvml = ScriptedNvml(tmp_path)
    workers = {"spawn": False, "groups": ["0", "gpu:0"], "count": 1}
    file = write_config(tmp_path, {"placement": "any"}, workers=workers)
    command = (BIN / "iskander", "install-systemd", "--config", file, "--prefix", tmp_path / "etc")
    environment = [f"{name}={value}" for name, value in nvml.environment.items()]
    text = run("env", *environment, *command)
    assert "systemctl enable --now iskander-gateway iskander-worker@0 iskander-worker@1\n" in text
    units = tmp_path / "etc/systemd/system"
    drop_ins = units / "iskander-worker@1.service.d"
    assert "DeviceAllow=/dev/nvidia0 rw\n" in (drop_ins / "gpu.conf").read_text()
    for unit in ("iskander-worker@1.service", SERVICES[0]):
        name = re.sub(r"@\d", "@", unit)
        lines = [path.read_text() for path in sorted((units / f"{unit}.d").glob("*.conf"))]
        (units / unit).write_text("\n".join([(units / name).read_text(), *lines]))
        assert exposure(units / unit) <= EXPOSURE_MAX
    assert verify(units) == ""


def test_changed_files_are_kept_unless_forced(tmp_path: Path) -> None:
    file, etc = write_config(tmp_path), tmp_path / "etc"
    before = install(file, etc, "--dry-run")
    assert not etc.exists() and "ExecStart=" in before
    install(file, etc)
    again = json.loads(install(file, etc, "--json"))
    assert {each["state"] for each in again["files"]} == {"unchanged"}
    assert all(Path(each["path"]).read_text() == each["text"] for each in again["files"])
    assert again["commands"][-1] == "systemctl enable --now iskander-gateway"
    slice_file = etc / "systemd/system/iskander.slice"
    own = slice_file.read_text() + "MemoryMax=8G\n"
    slice_file.write_text(own)
    gateway = etc / "systemd/system/iskander-gateway.service.d/plan.conf"
    gateway.unlink()
    text = install(file, etc, code=78)
    assert str(slice_file) in text and "--force" in text
    # Nothing else is written either.
    assert slice_file.read_text() == own and not gateway.exists()
    install(file, etc, "--force")
    assert "MemoryMax=8G" not in slice_file.read_text() and gateway.exists()


def test_files_of_an_earlier_installation_have_notes(tmp_path: Path) -> None:
    workers = {"spawn": False, "groups": ["0"], "count": 1}
    file, etc = write_config(tmp_path, workers=workers), tmp_path / "etc"
    assert "no longer needed" not in install(file, etc, "--user", "nobody")
    own = etc / "systemd/system/iskander-gateway.service.d/own.conf"
    own.write_text("[Service]\nNice=5\n")
    notes = json.loads(install(write_config(tmp_path), etc, "--json"))["notes"]
    units = etc / "systemd/system"
    drop_in = units / "iskander-worker@0.service.d/plan.conf"
    disable = f"systemctl disable --now iskander-worker@0; rm {drop_in}"
    assert [note for note in notes if note.endswith(disable)]
    # Otherwise the services would still have the earlier account.
    for name in ("iskander-gateway.service.d/user.conf", "iskander-worker@.service"):
        assert [note for note in notes if note.endswith(f"no longer needed: rm {units / name}")]
    assert not [note for note in notes if "own.conf" in note]


def test_folders_that_do_not_exist_are_created_by_a_printed_command(tmp_path: Path) -> None:
    log = tmp_path / "a b" / "log"
    file = write_config(tmp_path, prediction_log={"path": str(log)})
    command = f"install -d -o iskander -m 0750 '{log}'"
    assert command in json.loads(install(file, tmp_path / "etc", "--json"))["commands"]
    log.mkdir(parents=True)
    assert command not in json.loads(install(file, tmp_path / "etc", "--json"))["commands"]


class Manager:
    """A service manager that records the notifications of a service, with their times."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.messages: list[tuple[float, dict[str, str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        while data := self._socket.recv(4096):
            lines = data.decode().splitlines()
            fields = dict(line.partition("=")[::2] for line in lines)
            self.messages.append((time.monotonic(), fields))

    def find(self, key: str, value: str | None = None) -> dict[str, str] | None:
        """Return the first notification with a field, or with this value of it."""
        found = (fields for _, fields in list(self.messages) if key in fields)
        return next((each for each in found if value in (None, each[key])), None)

    def wait_for(self, key: str) -> str:
        fields = eventually(lambda: self.find(key), READY_WITHIN_S, key)
        return str(fields[key])

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(b"", self.path)
        self._thread.join(STOP_WITHIN_S)
        self._socket.close()


@contextmanager
def notified(folder: Path) -> Iterator[Manager]:
    manager = Manager(folder / "manager")
    try:
        yield manager
    finally:
        manager.close()


@contextmanager
def managed(folder: Path, served: list[dict[str, Any]]) -> Iterator[tuple[Gateway, Manager]]:
    """A gateway whose service manager is the test."""
    with notified(folder) as manager:
        gateway = Gateway(folder, served, workers={"groups": ["0"], "count": 1})
        gateway.prefix = ("env", f"NOTIFY_SOCKET={manager.path}")
        try:
            watchdog = {"WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
            gateway.start(is_ready=False, **watchdog)
            yield gateway, manager
        finally:
            gateway.end()


def test_gateway_is_ready_for_the_manager_when_a_worker_is(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with managed(tmp_path, served) as (gateway, manager):
        # The worker is stopped before it can load the model.
        worker = eventually(lambda: started_worker(gateway.pid), what="a worker")
        worker.suspend()
        eventually(gateway.attach_socket.exists, what="the attach socket")
        eventually(lambda: len(manager.messages) > 3, what="heartbeats")
        assert manager.find("READY") is None
        worker.resume()
        gateway.address = manager.wait_for("X_ISKANDER_ADDRESS")
        ready = manager.find("READY", "1")
        assert ready is not None and ready["STATUS"] == f"serving on {gateway.address}"
        assert gateway.stats()["ready"]


def test_manager_receives_heartbeats_reload_and_stop(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with managed(tmp_path, served) as (gateway, manager):
        manager.wait_for("READY")
        eventually(lambda: len(beats(manager)) > 5, what="heartbeats")
        gaps = sorted(later - earlier for earlier, later in pairwise(beats(manager)))
        # The median: a busy machine may delay one.
        assert gaps[len(gaps) // 2] < WATCHDOG_S / 2
        before_us = time.monotonic_ns() // 1000
        count = len(manager.messages)
        gateway.signal(signal.SIGHUP)
        reload = eventually(lambda: manager.find("RELOADING", "1"), what="RELOADING")
        assert before_us <= int(reload["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        later = [fields for _, fields in manager.messages[count:]]
        eventually(
            lambda: any("READY" in fields for _, fields in manager.messages[count:]),
            what="the end of the reload",
        )
        assert not any("READY" in fields for fields in later[: later.index(reload)])
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        stop = manager.find("STOPPING", "1")
        assert stop is not None and stop["STATUS"]


def started_worker(gateway: int) -> psutil.Process | None:
    """Return the worker once it runs its own command: until then the gateway waits for it."""
    found = psutil.Process(gateway).children()
    return found[0] if found and "--attach" in found[0].cmdline() else None


def beats(manager: Manager) -> list[float]:
    """Return the times of the heartbeats."""
    return [at for at, fields in list(manager.messages) if "WATCHDOG" in fields]


def test_invalid_configuration_is_not_started_again() -> None:
    """The exit code of the gateway is one at which the unit stays stopped."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(UNITS / "iskander-gateway.service")
    file = models.ROOT / "configs" / "quickstart.toml"
    code = int(unit["Service"]["RestartPreventExitStatus"])
    run(BIN / "iskander-gateway", "--config", file, "--set", "limits.rows=0", code=code)
