"""systemd files of a configuration: paths, instances and drop-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from iskander.cli.startup.install_systemd import is_unchanged, read_templates, with_head
from iskander.cli.startup.systemd_units import UNIT_FOLDER, Installation, notes, render_files
from iskander.config.schema import Config
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.placement.plan import PlacementPlan
from iskander.gateway.supervision.worker import SlotPlan

SLOTS = [
    SlotPlan(0, 0, (0, 1), 0),
    SlotPlan(1, 1, (2, 3), 1),
    SlotPlan(2, 1, (4,), 1),
    SlotPlan(3, 1, (5,), 1, pool="net/2", python="/opt/a venv/bin/python"),
]
GATEWAY = f"{UNIT_FOLDER}/iskander-gateway.service"


def installation(sections: dict[str, Any] | None = None, **fields: Any) -> Installation:
    raw = {"models": [{"name": "churn", "path": "/srv/models/churn/1", "version": "1"}]}
    config = msgspec.convert(raw | (sections or {}), Config)
    to = Installation(
        config=config,
        placed=PlacementPlan((), SLOTS, ()),
        plan_lines=[f"worker {slot.index}  {slot.group}" for slot in SLOTS],
        file=Path("/etc/iskander/own.toml"),
        commands=Path("/opt/iskander/bin"),
        libraries=(Path("/opt/iskander/lib"),),
    )
    return to._replace(**fields)


def files(sections: dict[str, Any] | None = None, **fields: Any) -> dict[str, str]:
    return render_files(installation(sections, **fields), read_templates())


def split(**workers: Any) -> dict[str, Any]:
    return {"workers": {"spawn": False, **workers}}


def test_units_start_the_installed_commands_with_the_given_file() -> None:
    text = files()[GATEWAY]
    assert "ExecStart=/opt/iskander/bin/iskander-gateway --config /etc/iskander/own.toml\n" in text
    assert "/usr/local" not in "".join(files(split()).values())


def test_gateway_that_starts_its_workers_is_the_only_service() -> None:
    to = installation()
    assert to.services == ["iskander-gateway"]
    found = render_files(to, read_templates())
    assert not any("iskander-worker@" in name for name in found)
    assert "REATTACH" not in found[f"{GATEWAY}.d/plan.conf"]


def test_each_slot_of_the_plan_has_an_instance_with_its_group_and_pool() -> None:
    to = installation(split())
    assert to.services == ["iskander-gateway", *(f"iskander-worker@{n}" for n in range(4))]
    found = render_files(to, read_templates())
    worker = f"{UNIT_FOLDER}/iskander-worker@"
    assert (
        "--attach /run/iskander/attach.sock --group %i --wait-s 0\n" in found[f"{worker}.service"]
    )
    # The template serves the group of its own number.
    assert "ExecStart" not in found[f"{worker}1.service.d/plan.conf"]
    assert (
        "\nExecStart=\nExecStart=/opt/iskander/bin/iskander-worker --attach"
        in (found[f"{worker}2.service.d/plan.conf"])
    )
    own = found[f"{worker}3.service.d/plan.conf"]
    assert '\nExecStart="/opt/a venv/bin/python" -P ' in own
    assert own.count("--group 1 --pool net/2 --wait-s 0\n") == 1


def test_workers_of_units_wait_for_a_gateway_unless_the_file_has_a_limit() -> None:
    name = f"{GATEWAY}.d/plan.conf"
    assert "ISKANDER_WORKERS__REATTACH_S=0\n" in files(split())[name]
    assert "REATTACH" not in files(split(), sets_reattach=True)[name]


def test_workers_of_units_log_in_the_format_of_the_gateway() -> None:
    name = f"{UNIT_FOLDER}/iskander-worker@0.service.d/plan.conf"
    assert "LOG_FORMAT" not in files(split())[name]
    found = files(split() | {"admin": {"log_format": "json"}})
    assert "Environment=ISKANDER_LOG_FORMAT=json\n" in found[name]


def test_stop_timeout_covers_the_drain() -> None:
    server = {"server": {"drain_s": 100.0, "lame_duck_s": 7.0}}
    assert "TimeoutStopSec=237\n" in files(server)[f"{GATEWAY}.d/plan.conf"]


def writable(found: dict[str, str]) -> list[str]:
    """Return the lines of the gateway's drop-in that permit folders."""
    lines = found[f"{GATEWAY}.d/plan.conf"].splitlines()
    return [line for line in lines if line.startswith("ReadWritePaths=")]


