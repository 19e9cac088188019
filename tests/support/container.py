"""Replay of an image and of a Pod's containers without a container runtime. It needs root.

The root file system of the image is an overlay of this machine's: `RUN` and `COPY` steps of the
stage `runtime` write to the upper folder, so the machine does not change. This Python environment
stands for the one that the stage `build` installs. A container gets a read-only root, the mounts of
its manifest, its user without capabilities, and namespaces of its own for mounts, processes and
network. /dev/shm is read-only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

from support.models import ROOT
from support.processes import eventually

FOLDER = ROOT / "configs" / "containers"
DOCKERFILE = FOLDER / "Dockerfile"
TOOLS = ("unshare", "nsenter", "setpriv", "chroot", "mount", "ip")
LAUNCHERS = ("sh", *TOOLS, "env")
INSTALLED = "/opt/iskander"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = 10001
NO_PACKAGES = re.compile("Temporary failure|Could not (resolve|connect)|Unable to locate|not fetch")
RUN_WITHIN_S = 180.0
STOP_WITHIN_S = 60.0

RUN = """
set -eu
mount -t overlay overlay -o "lowerdir=/,upperdir=$UPPER,workdir=$WORK" "$MERGED"
for each in dev proc sys; do mount --rbind "/$each" "$MERGED/$each"; done
exec chroot "$MERGED" /bin/sh -c "$1"
"""
START = """
set -eu
ip link set lo up
mount -t overlay overlay -o "lowerdir=/,upperdir=$UPPER,workdir=$WORK" "$MERGED"
mount -o remount,ro "$MERGED"
mount -t proc proc "$MERGED/proc"
mount --rbind /dev "$MERGED/dev"
mount -t tmpfs -o ro tmpfs "$MERGED/dev/shm"
for each in $MOUNTS; do
    mount --bind "${each%%=*}" "$MERGED${each#*=}"
done
for each in $READ_ONLY; do mount -o remount,bind,ro "$MERGED$each"; done
user=$CONTAINER_USER group=$CONTAINER_GROUP variables=$VARIABLES
exec chroot "$MERGED" setpriv --reuid="$user" --regid="$group" --clear-groups \
    --bounding-set=-all --inh-caps=-all --no-new-privs env -i -C "$DIRECTORY" -S "$variables" "$@"
"""


class Step(NamedTuple):
    """An instruction of a Dockerfile in a stage."""

    stage: str
    keyword: str
    value: str


def steps(path: Path = DOCKERFILE) -> list[Step]:
    """The instructions, with continued lines joined and without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        keyword, _, value = line.strip().partition(" ")
        if keyword == "FROM":
            stage = value.rpartition(" AS ")[2]
        if keyword:
            found.append(Step(stage, keyword, value.strip()))
    return found


def values(keyword: str, *stages: str) -> list[str]:
    """The values of one keyword, in all stages or some."""
    return [
        each.value
        for each in steps()
        if each.keyword == keyword and (not stages or each.stage in stages)
    ]


def why_not() -> str:
    """Return why no container can be replayed here; empty if it can."""
    if os.geteuid() != 0:
        return "a container is replayed by root only"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Image:
    """The stage `runtime` of the Dockerfile, run on an overlay in a folder.

    Attributes:
        environment: Variables of `ENV`.
        words: `ENTRYPOINT`, `CMD` and `HEALTHCHECK` as lists.
        directory: `WORKDIR`.
        user: `USER`, as numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        self.environment = {"PATH": PATH}
        self.words: dict[str, list[str]] = {}
        self.directory, self.user = "/", (0, 0)
        # Parents that the image's user could not enter, such as /root.
        self.python = sorted({sys.prefix, sys.base_prefix, str(ROOT)})
        for path in self.python:
            self.add_folder(path)
        for step in steps():
            if step.stage in ("runtime", "cpu"):
                getattr(self, f"_{step.keyword.lower()}")(step.value)

    def add_folder(self, path: str) -> Path:
        """Create a folder of the image that every user can enter.

        A folder of the upper layer hides the mode of the machine's folder at its path, so it takes
        that mode: apt's own user writes to /tmp.
        """
        at, below = self.folder / "upper", Path("/")
        for part in Path(path).relative_to("/").parts:
            at, below = at / part, below / part
            if not at.exists():
                at.mkdir()
                own = stat.S_IMODE(below.stat().st_mode) if below.is_dir() else 0
                at.chmod(own | 0o755)
        return at

    @property
    def variables(self) -> dict[str, str]:
        """The folders of the overlay, for the scripts."""
        names = ("upper", "work", "merged")
        return {name.upper(): str(self.folder / name) for name in names}

    def _from(self, value: str) -> None:
        del value

    def _run(self, value: str) -> None:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", RUN, "sh", value],
            env=os.environ | self.variables,
            timeout=RUN_WITHIN_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"RUN {value}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def _copy(self, value: str) -> None:
        *sources, target = value.split()
        if sources[0].startswith("--from="):
            assert sources[1:] == [target] == [INSTALLED]
            self.python.append(INSTALLED)
            self.add_folder(INSTALLED)
            return
        for source in sources:
            shutil.copy(ROOT / source, self.add_folder(target))

    def _env(self, value: str) -> None:
        for pair in shlex.split(value):
            name, _, text = pair.partition("=")
            self.environment[name] = text.replace("$PATH", self.environment["PATH"])

    def _workdir(self, value: str) -> None:
        self.directory = value

    def _expose(self, value: str) -> None:
        del value

    def _user(self, value: str) -> None:
        user, _, group = value.partition(":")
        self.user = int(user), int(group)

    def _entrypoint(self, value: str) -> None:
        self.words["ENTRYPOINT"] = json.loads(value)

    def _cmd(self, value: str) -> None:
        self.words["CMD"] = json.loads(value)

    def _healthcheck(self, value: str) -> None:
        self.words["HEALTHCHECK"] = json.loads(value.partition(" CMD ")[2])


@contextlib.contextmanager
def replayed_image() -> Iterator[Image]:
    """The image, in a temporary folder; skips the test if Debian's packages cannot be reached."""
    with tempfile.TemporaryDirectory(prefix="isk-image-", ignore_cleanup_errors=True) as folder:
        try:
            image = Image(Path(folder))
        except AssertionError as error:
            if NO_PACKAGES.search(str(error)):
                pytest.skip("Debian's packages cannot be reached")
            raise
        yield image


