"""Comparison of configurations: live changes, and changes that need a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iskander.config.changes import compare
from iskander.config.reference import TABLES, Setting, settings
from iskander.config.schema import Config, LimitsConfig, TimeoutsConfig
from iskander.config.sources import SourceReadsConfig
from iskander.errors import ConfigError

MODEL = {"name": "ids", "path": "/ids", "version": "1"}
LIVE = [each for each in settings() if each.is_live]
RESTART = [each for each in settings() if not each.is_live]
OTHERS: dict[str, Any] = {
    "text": "other", "integer": 7, "number": 3.0, "true or false": True,
}  # fmt: skip
NAMED: dict[str, Any] = {
    "overflow": "drop_oldest", "log_level": "error", "ratio": 0.5, "spans_per_s": 700,
}  # fmt: skip


def config(**sections: Any) -> Config:
    return msgspec.convert({"models": [MODEL]} | sections, Config)


def test_equal_configurations_have_no_changes() -> None:
    changes = compare(config(), config())
    assert (changes.live, changes.restart) == ((), {})
    changes.require_live()


def test_changes_that_need_a_restart_are_refused_by_name_with_the_reason() -> None:
    wanted = config(limits={"rows": 7}, server={"cores": "0", "processes": 2}, arena={"lock": True})
    changes = compare(config(), wanted)
    assert changes.live == ("limits.rows",)
    assert list(changes.restart) == ["server.cores", "server.processes", "arena.lock"]
    with pytest.raises(ConfigError) as caught:
        changes.require_live()
    assert caught.value.message == (
        "cannot change in a running server: server.cores, server.processes (listeners and "
        "processes are set up at the start); arena.lock (shared memory is allocated at the "
        "start). No change of the file is applied; restart the server, or undo these"
    )


@pytest.mark.parametrize("setting", RESTART, ids=lambda setting: setting.path)
def test_each_other_setting_has_a_reason(setting: Setting) -> None:
    section = setting.path.partition(".")[0]
    kind = TABLES.get(section) or type(getattr(config(), section))
    assert kind.restart_reason


def test_lane_of_a_model() -> None:
    wanted = config(models=[MODEL | {"lane": {"ttl_ms": 5.0, "policy": "fifo"}}])
    changes = compare(config(), wanted)
    assert changes.live == ("models[ids/1].lane.ttl_ms",)
    assert list(changes.restart) == ["models[ids/1].lane.policy"]


def test_lanes_need_a_restart_for_a_repository() -> None:
    wanted = {"lanes": {"ttl_ms": 5.0}}
    assert compare(config(), config(**wanted)).live == ("lanes.ttl_ms",)
    repository = {"repository": {"path": "/models"}}
    changes = compare(config(**repository), config(**repository, **wanted))
    assert (changes.live, list(changes.restart)) == ((), ["lanes.ttl_ms"])


def test_added_and_removed_models_need_a_restart() -> None:
    other = MODEL | {"name": "other"}
    changes = compare(config(), config(models=[MODEL, other]))
    assert list(changes.restart) == ["models[other/1]"]
    changes = compare(config(models=[MODEL, other]), config())
    assert list(changes.restart) == ["models[other/1]"]
    changes = compare(config(), config(models=[MODEL | {"intra_threads": 2}]))
    assert list(changes.restart) == ["models[ids/1].intra_threads"]


@pytest.mark.parametrize("setting", LIVE, ids=lambda setting: setting.path)
def test_each_live_setting_is_found(setting: Setting) -> None:
    section, _, key = setting.path.partition(".")
    if section == "models":
        pytest.skip("a table of its own")
    value = [2] if setting.type.startswith("list") else OTHERS.get(setting.type)
    if value is True:
        value = not setting.default
    value = NAMED.get(key, value)
    changes = compare(config(), config(**{section: {key: value}}))
    assert (changes.live, changes.restart) == ((setting.path,), {})


def test_the_live_settings() -> None:
    """A new setting needs a restart until the server applies its change; see `Server.configure`."""
    names: dict[str, set[str]] = {}
    for each in LIVE:
        section, _, key = each.path.partition(".")
        names.setdefault(section, set()).add(key)
    lanes = names.pop("lanes")
    assert not lanes & {"policy", "pad_to", "patience_ms"}
    assert names.pop("limits") == set(LimitsConfig.__struct_fields__)
    assert names.pop("timeouts") == set(TimeoutsConfig.__struct_fields__)
    assert names.pop("source_reads") == (
        set(SourceReadsConfig.__struct_fields__) - {"locations", "key_file"}
    )
    assert names == {
        "server": {
            "drain_s", "lame_duck_s", "max_connection_age_s", "max_connection_age_grace_s",
        },
        "workers": {
            "hang_s", "hang_factor", "recycle_batches", "recycle_rss_bytes", "crash_loop",
            "model_deaths", "model_deaths_s", "quarantine_s",
        },
        "shared_memory": {"region_bytes", "total_bytes", "regions"},
        "admin": {"log_level"},
        "tracing": {"ratio", "slow_ms", "spans_per_s", "queue"},
        "observation": {"held_requests", "held_bytes", "held_s"},
        "shadow": {"time_percent", "bytes"},
        "inferential": {"connections"},
        "http": {"connections", "json_bytes", "bodies_bytes"},
        "models": {"shadow_share", "lane"},
    }  # fmt: skip
