"""Wheel check: builds the wheel, checks its contents, installs it and runs tests on it.

The wheel is compiled if there is a C compiler. It runs all tests with processes, slow ones too;
`make test-sources` runs the others on the interpreted sources, with one that copies them.

The wheel of `iskander-client` is installed in an environment of its own: it scores against the
gateway of the compiled wheel, and a small project is type-checked against it.

The tests run in an empty folder from a copy of `tests/` and the files that they read, so no import
can find the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import build_client
import build_wheel

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
READ_BY_TESTS = ("tests", "configs", "docs", "scripts", "benchmarks", "pyproject.toml")
TESTS = ("tests/system", "tests/process")
NEED_SOURCES = ("tests/system/test_client_distribution.py",)
"""Tests that copy the sources, which the wheel's folder lacks; `make test-sources` runs them."""
SERVER_LIBRARIES = ("onnxruntime", "msgspec", "iskander_worker")
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 30.0
CLIENT_SCRIPT = """
import sys, time
import pyarrow as pa
from iskander.client import Client
from iskander.errors import NotReady

def is_ready(client):
    try:
        return client.health()["ready"]
    except NotReady:
        return False

deadline = time.monotonic() + float(sys.argv[2])
with Client(sys.argv[1]) as client:
    while not is_ready(client):
        assert time.monotonic() < deadline, "the server did not become ready"
        time.sleep(0.05)
    ids = pa.table({"user_id": [1, 2], "item_id": [10, 20]})
    result = client.score("movielens-two-tower", ids)
assert len(result) == 2 and result["score"].null_count == 0, result
print(f"iskander-client scored {len(result)} rows")
"""
# An unused `type: ignore` is an error of strict mypy: without `py.typed`, it reports that line.
TYPED_PROJECT = """
from typing import Any, assert_type

from iskander.client import Client
from iskander.errors import IskanderError


def column_of(error: IskanderError) -> str | None:
    return error.column


def models() -> list[dict[str, Any]]:
    with Client("localhost:50051") as client:
        return assert_type(client.models(), list[dict[str, Any]])


Client("localhost:50051", token=5)  # type: ignore[arg-type]
"""


def main() -> None:
    """Run all steps; exit 1 at the first failure."""
    wheel = build_wheel.wheel()
    require_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="iskander-wheel-") as name:
        folder = Path(name)
        check_pure_wheel(folder / "pure")
        python = install(wheel, folder / "venv")
        is_compiled = not wheel.name.endswith("none-any.whl")
        require_build(python, "compiled" if is_compiled else "interpreted")
        check_client_wheel(folder / "client", python)
        checkout = folder / "checkout"
        for part in READ_BY_TESTS:
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            (checkout / part).parent.mkdir(parents=True, exist_ok=True)
            copy(source, checkout / part)
        shared = ROOT.parent / "shared"
        if shared.exists():
            (folder / "shared").symlink_to(shared)
        where = "import iskander, iskander_worker; print(iskander.__file__)"
        found = subprocess.run(
            [python, "-c", where], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout
        if str(folder / "venv") not in found:
            sys.exit(f"the tests import iskander from outside the wheel: {found}")
        pytest = [python.parent / "pytest", "-q", "-n", "3", "--dist", "loadfile"]
        pytest += ["--no-loadscope-reorder", "-p", "no:cacheprovider", *TESTS]
        pytest += [f"--ignore={name}" for name in NEED_SOURCES]
        environment = os.environ | {"ISKANDER_SLOW": "1"}
        done = subprocess.run(pytest, cwd=checkout, env=environment, check=False)
        if done.returncode:
            sys.exit(done.returncode)


def require_contents(wheel: Path) -> None:
    """Check for the two packages, the shared files, the metadata and the compiled modules."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if "__mypyc." not in name}
    version = wheel.name.split("-")[1]
    expected = {"iskander", "iskander_worker"}
    expected |= {f"iskander-{version}.{part}" for part in ("data", "dist-info")}
    if tops != expected:
        sys.exit(f"the wheel contains {sorted(tops)}, expected {sorted(expected)}")
    if "iskander/_systemd/iskander-gateway.service" not in names:
        sys.exit("the wheel has no systemd units for `iskander install-systemd`")
    require_sbom(wheel, "iskander.cdx.json")
    print(f"{wheel.name}: {len(names)} files")


def require_sbom(wheel: Path, name: str) -> None:
    """Check for the software bill of materials of this checkout."""
    distribution, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as files:
        found = files.read(f"{distribution}-{version}.dist-info/sboms/{name}")
    if found != (ROOT / "scripts" / "sboms" / name).read_bytes():
        sys.exit(f"{wheel.name} has another bill of materials than scripts/sboms/{name}")


def check_pure_wheel(venv: Path) -> None:
    """Run the quickstart with the pure wheel, which pip installs where no compiled wheel fits."""
    python = install(build_wheel.wheel(is_pure=True), venv, extra="")
    require_build(python, "interpreted")
    subprocess.run([python, ROOT / "scripts" / "quickstart.py"], cwd=venv, check=True)


def check_client_wheel(folder: Path, server: Path) -> None:
    """Check the client wheel in a clean environment against the gateway of another one."""
    wheel = build_client.wheel(folder)
    expected = {*build_client.modules().values(), build_client.TYPED}
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {name for name in names if ".dist-info/" not in name}
    if found != expected or not wheel.name.endswith("-py3-none-any.whl"):
        sys.exit(f"{wheel.name} contains {sorted(found)}, expected {sorted(expected)}")
    require_sbom(wheel, build_client.SBOM)
    python = install(wheel, folder / "venv", extra="")
    search = f"import importlib.util as u; print([n for n in {SERVER_LIBRARIES} if u.find_spec(n)])"
    done = subprocess.run(
        [python, "-c", search], cwd=folder, capture_output=True, text=True, check=True
    )
    if done.stdout.strip() != "[]":
        sys.exit(f"{wheel.name} installs libraries of the server: {done.stdout}")
    score_with_client(python, server, folder)
    add(python, "mypy")
    (folder / "typed").mkdir()
    (folder / "typed" / "project.py").write_text(TYPED_PROJECT)
    mypy = [python, "-m", "mypy", "--strict", "project.py"]
    subprocess.run(mypy, cwd=folder / "typed", check=True)


def score_with_client(client: Path, server: Path, folder: Path) -> None:
    """Score with one environment's client against another one's gateway."""
    config = ROOT / "configs" / "quickstart.toml"
    address = f"unix:{folder / 'gateway.sock'}"
    environment = os.environ | {
        "ISKANDER_SERVER__ADDRESS": address,
        "ISKANDER_SERVER__RUNTIME_DIRECTORY": str(folder / "run"),
    }
    command = [server.parent / "iskander-gateway", "--config", config]
    gateway = subprocess.Popen(command, env=environment)
    try:
        script = [client, "-c", CLIENT_SCRIPT, address, str(READY_WITHIN_S)]
        subprocess.run(script, cwd=folder, check=True, timeout=2 * READY_WITHIN_S)
    finally:
        gateway.terminate()
        try:
            gateway.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            gateway.kill()
            gateway.wait()


def require_build(python: Path, build: str) -> None:
    """Check the kind of build that the installed command reports."""
    command = [python.parent / "iskander", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if f"({build}, " not in found:
        sys.exit(f"expected a build that is {build}: {found}")


def install(wheel: Path, venv: Path, extra: str = "[test]") -> Path:
    """Install the wheel with an extra in the locked versions; return the new Python."""
    python = venv / "bin" / "python"
    create = ["uv", "venv", "--quiet", "--python", sys.executable]
    if not shutil.which("uv"):
        create = [sys.executable, "-m", "venv"]
    subprocess.run([*create, venv], check=True)
    add(python, f"{wheel}{extra}")
    return python


def add(python: Path, requirement: str) -> None:
    """Install a requirement in the locked versions."""
    command = ["uv", "pip", "install", "--quiet", "--python", python]
    if not shutil.which("uv"):
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", CONSTRAINTS, requirement], check=True)


if __name__ == "__main__":
    main()