def test_writable_folders_are_those_of_sockets_cache_and_runtime_directory() -> None:
    sections = split() | {
        "server": {"address": ["unix:/srv/a b/x.sock"], "runtime_directory": "/srv/run"},
        "shared_memory": {"path": "/srv/run/regions.sock"},
        "loading": {"cache": "/srv/cache"},
    }
    found = files(sections)
    assert writable(found) == [
        'ReadWritePaths="/srv/a b"',
        "ReadWritePaths=/srv/cache",
        "ReadWritePaths=/srv/run",
    ]
    assert "--attach /srv/run/attach.sock" in found[f"{UNIT_FOLDER}/iskander-worker@.service"]
    assert "/srv/a b" not in found[f"{UNIT_FOLDER}/iskander-worker@0.service.d/plan.conf"]


def test_gateway_writes_to_the_folders_of_its_logs_and_references() -> None:
    sections = split() | {
        "access": {"audit_file": "/srv/audit/actions.jsonl"},
        "prediction_log": {
            "path": "s3://lake/log",
            "spool": "/srv/spool",
            "key_file": "/srv/keys/key",
        },
        "drift": {"folder": "/srv/drift"},
    }
    found = files(sections)
    assert writable(found) == [
        "ReadWritePaths=/srv/audit",
        "ReadWritePaths=/srv/drift",
        "ReadWritePaths=/srv/keys",
        "ReadWritePaths=/srv/spool",
    ]
    assert "ReadWritePaths" not in found[f"{UNIT_FOLDER}/iskander-worker@0.service.d/plan.conf"]
    local = files({"prediction_log": {"path": "file:///srv/log"}})[f"{GATEWAY}.d/plan.conf"]
    assert "ReadWritePaths=/srv/log\n" in local


def test_home_is_readable_only_if_a_path_is_below_it() -> None:
    name = f"{GATEWAY}.d/plan.conf"
    assert "ProtectHome" not in files()[name]
    assert "ProtectHome=read-only" in files(file=Path("/home/ann/own.toml"))[name]
    source = {"name": "clicks", "path": "/home/ann/clicks", "model": "churn"}
    for sections in ({"tls": {"client_crl": "/home/ann/crl.pem"}}, {"sources": [source]}):
        assert "ProtectHome=read-only" in files(sections)[name]


def test_generated_code_and_devices_are_allowed_to_the_services_that_need_them() -> None:
    model = {"name": "net", "path": "/srv/net/2", "version": "2", "backend": "torch"}
    worker = f"{UNIT_FOLDER}/iskander-worker@"
    found = files(split() | {"models": [model]})
    allowed = {name for name, text in found.items() if "MemoryDenyWriteExecute=no" in text}
    assert allowed == {f"{worker}3.service.d/plan.conf"}
    assert "MemoryDenyWriteExecute=no" in files({"models": [model]})[f"{GATEWAY}.d/plan.conf"]
    assert not any("gpu" in name for name in files())


CARD = Gpu(0, "GPU-a", "0000:17:00.0", minor=4, name="H100")
SLICE = Gpu(1, "MIG-b", "0000:65:00.0", minor=5, parent="GPU-c", caps=(21, 22))


def allowed(text: str) -> list[str]:
    lines = text.splitlines()
    return [each.removeprefix("DeviceAllow=") for each in lines if each.startswith("DeviceAllow=")]


def with_gpus(*gpus: Gpu, **sections: Any) -> dict[str, str]:
    slots = [
        SlotPlan(0, 0, (0, 1), 0, hides_gpus=True),
        *(SlotPlan(n, n, (n + 1,), 0, gpu=gpu) for n, gpu in enumerate(gpus, 1)),
    ]
    lines = [f"worker {slot.index}  {slot.group}" for slot in slots]
    return files(sections, placed=PlacementPlan((), slots, ()), plan_lines=lines)


