"""Clients in other languages: their tools, builds and execution.

Builds are in `build/interop`. A missing tool skips a test, and the reason contains its package; a
client that does not compile fails it.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import IO, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent.parent
INTEROP: Final = ROOT / "tests" / "interop"
BUILD: Final = ROOT / "build" / "interop"
SWITCH: Final = "ISKANDER_TEST_ALL"
GO_SOURCES: Final = Path("/usr/share/gocode")
BUILD_WITHIN_S: Final = 540.0
CASE_WITHIN_S: Final = 30.0


def require_all() -> None:
    """Skip unless the clients in other languages are enabled."""
    if os.environ.get(SWITCH) != "1":
        pytest.skip(f"a client in another language: `make test-all`, or {SWITCH}=1")


def tool(name: str, install: str) -> str:
    """The path of a tool; a missing tool skips the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"`{name}` is missing: {install}")
    return found


def built_go(name: str) -> Path:
    """A Go client, built offline from Debian's packages."""
    require_all()
    go = tool("go", "apt-get install golang-go")
    if not (GO_SOURCES / "src/google.golang.org/grpc").is_dir():
        pytest.skip("Go's gRPC is missing: apt-get install golang-google-grpc-dev")
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / name
    environment = {
        "GO111MODULE": "off",
        "GOPATH": str(GO_SOURCES),
        "GOCACHE": str(BUILD / "go-cache"),
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    sources = map(str, sorted((INTEROP / "clients" / name).glob("*.go")))
    run([go, "build", "-o", str(target), *sources], **environment)
    return target


def installed_npm(name: str, *files: Path) -> Path:
    """The script of a JavaScript client, next to its packages and the given files."""
    require_all()
    tool("node", "apt-get install nodejs")
    npm = tool("npm", "apt-get install npm")
    source, target = INTEROP / "clients" / name, BUILD / name
    target.mkdir(parents=True, exist_ok=True)
    wanted = (source / "package.json").read_bytes()
    installed = target / "installed.json"
    if not installed.exists() or installed.read_bytes() != wanted:
        (target / "package.json").write_bytes(wanted)
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(
            command, cwd=target, timeout=BUILD_WITHIN_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot install the packages of {name}: {done.stderr[-300:]}")
        installed.write_bytes(wanted)
    for file in (source / "client.js", *files):
        shutil.copy(file, target)
    return target / "client.js"


def built_cpp(name: str) -> tuple[Path, dict[str, str]]:
    """A C++ Flight client, built with the libraries of pyarrow's wheel; and its environment."""
    require_all()
    compiler = tool("g++", "apt-get install g++")
    import pyarrow as pa

    include, libraries = Path(pa.get_include()), Path(pa.get_library_dirs()[0])
    if not (include / "arrow" / "flight" / "api.h").exists():
        pytest.skip("pyarrow has no Flight headers: pip install pyarrow, from a wheel")
    release = pa.__version__.split(".")
    number = f"{int(release[0])}{int(release[1]):02d}"
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / name
    source = INTEROP / "clients" / name / "client.cpp"
    stamp, state = BUILD / f"{name}.stamp", f"{pa.__version__}\n{source.read_text()}"
    if not (target.exists() and stamp.exists() and stamp.read_text() == state):
        run(
            [
                compiler, "-std=c++20", "-O0", f"-isystem{include}", str(source),
                f"-L{libraries}", f"-l:libarrow.so.{number}", f"-l:libarrow_flight.so.{number}",
                "-o", str(target),
            ]
        )  # fmt: skip
        stamp.write_text(state)
    return target, {"LD_LIBRARY_PATH": str(libraries)}


def run(command: list[str], **environment: str) -> str:
    """Run a program to its end; returns its output.

    Raises:
        AssertionError: It failed.
    """
    done = subprocess.run(
        command,
        env=os.environ | environment,
        timeout=BUILD_WITHIN_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


class CaseClient:
    """A client that reads the name of a case from each line, and responds with `ok` or an error.

    Args:
        command: Starts it.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run(self, case: str) -> str:
        """Run a case; returns its response. A client that does not respond is killed."""
        try:
            self._pipe(self._process.stdin).write(f"{case}\n".encode())
        except BrokenPipeError:
            return "the client has ended"
        output, line = self._pipe(self._process.stdout), b""
        while not line.endswith(b"\n"):
            if not select.select([output], [], [], CASE_WITHIN_S)[0]:
                self._process.kill()
                return f"no answer within {CASE_WITHIN_S:g} s"
            piece = output.read(65_536)
            if not piece:
                return f"the client ended: {line.decode()}"
            line += piece
        return line.decode().strip()

    def close(self) -> None:
        """Close its input; kill it if it does not exit."""
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe
