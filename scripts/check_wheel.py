"""Wheel check: builds the wheel, checks its contents, installs it and runs tests on it.

The wheel is compiled if there is a C compiler, so both kinds of build are tested: `make test` runs
the interpreted sources. The wheel runs the slow tests, and those of the path of a batch.

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

import build_wheel

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
READ_BY_TESTS = ("tests", "configs", "docs", "scripts", "benchmarks", "pyproject.toml")
BATCH_PATH = (
    "serving",
    "strings",
    "outputs",
    "lanes",
    "draining",
    "oip_grpc",
    "shared_memory",
)


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
        pytest += ["--no-loadscope-reorder", "-p", "no:cacheprovider"]
        core = [f"tests/system/test_{part}.py" for part in BATCH_PATH]
        environment = os.environ | {"ISKANDER_SLOW": "1"}
        for selection in (
            ["-m", "slow", "tests/system", "tests/process"],
            ["-m", "not slow", *core],
        ):
            done = subprocess.run([*pytest, *selection], cwd=checkout, env=environment, check=False)
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
    print(f"{wheel.name}: {len(names)} files")


def check_pure_wheel(venv: Path) -> None:
    """Run the quickstart with the pure wheel, which pip installs where no compiled wheel fits."""
    python = install(build_wheel.wheel(is_pure=True), venv, extra="")
    require_build(python, "interpreted")
    subprocess.run([python, ROOT / "scripts" / "quickstart.py"], cwd=venv, check=True)


def require_build(python: Path, build: str) -> None:
    """Check the kind of build that the installed command reports."""
    command = [python.parent / "iskander", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if f"({build}, " not in found:
        sys.exit(f"expected a build that is {build}: {found}")


def install(wheel: Path, venv: Path, extra: str = "[test]") -> Path:
    """Install the wheel with an extra in the locked versions; return the new Python."""
    python = venv / "bin" / "python"
    if shutil.which("uv"):
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
        command = ["uv", "pip", "install", "--quiet", "--python", python]
    else:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", CONSTRAINTS, f"{wheel}{extra}"], check=True)
    return python


if __name__ == "__main__":
    main()