def test_worker_has_access_to_its_own_card_only() -> None:
    found = with_gpus(CARD, SLICE, **split())
    worker = f"{UNIT_FOLDER}/iskander-worker@"
    own = found[f"{worker}1.service.d/gpu.conf"]
    assert allowed(own) == ["/dev/nvidiactl rw", "/dev/nvidia4 rw", "char-nvidia-uvm rw"]
    assert own.startswith("# Access to GPU 0 (H100).\n") and "PrivateDevices=no\n" in own
    assert "MemoryDenyWriteExecute=no" in own
    assert allowed(found[f"{worker}2.service.d/gpu.conf"]) == [
        "/dev/nvidiactl rw",
        "/dev/nvidia5 rw",
        "/dev/nvidia-caps/nvidia-cap21 r",
        "/dev/nvidia-caps/nvidia-cap22 r",
        "char-nvidia-uvm rw",
    ]
    assert f"{worker}0.service.d/gpu.conf" not in found


def test_unit_of_a_worker_shows_its_card_alone() -> None:
    found = with_gpus(CARD, **split())
    worker = f"{UNIT_FOLDER}/iskander-worker@"
    plan = found[f"{worker}1.service.d/plan.conf"]
    assert "Environment=CUDA_VISIBLE_DEVICES=GPU-a\n" in plan
    assert "Environment=CUDA_DEVICE_ORDER=PCI_BUS_ID\n" in plan
    assert "Environment=CUDA_VISIBLE_DEVICES=\n" in found[f"{worker}0.service.d/plan.conf"]


def test_gateway_has_access_to_the_cards_that_it_reads_or_starts_workers_for() -> None:
    name = f"{GATEWAY}.d/gpu.conf"
    reading = with_gpus(CARD, SLICE, **split())[name]
    nodes = ["/dev/nvidiactl rw", "/dev/nvidia4 rw", "/dev/nvidia5 rw"]
    nodes += ["/dev/nvidia-caps/nvidia-cap21 r", "/dev/nvidia-caps/nvidia-cap22 r"]
    assert allowed(reading) == nodes
    assert "MemoryDenyWriteExecute" not in reading
    starting = with_gpus(CARD, SLICE)[name]
    assert allowed(starting) == [*nodes, "char-nvidia-uvm rw"]
    assert "MemoryDenyWriteExecute=no" in starting


def test_card_without_a_known_device_node_needs_access_to_all() -> None:
    card = msgspec.structs.replace(CARD, minor=None)
    text = with_gpus(card)[f"{GATEWAY}.d/gpu.conf"]
    assert "char-nvidia rw" in allowed(text) and "/dev/nvidia4 rw" not in allowed(text)


def test_another_account_replaces_that_of_the_units() -> None:
    found = files(split(), user="ann")
    assert not any("sysusers" in name or "tmpfiles" in name for name in found)
    for unit in ("iskander-gateway", "iskander-worker@", "iskander-score@"):
        text = found[f"{UNIT_FOLDER}/{unit}.service.d/user.conf"]
        assert text == "[Service]\nUser=ann\nGroup=\n"
    assert {"sysusers.d/iskander.conf", "tmpfiles.d/iskander.conf"} <= files().keys()


def test_special_characters_of_paths_are_escaped() -> None:
    text = files(file=Path('/etc/50% "$x"/a.toml'))[GATEWAY]
    assert '--config "/etc/50%% \\"$$x\\"/a.toml"\n' in text


def test_paths_in_a_private_folder_have_a_note() -> None:
    assert notes(installation()) == []
    (note,) = notes(installation(file=Path("/tmp/own.toml")))
    assert note.startswith("/tmp/own.toml: ")


def test_written_file_is_recognized_until_it_is_changed() -> None:
    text = with_head("[Service]\nNice=5\n")
    assert is_unchanged(text)
    assert not is_unchanged(text.replace("5", "6"))
    assert not is_unchanged("[Service]\nNice=5\n") and not is_unchanged("")
