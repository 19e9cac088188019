"""systemd files of a configuration: the units of `configs/systemd` with paths, and drop-ins.

Pure: the templates are read before, and the files are written after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from iskander.config.models import SHARED_BACKENDS
from iskander.config.observation import is_uri
from iskander.config.schema import Config
from iskander.foundation.logs.stderr import FORMAT_VARIABLE, TEXT
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.placement.plan import PlacementPlan
from iskander.gateway.supervision.worker import SlotPlan, worker_command
from iskander.gateway.transport.addresses import unix_path

GATEWAY, WORKER = "iskander-gateway.service", "iskander-worker@.service"
GPU = "drop-ins/gpu.conf"
UNITS = (
    GATEWAY,
    WORKER,
    "iskander.slice",
    "iskander.target",
    "iskander-score@.service",
    "iskander-score@.timer",
)
SYSUSERS, TMPFILES = "sysusers.d/iskander.conf", "tmpfiles.d/iskander.conf"
ACCOUNT_FILES = {"iskander.sysusers": SYSUSERS, "iskander.tmpfiles": TMPFILES}
TEMPLATES = (*UNITS, *ACCOUNT_FILES, GPU)
UNIT_FOLDER = "systemd/system"
DROP_IN = "plan.conf"
USER = "iskander"
STOP_SLACK_S = 30
"""Added to the drain of all requests for the exit of the processes."""
START_S = 900
ANY_CARD = ("char-nvidia rw", "char-nvidia-frontend rw", "char-nvidia-caps r")
"""Devices in the template of GPUs that are replaced by those of the plan."""
OF_CUDA = ("MemoryDenyWriteExecute=no", "DeviceAllow=char-nvidia-uvm rw")
"""Lines of the template that a process which only reads NVML does not need."""
HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))
PRIVATE = tuple(map(Path, ("/tmp", "/var/tmp")))


class Installation(NamedTuple):
    """What the units start.

    Attributes:
        config: The configuration, with absolute paths.
        placed: Its placement on this machine.
        plan_lines: The placement as text.
        file: Path of the configuration.
        commands: Folder of the commands.
        libraries: Folders of the Python installation.
        user: Account of the services.
        sets_reattach: Whether the configuration sets `workers.reattach_s`.
    """

    config: Config
    placed: PlacementPlan
    plan_lines: Sequence[str]
    file: Path
    commands: Path
    libraries: tuple[Path, ...]
    user: str = USER
    sets_reattach: bool = False

    @property
    def slots(self) -> Sequence[SlotPlan]:
        """The workers that have units."""
        return () if self.config.workers.spawn else self.placed.slots

    @property
    def services(self) -> list[str]:
        """The services to enable."""
        names = [worker_name(slot.index) for slot in self.slots]
        return [GATEWAY.removesuffix(".service"), *names]


def worker_name(instance: int | str) -> str:
    return WORKER.replace("@.service", f"@{instance}")


def render_files(to: Installation, templates: Mapping[str, str]) -> dict[str, str]:
    """Return the content of each file by its path below the prefix.

    Args:
        to: What the units start.
        templates: Content of each of `TEMPLATES`.
    """
    units = [name for name in UNITS if name != WORKER or to.slots]
    files = {f"{UNIT_FOLDER}/{name}": _with_paths(templates[name], to) for name in units}
    if to.user == USER:
        files |= {path: templates[name] for name, path in ACCOUNT_FILES.items()}
    services = [GATEWAY, *([WORKER] if to.slots else [])]
    if to.user != USER:
        for name in (*services, "iskander-score@.service"):
            # Without a group, that of the account.
            lines = ["[Service]", f"User={to.user}", "Group=", ""]
            files[_drop_in(name, "user.conf")] = "\n".join(lines)
    files[_drop_in(GATEWAY)] = "\n".join(_gateway_lines(to)) + "\n"
    for slot in to.slots:
        name = f"{worker_name(slot.index)}.service"
        files[_drop_in(name)] = "\n".join(_worker_lines(slot, to)) + "\n"
    devices = list(dict.fromkeys(slot.gpu for slot in to.placed.slots if slot.gpu is not None))
    for slot in to.slots:
        if slot.gpu is not None:
            name = f"{worker_name(slot.index)}.service"
            files[_drop_in(name, "gpu.conf")] = _gpu_drop_in(templates[GPU], [slot.gpu])
    if devices:
        text = _gpu_drop_in(templates[GPU], devices, reads_only=bool(to.slots))
        files[_drop_in(GATEWAY, "gpu.conf")] = text
    return files


def notes(to: Installation) -> list[str]:
    """Return what prevents the services from a start, as far as paths show it."""
    hidden = [path for path in _paths(to) if _is_below(path, PRIVATE)]
    return [f"{path}: the services have their own /tmp and cannot read it" for path in hidden]


def _gpu_drop_in(template: str, gpus: Sequence[Gpu], *, reads_only: bool = False) -> str:
    """Return the drop-in with access to some devices; `reads_only`: by NVML."""
    lines = [line for line in template.splitlines() if not line.startswith("#")]
    if reads_only:
        lines = [line for line in lines if line not in OF_CUDA]
    if all(gpu.minor is not None for gpu in gpus):
        nodes = [f"/dev/nvidia{gpu.minor} rw" for gpu in gpus]
        nodes += [f"/dev/nvidia-caps/nvidia-cap{number} r" for gpu in gpus for number in gpu.caps]
        lines = [line for line in lines if line.removeprefix("DeviceAllow=") not in ANY_CARD]
        at = lines.index("PrivateDevices=no") + 1
        allowed = dict.fromkeys(["/dev/nvidiactl rw", *nodes])
        lines[at:at] = [f"DeviceAllow={node}" for node in allowed]
    titles = ", ".join(gpu.description for gpu in gpus)
    return "\n".join([f"# Access to {titles}.", *lines]) + "\n"


def _with_paths(template: str, to: Installation) -> str:
    text = template.replace("/usr/local/bin/iskander", f"{_word(to.commands)}/iskander")
    text = text.replace("--config /etc/iskander/iskander.toml", f"--config {_word(to.file)}")
    return text.replace("/run/iskander/attach.sock", f"{_word(_runtime(to))}/attach.sock")


def _gateway_lines(to: Installation) -> Iterator[str]:
    server, workers = to.config.server, to.config.workers
    yield f"# Placement of the processes by {to.file}:"
    yield from (f"#   {line}".rstrip() for line in to.plan_lines)
    yield "# The processes pin themselves, so no setting of systemd is needed for it."
    yield ""
    yield "[Service]"
    # server.lame_duck_s and twice server.drain_s, for the streams and for the workers.
    yield f"TimeoutStopSec={server.lame_duck_s + 2 * server.drain_s + STOP_SLACK_S:.0f}"
    yield f"TimeoutStartSec={max(START_S, 4 * workers.start_s):.0f}"
    if to.slots:
        yield "# The workers are other units, and easier to replace."
        yield "OOMScoreAdjust=-500"
        if not to.sets_reattach:
            yield "# systemd stops the workers: they wait for a new gateway without a limit."
            yield "Environment=ISKANDER_WORKERS__REATTACH_S=0"
    yield from _access_lines(to, _gateway_folders(to))
    if not to.slots and any(model.backend not in SHARED_BACKENDS for model in to.config.models):
        yield from _code_lines()


def _worker_lines(slot: SlotPlan, to: Installation) -> Iterator[str]:
    yield f"# {next(line for line in to.plan_lines if line.startswith(f'worker {slot.index} '))}"
    yield "# (process, group, cpus, cores, NUMA node, L3, GPU). The gateway sends the cpus."
    yield ""
    yield "[Service]"
    yield from (f"Environment={name}={value}" for name, value in slot.environment.items())
    if to.config.admin.log_format != TEXT:
        yield f"Environment={FORMAT_VARIABLE}={to.config.admin.log_format}"
    if slot.group != slot.index or slot.pool or slot.python:
        words: list[str | PurePath] = [to.commands / "iskander-worker"]
        if slot.python:
            words = [*worker_command(slot.python)]
        words += ["--attach", _runtime(to) / "attach.sock", "--group", str(slot.group)]
        words += ["--pool", slot.pool] if slot.pool else []
        yield "ExecStart="
        yield f"ExecStart={' '.join(map(_word, words))} --wait-s 0"
    yield from _access_lines(to, set())
    models = [model for model in to.config.models if slot.pool and model.pool == slot.pool]
    if any(model.backend not in SHARED_BACKENDS for model in models):
        yield from _code_lines()


def _access_lines(to: Installation, writable: set[Path]) -> Iterator[str]:
    """Access to the folders of the configuration."""
    writable = writable | _shared_folders(to)
    if any(_is_below(path, HOMES) for path in (*_paths(to), *writable)):
        yield "ProtectHome=read-only"
    yield from (f"ReadWritePaths={_word(path)}" for path in sorted(writable))


def writable_folders(to: Installation) -> list[Path]:
    """Return the folders of the configuration that the services write to."""
    return sorted(_gateway_folders(to) | _shared_folders(to))


def _shared_folders(to: Installation) -> set[Path]:
    """Folders that the gateway and the workers write to."""
    config = to.config
    return {Path(each) for each in (config.loading.cache, config.server.runtime_directory) if each}


def _gateway_folders(to: Installation) -> set[Path]:
    """Folders that the gateway and its processes write to."""
    config = to.config
    log = config.prediction_log
    files = [Path(each) for each in (config.access.audit_file, log.key_file) if each]
    folders = (log.path.removeprefix("file://"), log.spool, config.drift.folder)
    found = {Path(each) for each in folders if each and not is_uri(each)}
    return (found | {path.parent for path in (*_sockets(config), *files)}) - {_runtime(to)}


def _code_lines() -> Iterator[str]:
    yield "# Libraries of Python and PyTorch models may generate code."
    yield "MemoryDenyWriteExecute=no"


def _runtime(to: Installation) -> Path:
    return Path(to.config.server.runtime_directory or "/run/iskander")


def _sockets(config: Config) -> list[Path]:
    """The sockets of clients in the file system."""
    found = [unix_path(address) for address in config.addresses]
    if config.shared_memory.path:
        found.append(Path(config.shared_memory.path))
    if config.inferential.address.startswith("ipc://"):
        found.append(Path(config.inferential.address.removeprefix("ipc://")))
    return [path for path in found if path is not None]


def _paths(to: Installation) -> list[Path]:
    """Files and folders that the services read."""
    config = to.config
    texts = [config.repository.path, config.access.tokens, config.source_reads.key_file]
    texts += [config.tls.certificate, config.tls.key, config.tls.client_ca, config.tls.client_crl]
    texts += [source.path for source in config.sources]
    texts += [text for model in config.models for text in (model.path, model.python)]
    return [to.file, to.commands, *to.libraries, *(Path(text) for text in texts if text)]


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _drop_in(unit: str, name: str = DROP_IN) -> str:
    return f"{UNIT_FOLDER}/{unit}.d/{name}"


def _word(value: str | PurePath) -> str:
    """Return a word of a unit file. Source: systemd.service(5), "Command lines"."""
    text = str(value).replace("%", "%%").replace("$", "$$")
    if text and not set(text) & set(" \t\n\"'\\;"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