@dataclass
class Container:
    """A container of an image.

    Attributes:
        mounts: Folders by mount path; a trailing `:ro` makes the mount read-only.
    """

    image: Image
    log: Path
    mounts: dict[str, Path]
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: tuple[int, int] | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command, by default that of the image, as PID 1."""
        image, words = self.image, self.image.words
        command = self.command or [*words["ENTRYPOINT"], *words["CMD"]]
        mounts = {path.removesuffix(":ro"): source for path, source in self.mounts.items()}
        for path in mounts:
            image.add_folder(path)
        installed = {path: Path(path) for path in image.python} | {INSTALLED: Path(sys.prefix)}
        values = image.environment | self.environment
        user, group = self.user or image.user
        environment = os.environ | image.variables
        environment |= {
            "MOUNTS": " ".join(f"{source}={path}" for path, source in (installed | mounts).items()),
            "READ_ONLY": " ".join([*installed, *(p[:-3] for p in self.mounts if p[-3:] == ":ro")]),
            "VARIABLES": " ".join(f"{name}={value}" for name, value in values.items()),
            "CONTAINER_USER": str(user),
            "CONTAINER_GROUP": str(group),
            "DIRECTORY": image.directory,
        }
        spaces = ["--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", *spaces, "sh", "-c", START, "sh", *command],
                env=environment,
                stdout=log,
                stderr=log,
            )
        eventually(self._has_started, what="the first process of the container")

    def _has_started(self) -> bool:
        """Whether the scripts before the command have ended, or the container has."""
        assert self.process is not None
        if self.process.poll() is not None:
            return True
        children = psutil.Process(self.process.pid).children()
        return any(each.name() not in LAUNCHERS for each in children)

    @property
    def pid(self) -> int:
        """The pid of its first process, outside of its namespace."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).children()[0].pid)

    def run(self, *command: str, user: tuple[int, int] | None = None) -> tuple[int, str]:
        """Run a command in the container; return its exit code and output."""
        uid, gid = user or self.user or self.image.user
        values = self.image.environment | self.environment
        variables = [f"{name}={value}" for name, value in values.items()]
        spaces = ["--target", str(self.pid), "--mount", "--pid", "--net", "--ipc"]
        enter = ["nsenter", *spaces, "chroot", str(self.image.folder / "merged")]
        identity = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        done = subprocess.run(
            [*enter, *identity, "env", "-i", "-C", "/", *variables, *command],
            capture_output=True,
            timeout=RUN_WITHIN_S,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        assert self.process is not None
        return self.process.wait(RUN_WITHIN_S)

    def stop(self) -> int:
        """Send SIGTERM to its first process; return the exit code."""
        psutil.Process(self.pid).terminate()
        assert self.process is not None
        return self.process.wait(STOP_WITHIN_S)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        """Its output."""
        return self.log.read_text()


@contextlib.contextmanager
def running(container: Container) -> Iterator[Container]:
    """A container, killed at the end; after a failure its output is printed."""
    try:
        container.start()
        yield container
    except BaseException:
        sys.stderr.write(container.text()[-8000:])
        raise
    finally:
        container.end()


class Pod:
    """The volumes of a Pod, and its containers of an image.

    Args:
        image: The image of its containers.
        spec: The Pod's specification.
        folder: Receives the volumes.
        sources: Folder of each persistent volume claim, and files of each ConfigMap, by name.
    """

    def __init__(
        self, image: Image, spec: dict[str, Any], folder: Path, sources: dict[str, Any]
    ) -> None:
        self.image, self.spec, self.folder = image, spec, folder
        folder.chmod(0o755)
        self.volumes: dict[str, Path] = {}
        for volume in spec["volumes"]:
            path = folder / volume["name"]
            if "emptyDir" in volume:
                path.mkdir()
                path.chmod(0o777)  # As by the kubelet, with root as the owner.
            elif "configMap" in volume:
                path.mkdir()
                for name, text in sources[volume["configMap"]["name"]].items():
                    (path / name).write_text(text)
            else:
                path = sources[volume["persistentVolumeClaim"]["claimName"]]
            self.volumes[volume["name"]] = path

    def container(self, name: str) -> Container:
        """A container, with the mounts of its manifest."""
        containers = [*self.spec.get("initContainers", ()), *self.spec["containers"]]
        (found,) = (each for each in containers if each["name"] == name)
        mounts = {}
        for mount in found["volumeMounts"]:
            path = self.volumes[mount["name"]] / mount.get("subPath", "")
            mode = ":ro" if mount.get("readOnly") else ""
            mounts[mount["mountPath"] + mode] = path
        security = self.spec.get("securityContext", {}) | found["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
        words = self.image.words
        command = found.get("command", words["ENTRYPOINT"])
        if "command" not in found:
            command = [*command, *found.get("args", words["CMD"])]
        return Container(
            self.image,
            self.folder / f"{name}.log",
            mounts,
            command,
            {each["name"]: each["value"] for each in found.get("env", ())},
            (security["runAsUser"], security["runAsGroup"]),
        )


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))
