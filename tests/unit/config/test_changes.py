"""Comparison of configurations: live changes, changes for a restart, and the merged result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iskander.config.changes import compare
from iskander.config.reference import Setting, settings
from iskander.config.schema import Config

MODEL = {"name": "ids", "path": "/ids", "version": "1"}
LIVE = [each for each in settings() if each.is_live]
RESTART = [each for each in settings() if not each.is_live]
OTHERS: dict[str, Any] = {
    "text": "other", "integer": 3, "number": 3.0, "true or false": True,
}  # fmt: skip


def config(**sections: Any) -> Config:
    return msgspec.convert({"models": [MODEL]} | sections, Config)


def test_equal_configurations_have_no_changes() -> None:
    changes = compare(config(), config())
    assert (changes.live, changes.restart) == ((), ()) and changes.config == config()


def test_live_and_other_changes_are_separated() -> None:
    wanted = config(limits={"rows": 7, "message_bytes": 1 << 20}, server={"cores": "0"})
    changes = compare(config(), wanted)
    assert changes.live == ("limits.rows",)
    assert changes.restart == ("server.cores", "limits.message_bytes")
    # Only the live change is applied, so the next reload reports the others again.
    assert changes.config == config(limits={"rows": 7})
    assert compare(changes.config, wanted).restart == changes.restart


def test_lane_of_a_model() -> None:
    wanted = config(models=[MODEL | {"lane": {"ttl_ms": 5.0, "policy": "fifo"}}])
    changes = compare(config(), wanted)
    assert changes.live == ("models[ids/1].lane.ttl_ms",)
    assert changes.restart == ("models[ids/1].lane.policy",)
    lane = changes.config.models[0].lane
    assert (lane.ttl_ms, lane.policy) == (5.0, "deadline_aware")


def test_lanes_need_a_restart_for_a_repository() -> None:
    wanted = {"lanes": {"ttl_ms": 5.0}}
    assert compare(config(), config(**wanted)).live == ("lanes.ttl_ms",)
    repository = {"repository": {"path": "/models"}}
    changes = compare(config(**repository), config(**repository, **wanted))
    assert (changes.live, changes.restart) == ((), ("lanes.ttl_ms",))


def test_added_and_removed_models_need_a_restart() -> None:
    other = MODEL | {"name": "other"}
    changes = compare(config(), config(models=[MODEL, other]))
    assert changes.restart == ("models[other/1]",) and len(changes.config.models) == 1
    changes = compare(config(models=[MODEL, other]), config())
    assert changes.restart == ("models[other/1]",) and len(changes.config.models) == 2
    changes = compare(config(), config(models=[MODEL | {"intra_threads": 2}]))
    assert changes.restart == ("models[ids/1].intra_threads",)


@pytest.mark.parametrize("setting", LIVE, ids=lambda setting: setting.path)
def test_each_live_setting_is_found(setting: Setting) -> None:
    section, _, key = setting.path.partition(".")
    if section == "models":
        pytest.skip("a table of its own")
    value = [2] if setting.type.startswith("list") else OTHERS.get(setting.type)
    if value is True:
        value = not setting.default
    if value is None:
        value = {"overflow": "drop_oldest", "log_level": "error"}[key]
    changes = compare(config(), config(**{section: {key: value}}))
    assert (changes.live, changes.restart) == ((setting.path,), ())


def test_the_live_settings() -> None:
    """A new setting needs a restart until the server applies its change; see `Server.configure`."""
    found = {each.path.partition(".")[0] for each in LIVE}
    assert found == {"server", "limits", "lanes", "admin", "shadow", "models"}
    names = {each.path for each in LIVE if not each.path.startswith(("lanes.", "limits."))}
    assert names == {
        "server.lame_duck_s",
        "admin.log_level",
        "shadow.time_percent",
        "shadow.bytes",
        "models.shadow_share",
        "models.lane",
    }
    assert {"limits.message_bytes", "lanes.policy", "lanes.pad_to", "lanes.patience_ms"} <= {
        each.path for each in RESTART
    }
