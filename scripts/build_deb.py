"""Builds the Debian package: a virtual environment in /usr/lib/iskander, units, man pages.

    python scripts/build_deb.py [FOLDER]

Runs on the Debian release for which the package is, with its own Python (`/usr/bin/python3`):
`apt-get install debhelper dpkg-dev python3-venv`. The Python libraries have the locked versions.
`DEBFULLNAME` and `DEBEMAIL` set the maintainer, as for Debian's tools.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from email.utils import format_datetime
from pathlib import Path

import build_man
import build_wheel

from iskander import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "deb"
COMPLETIONS = {
    "bash": "bash-completion/completions/iskander",
    "zsh": "zsh/vendor-completions/_iskander",
    "fish": "fish/vendor_completions.d/iskander.fish",
}
"""Files of the shell completions in `/usr/share`."""
CONTROL = ROOT / "configs" / "debian"
UNITS = ROOT / "configs" / "systemd"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
PYTHON = "/usr/bin/python3"
HOME = "usr/lib/iskander"
EXTRAS = "http,signed,score"
REVISION = 1
COMMANDS = ("iskander", "iskander-gateway", "iskander-worker")
GPU_LIBRARIES = "libonnxruntime_providers_[ct]*.so"
"""CUDA and TensorRT: 280 MB that only a GPU uses. `libonnxruntime_providers_shared.so` stays."""


def package(folder: Path) -> Path:
    """Build the package into a folder; return its path."""
    source = BUILD / f"iskander-{__version__}"
    shutil.rmtree(source, ignore_errors=True)
    tree = source / "tree"
    python = _environment(tree)
    _install_files(tree)
    _write_control(source / "debian", python)
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(_epoch())}
    command = ["dpkg-buildpackage", "-b", "-us", "-uc"]
    subprocess.run(command, cwd=source, check=True, env=environment)
    built = next(BUILD.glob(f"iskander_{__version__}-{REVISION}_*.deb"))
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(built, folder))


def _environment(tree: Path) -> str:
    """Install the wheel into the tree, as if it were the root; return Python's version."""
    home = tree / HOME
    # Without pip and setuptools, which only install into it.
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", home], check=True)
    installer = BUILD / "installer"
    if not installer.exists():
        subprocess.run([PYTHON, "-m", "venv", installer], check=True)
    pip = [installer / "bin" / "python", "-m", "pip", "--python", home / "bin" / "python"]
    pip += ["install", "--quiet", "--no-compile", "-c", CONSTRAINTS]
    subprocess.run([*pip, f"{build_wheel.wheel()}[{EXTRAS}]"], check=True)
    libraries = next((home / "lib").glob("python*/site-packages"))
    for path in libraries.rglob(GPU_LIBRARIES):
        path.unlink()
    _move_to_root(home)
    # The service may not write them. By hash: dpkg sets the times of the files.
    compile_all = [PYTHON, "-m", "compileall", "-q", "-s", tree, "-p", "/"]
    compile_all += ["--invalidation-mode", "unchecked-hash", libraries]
    subprocess.run(compile_all, check=True)
    return libraries.parent.name.removeprefix("python")


def _move_to_root(home: Path) -> None:
    """Keep the commands of Iskander and Python only, and replace the paths of the build."""
    for path in (home / "bin").iterdir():
        if path.is_symlink():
            continue
        if path.name not in COMMANDS:
            path.unlink()
            continue
        first, _, rest = path.read_text().partition("\n")
        assert first == f"#!{home}/bin/python", first
        path.write_text(f"#!/{HOME}/bin/python\n{rest}")
    settings = home / "pyvenv.cfg"
    settings.write_text(re.sub(r"^command = .*\n", "", settings.read_text(), flags=re.MULTILINE))
    for name in ("include", "lib64"):
        path = home / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def _install_files(tree: Path) -> None:
    """Put commands, units and the configuration where a Debian package has them."""
    bin_folder = tree / "usr" / "bin"
    bin_folder.mkdir(parents=True)
    for command in COMMANDS:
        (bin_folder / command).symlink_to(f"../lib/iskander/bin/{command}")
    units = tree / "lib" / "systemd" / "system"
    units.mkdir(parents=True)
    for unit in (path for path in UNITS.iterdir() if path.suffix in _UNIT_KINDS):
        (units / unit.name).write_text(unit.read_text().replace("/usr/local/bin", "/usr/bin"))
    etc = tree / "etc" / "iskander"
    etc.mkdir(parents=True)
    shutil.copy(CONTROL / "iskander.toml", etc)
    examples = tree / "usr" / "share" / "doc" / "iskander" / "examples"
    shutil.copytree(UNITS / "drop-ins", examples / "systemd")
    for shell, place in COMPLETIONS.items():
        path = tree / "usr" / "share" / place
        path.parent.mkdir(parents=True)
        command = [Path(sys.executable).parent / "iskander", "completion", shell]
        path.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


_UNIT_KINDS = (".service", ".target", ".slice", ".timer")


def _write_control(debian: Path, python: str) -> None:
    """Write the control files, with the version and the maintainer."""
    debian.mkdir()
    name = os.environ.get("DEBFULLNAME", "Iskander packagers")
    maintainer = f"{name} <{os.environ.get('DEBEMAIL', 'iskander@localhost.localdomain')}>"
    major, minor = python.split(".")
    next_python = f"{major}.{int(minor) + 1}"
    values = {"MAINTAINER": maintainer, "PYTHON": python, "NEXT_PYTHON": next_python}
    for path in CONTROL.iterdir():
        if path.suffix == ".toml":
            continue
        text = re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], path.read_text())
        (debian / path.name).write_text(text)
    (debian / "rules").chmod(0o755)
    for kind in ("sysusers", "tmpfiles"):
        shutil.copy(UNITS / f"iskander.{kind}", debian)
    pages = build_man.build(debian / "man")
    (debian / "iskander.manpages").write_text(
        "".join(f"debian/man/{page.name}\n" for page in pages)
    )
    date = format_datetime(datetime.datetime.fromtimestamp(_epoch(), datetime.UTC))
    (debian / "changelog").write_text(
        f"iskander ({__version__}-{REVISION}) unstable; urgency=medium\n\n"
        f"  * Release {__version__}.\n\n -- {maintainer}  {date}\n"
    )


def _epoch() -> int:
    """Return the time of the sources, which makes builds of the same sources equal."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", (ROOT / "CHANGELOG.md").stat().st_mtime))


if __name__ == "__main__":
    print(package(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist"))
