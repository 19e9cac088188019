"""The shares of `server.memory`."""

from __future__ import annotations

from pathlib import Path

import pytest

from iskander.config.loader import Loaded, load_config, require_relations
from iskander.config.memory import GATEWAY_BYTES, WORKER_BYTES, divide
from iskander.config.section import MIB
from iskander.errors import ConfigError

GIB = 1024 * MIB
MACHINE = 64 * GIB
MODEL = '[[models]]\nname = "m"\npath = "m.onnx"\n'


def loaded_of(folder: Path, *overrides: str) -> Loaded:
    file = folder / "iskander.toml"
    file.write_text(MODEL)
    return load_config(file, overrides=overrides, environment={})


def test_without_the_setting_nothing_changes(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path)
    division = divide(loaded, 2, MACHINE)
    assert division.loaded == loaded and not division.total_bytes


def test_memory_is_divided_among_settings_that_are_not_set(tmp_path: Path) -> None:
    loaded = loaded_of(
        tmp_path,
        "server.memory=16 GiB",
        "server.processes=2",
        "http.address=127.0.0.1:0",
        f"shared_memory.path={tmp_path}/regions.sock",
    )
    division = divide(loaded, 4, MACHINE)
    config = division.loaded.config
    assert config.arena.input_bytes == GIB  # Two processes: an eighth.
    assert config.arena.output_bytes == GIB // 4  # Two processes, four workers.
    assert config.limits.receive_bytes == 2 * GIB
    assert config.http.bodies_bytes == GIB // 2
    assert config.shared_memory.total_bytes == GIB
    assert division.left_bytes == 7 * GIB
    assert division.loaded.origins["arena.input_bytes"] == "server.memory"
    require_relations(config)


def test_percentage_is_that_of_the_machine_or_cgroup(tmp_path: Path) -> None:
    division = divide(loaded_of(tmp_path, "server.memory=50 %"), 1, 8 * GIB)
    assert division.total_bytes == 4 * GIB


def test_set_value_is_kept_and_counts(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, "server.memory=8GiB", f"arena.input_bytes={3 * GIB}")
    division = divide(loaded, 1, MACHINE)
    assert division.loaded.config.arena.input_bytes == 3 * GIB
    assert division.left_bytes == 3 * GIB
    assert division.loaded.origins["arena.input_bytes"] == "--set"


def test_share_is_enough_for_the_largest_batch(tmp_path: Path) -> None:
    config = divide(loaded_of(tmp_path, "server.memory=900MiB"), 1, MACHINE).loaded.config
    assert config.limits.receive_bytes == 2 * config.limits.message_bytes
    require_relations(config)


def test_too_little_memory_is_an_error_with_the_needs(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, "server.memory=300MiB")
    with pytest.raises(ConfigError) as caught:
        divide(loaded, 2, MACHINE)
    assert "limits.receive_bytes 144 MiB" in caught.value.message
    assert f"{(GATEWAY_BYTES + 2 * WORKER_BYTES) // MIB} MiB" in caught.value.message


def test_more_memory_than_the_machine_has_is_an_error(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, "server.memory=65GiB")
    with pytest.raises(ConfigError, match="has 65,536 MiB"):
        divide(loaded, 1, MACHINE)


@pytest.mark.parametrize("text", ["lots", "8", "8 GB", "-1 GiB", "1e3 GiB", "9" * 99 + "%"])
def test_other_text_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of MiB"):
        divide(loaded_of(tmp_path, f"server.memory={text!r}"), 1, MACHINE)
