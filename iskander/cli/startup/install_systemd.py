"""`iskander install-systemd`: writes the systemd units and drop-ins of a configuration.

Each file begins with the SHA-256 of the rest. A file that still has it was not changed and is
replaced; any other file is kept, unless `--force` is given.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import iskander
from iskander.cli import command
from iskander.errors import ConfigError
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands
    from iskander.cli.startup.systemd_units import Installation

HEAD = "# Written by `iskander install-systemd`. SHA-256 of the rest: "


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "write the systemd units of a configuration"
    parser = command.add_command(commands, "install-systemd", _install, sentence)
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="configuration, TOML")
    sentence = "folder of systemd/, sysusers.d/ and tmpfiles.d/ (default: %(default)s)"
    add("--prefix", type=Path, default=Path("/etc"), metavar="DIR", help=sentence)
    sentence = "existing account of the services (default: iskander, which is created)"
    add("--user", default="iskander", metavar="NAME", help=sentence)
    add("--dry-run", action="store_true", help="print the files, write nothing")
    add("--force", action="store_true", help="overwrite files that were changed")
    command.add_json(parser)


def _install(arguments: argparse.Namespace) -> int:
    """Write the files, and print the commands that start the services.

    Raises:
        ConfigError: The configuration is invalid, or a file was changed or cannot be written.
    """
    from iskander.cli.startup.systemd_units import notes, render_files

    to = _installation(arguments.config, arguments.user)
    rendered = render_files(to, read_templates())
    files = {name: with_head(text) for name, text in sorted(rendered.items())}
    folder: Path = arguments.prefix
    if arguments.dry_run:
        states = dict.fromkeys(files, "not written")
    else:
        changed = [] if arguments.force else _changed(folder, files)
        if changed:
            names = ", ".join(map(str, changed))
            raise ConfigError(f"not overwritten, because it was changed: {names}; see --force")
        states = {name: _write(folder / name, text) for name, text in files.items()}
    found = [*notes(to), *_orphans(folder, to, files)]
    then = list(_next_commands(folder, to))
    if arguments.json:
        written = [
            {"path": str(folder / name), "state": states[name], "text": text}
            for name, text in files.items()
        ]
        command.print_json({"files": written, "notes": found, "commands": then})
        return ExitCode.DONE
    if arguments.dry_run:
        command.print_lines(*(f"--- {folder / name}\n{text}" for name, text in files.items()))
    else:
        command.print_lines(*(f"{state}: {folder / name}" for name, state in states.items()))
    command.print_lines(*(f"note: {note}" for note in found))
    command.print_lines("", "Then, as root:", *(f"  {line}" for line in then))
    return ExitCode.DONE


def read_templates() -> dict[str, str]:
    """Return the unit files of this installation by name, from the wheel or the checkout."""
    from iskander.cli.startup.systemd_units import GATEWAY, TEMPLATES

    package = Path(iskander.__file__).parent
    for folder in (package / "_systemd", package.parent / "configs" / "systemd"):
        if (folder / GATEWAY).is_file():
            return {name: (folder / name).read_text() for name in TEMPLATES}
    raise ConfigError("this installation contains no systemd units: install the wheel")


def with_head(text: str) -> str:
    return f"{HEAD}{_digest(text)}\n{text}"


def is_unchanged(text: str) -> bool:
    """Return whether the content of a file is as it was written."""
    head, _, rest = text.partition("\n")
    return head == HEAD + _digest(rest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _installation(file: Path, user: str) -> Installation:
    from iskander.cli.startup.check import render_plan
    from iskander.cli.startup.systemd_units import Installation
    from iskander.config.loader import load_config
    from iskander.gateway.supervision.placement.machine import plan_machine

    loaded = load_config(file)
    for warning in loaded.warnings:
        sys.stderr.write(f"iskander: {warning}\n")
    placed = plan_machine(loaded.config)
    return Installation(
        config=loaded.config,
        placed=placed,
        plan_lines=render_plan(placed),
        file=file.absolute(),
        commands=Path(sysconfig.get_path("scripts")),
        libraries=(Path(iskander.__file__).parent, Path(sys.base_prefix)),
        user=user,
        sets_reattach="workers.reattach_s" in loaded.origins,
    )


def _changed(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Return the files that exist with a content that was not written here."""
    found = [folder / name for name in files if (folder / name).exists()]
    return [path for path in found if not is_unchanged(_read(path))]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _write(path: Path, text: str) -> str:
    """Write a file whose content differs; return its state."""
    if path.exists() and _read(path) == text:
        return "unchanged"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return "written"


def _orphans(folder: Path, to: Installation, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each file that an earlier configuration needed."""
    from iskander.cli.startup.systemd_units import UNIT_FOLDER, worker_name

    current = {f"{each}.service.d" for each in to.services}
    for pattern in ("iskander-*.service", "iskander-*.service.d/*.conf"):
        for path in sorted((folder / UNIT_FOLDER).glob(pattern)):
            if str(path.relative_to(folder)) in files or not _read(path).startswith(HEAD):
                continue
            commands = [shlex.join(["rm", str(path)])]
            drop_ins = path.parent.name
            if drop_ins.startswith(worker_name("")) and drop_ins not in current:
                name = drop_ins.removesuffix(".service.d")
                commands.insert(0, f"systemctl disable --now {name}")
            yield f"{path.name} of {drop_ins} is no longer needed: {'; '.join(commands)}"


def _next_commands(folder: Path, to: Installation) -> Iterator[str]:
    """Yield the commands that start the services."""
    from iskander.cli.startup.systemd_units import SYSUSERS, TMPFILES, USER, writable_folders

    if to.user == USER:
        yield shlex.join(["systemd-sysusers", str(folder / SYSUSERS)])
        yield shlex.join(["systemd-tmpfiles", "--create", str(folder / TMPFILES)])
    for path in writable_folders(to):
        if not path.exists():
            yield shlex.join(["install", "-d", "-o", to.user, "-m", "0750", str(path)])
    check = [str(to.commands / "iskander"), "check", str(to.file)]
    yield shlex.join(["runuser", "-u", to.user, "--", *check])
    yield "systemctl daemon-reload"
    yield f"systemctl enable --now {' '.join(to.services)}"
