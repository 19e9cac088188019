"""Build the wheel, look into it, install it in a fresh environment and run the system tests on it.

Compiled where there is a C compiler, so that both ways to run the same files are tested: the
checkout's own tests run them as they are.

The tests run from a copy of `tests/` and of what they read, in an empty folder, so that nothing of
the checkout can be imported by accident.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ_BY_TESTS = ("tests", "configs", "docs", "scripts", "benchmarks", "pyproject.toml")


def main() -> None:
    """Run all of it; exit 1 at the first thing that is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="iskander-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        require_contents(wheel)
        python = install(wheel, folder / "venv")
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
            sys.exit(f"the tests would not run on the wheel: {found}")
        pytest = [python.parent / "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        pytest += ["tests/system", "-p", "no:cacheprovider"]
        sys.exit(subprocess.run(pytest, cwd=checkout, check=False).returncode)


def build(folder: Path) -> Path:
    """Build the wheel by a standard front end."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    if shutil.which("uv"):
        command = ["uv", "build", "--quiet", "--wheel", "--out-dir", folder]
    is_compiled = shutil.which("cc") is not None
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": str(int(is_compiled))}
    subprocess.run([*command, ROOT], check=True, env=environment)
    (wheel,) = folder.glob("iskander-*.whl")
    return wheel


def require_contents(wheel: Path) -> None:
    """Only the two packages, the shared files, the metadata, and what compiled modules share."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if "__mypyc." not in name}
    version = wheel.name.split("-")[1]
    wanted = {"iskander", "iskander_worker"}
    wanted |= {f"iskander-{version}.{part}" for part in ("data", "dist-info")}
    if tops != wanted:
        sys.exit(f"the wheel has {sorted(tops)}, wanted {sorted(wanted)}")
    print(f"{wheel.name}: {len(names)} files")


def install(wheel: Path, venv: Path) -> Path:
    """Install the wheel with what its tests need; the environment's Python."""
    python = venv / "bin" / "python"
    if shutil.which("uv"):
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
        command = ["uv", "pip", "install", "--quiet", "--python", python]
    else:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, f"{wheel}[test]"], check=True)
    return python


if __name__ == "__main__":
    main()
