"""Version policy, routing, generation lifecycle, and scans of a repository."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.repository.generation_lifecycle import TABLE, Action, Event, Stage, step
from iskander.gateway.repository.routing import Routing
from iskander.gateway.repository.scan import (
    ScannedModel,
    list_model,
    list_models,
    read_settings,
    stamp_of,
)
from iskander.gateway.repository.version_policy import (
    plan_transition,
    routing_error,
    routing_of,
    settled,
    wanted_versions,
)

HALF = Routing(split={"1": 50, "2": 50})
SERVED = ("1", "2", "3")
keys = st.text(max_size=40)


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("latest:1", ["10"]),
        ("latest:2", ["9", "10"]),
        ("latest:9", ["1", "2", "9", "10"]),
        ("all", ["1", "2", "9", "10"]),
        ((2, 7, 9), ["2", "9"]),
        ((), []),
    ],
)
def test_policy_selects_versions_in_numeric_order(
    policy: str | tuple[int, ...], chosen: list[str]
) -> None:
    assert wanted_versions(["10", "9", "1", "2"], policy, Routing()) == chosen


def test_routing_targets_are_wanted_versions() -> None:
    routing = Routing(default="stable", aliases={"stable": "2"}, split={"1": 1, "canary": 1})
    assert wanted_versions(["1", "2", "3"], "latest:1", routing) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("routing", "version", "expected"),
    [
        (Routing(), None, None),
        (Routing(), "2", "2"),
        (Routing(default="2"), None, "2"),
        (Routing(default="stable", aliases={"stable": "1"}), None, "1"),
        (Routing(default="2", aliases={"stable": "1"}), "stable", "1"),
        (Routing(default="2", split={"1": 1}), None, "1"),
        (Routing(default="2", split={"7": 1}), None, "2"),
        (Routing(split={"7": 1}), None, None),
        (Routing(split={"canary": 1}, aliases={"canary": "3"}), None, "3"),
        (Routing(split={"1": 1}), "3", "3"),
        (Routing(aliases={"stable": "1"}), "unknown", "unknown"),
        (Routing(split={"1": 0, "2": 1}), None, "2"),
    ],
)
def test_version_selected_for_a_call(
    routing: Routing, version: str | None, expected: str | None
) -> None:
    assert routing.choose(version, "key", SERVED) == expected


@given(keys)
def test_split_is_stable_for_a_key(key: str) -> None:
    assert HALF.choose(None, key, SERVED) == HALF.choose(None, key, SERVED) in ("1", "2")


@given(keys, st.floats(0.01, 100), st.floats(0.01, 100), st.floats(1, 10))
def test_larger_weight_moves_keys_only_to_its_version(
    key: str, first: float, second: float, grown: float
) -> None:
    before = Routing(split={"1": first, "2": second, "3": 1.0}).choose(None, key, SERVED)
    after = Routing(split={"1": first, "2": second * grown, "3": 1.0}).choose(None, key, SERVED)
    assert after in (before, "2")


@given(keys)
def test_removed_version_moves_only_its_own_keys(key: str) -> None:
    routing = Routing(split={"1": 20, "2": 30, "3": 50})
    before = routing.choose(None, key, SERVED)
    after = routing.choose(None, key, ("1", "3"))
    assert before in (after, "2")


def test_split_follows_the_weights() -> None:
    routing = Routing(split={"1": 90, "2": 10})
    drawn = [routing.choose(None, f"user-{n}", SERVED) for n in range(20_000)]
    assert 0.08 < drawn.count("2") / len(drawn) < 0.12


def test_weights_of_one_version_add_up() -> None:
    """As after a promotion, when two aliases name the same version."""
    aliases = {"stable": "3", "canary": "3", "next": "2"}
    routing = Routing(aliases=aliases, split={"stable": 50, "canary": 20, "next": 30})
    drawn = [routing.choose(None, f"user-{n}", SERVED) for n in range(20_000)]
    assert 0.28 < drawn.count("2") / len(drawn) < 0.32
    assert routing.routes_to("3") == ["stable", "canary", "70 of 100"]


def test_routes_to_a_version_are_listed() -> None:
    routing = Routing("stable", {"stable": "1", "canary": "2"}, {"stable": 90, "canary": 10})
    assert routing.routes_to("1") == ["stable", "default", "90 of 100"]
    assert routing.routes_to("2") == ["canary", "10 of 100"]
    assert routing.routes_to("3") == []


def test_invalid_routing_is_reported() -> None:
    assert routing_error(Routing("stable", {"stable": "1"}, {"stable": 1})) == ""
    assert "neither a version nor an alias" in routing_error(Routing("stable"))
    assert "split" in routing_error(Routing(split={"gone": 1}))
    assert "every weight is 0" in routing_error(Routing(split={"1": 0}))


def test_old_versions_retire_when_all_wanted_versions_are_served() -> None:
    assert plan_transition(["1"], ["2"], Routing()) == ([], True)
    assert plan_transition(["1", "2"], ["2"], Routing()) == (["1"], True)
    assert plan_transition(["1", "2"], [], Routing()) == (["1", "2"], True)


def test_routing_changes_when_all_its_targets_are_served() -> None:
    routing = Routing(aliases={"stable": "2"})
    assert plan_transition(["1"], ["1", "2"], routing) == ([], False)
    assert plan_transition(["1", "2"], ["1", "2", "3"], routing) == ([], True)


def test_nothing_changes_while_routing_targets_are_missing() -> None:
    """A version that would retire may be a target of the current routing."""
    routing = Routing(default="stable", aliases={"stable": "4"})
    assert plan_transition(["3"], ["3"], routing) == ([], False)
    assert plan_transition(["2", "3"], ["3"], routing) == ([], False)
    assert plan_transition(["3", "4"], ["4"], routing) == (["3"], True)
    assert plan_transition(["3"], [], routing) == (["3"], True), "a removed model has no targets"


def test_routing_targets_that_calls_have_unloaded_do_not_count() -> None:
    routing = Routing(default="stable", aliases={"stable": "2", "old": "1"})
    assert plan_transition(["2", "3", "4"], ["2", "4"], routing, ("1",)) == (["3"], True)
    assert plan_transition(["3"], ["2", "3"], routing, ("1",)) == ([], False)


def test_only_states_of_two_equal_scans_are_applied() -> None:
    assert settled({}, {"a": 1}, {}) == {}
    assert settled({"a": 1}, {"a": 1}, {}) == {"a": 1}
    assert settled({"a": 1}, {"a": 2}, {"a": 1}) == {"a": 1}
    assert settled({"a": 2}, {"a": 2}, {"a": 1}) == {"a": 2}
    assert settled({"a": 2}, {}, {"a": 2}) == {"a": 2}
    assert settled({}, {}, {"a": 2}) == {}


def test_generation_stages_are_one_way_and_end_with_an_unload() -> None:
    order = list(Stage)
    for stage, event in itertools.product(Stage, Event):
        following, actions = step(stage, event)
        assert order.index(following) >= order.index(stage)
        assert (Action.UNLOAD in actions) == (following is Stage.GONE is not stage)
        if stage is Stage.LOADING and following is Stage.GONE:
            assert actions[0] is Action.REPORT_FAILURE
    assert step(Stage.SERVING, Event.LOAD_FAILED) == (Stage.SERVING, ())
    assert all(actions for _, actions in TABLE.values())


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_scan_lists_numbered_versions_and_skips_other_entries(tmp_path: Path) -> None:
    fill(tmp_path / "m" / "1", model="a")
    fill(tmp_path / "m" / "10", model="b")
    fill(tmp_path / "m" / "01", model="c")
    fill(tmp_path / "m" / ".2", model="d")
    fill(tmp_path / "m" / "3")
    fill(tmp_path / ".hidden" / "1", model="e")
    fill(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    listed = list_models(tmp_path, "")
    assert {name: sorted(entry.versions) for name, entry in listed.items()} == {"m": ["1", "10"]}
    assert list_model(tmp_path, "../m", "") == ScannedModel("", {})
    assert list_models(tmp_path, ".complete") == {}


def test_every_folder_change_changes_the_stamp(tmp_path: Path) -> None:
    folder = fill(tmp_path / "1", model="a")
    stamps = [stamp_of(folder)]
    (folder / "labels").write_text("x")
    stamps.append(stamp_of(folder))
    (folder / "labels").rename(folder / "other")
    stamps.append(stamp_of(folder))
    (folder / "model").write_text("longer")
    stamps.append(stamp_of(folder))
    copy = fill(tmp_path / "2", model="longer", other="x")
    stamps.append(stamp_of(copy))
    assert len(set(stamps)) == len(stamps)
    assert stamp_of(folder) == stamps[3]
    assert stamp_of(folder, "marker") == stamp_of(tmp_path / "none") == ""


def test_settings_of_a_model_override_the_defaults(tmp_path: Path) -> None:
    config = Config(lanes=msgspec.structs.replace(Config().lanes, linger_us=7))
    assert read_settings(tmp_path, "m", config).lane.linger_us == 7
    text = 'aliases = {stable = 3}\ndefault = "stable"\nlane = {weight = 2.0}'
    fill(tmp_path / "m", **{"model.toml": text})
    settings = read_settings(tmp_path, "m", config)
    assert (settings.lane.linger_us, settings.lane.weight) == (7, 2.0)
    assert routing_of(settings) == Routing("stable", {"stable": "3"}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'a'", "`name` is defined by the folder"),
        ("path = 'a'", "`path` is defined by the folder"),
        ("x = 1", "unknown field"),
        ("[", "model.toml"),
        ("aliases = {7 = 3}", "regex"),
        ("versions = 'newest'", 'versions = "newest": expected `latest:N`'),
        ("versions = ''", 'versions = "": expected `latest:N`'),
        ("versions = 'latest:0'", 'versions = "latest:0": expected `latest:N`'),
        ("intra_threads = 'a'", "int"),
        ("inter_threads = 2", "no effect without"),
        ("workers = 2", "workers of its own"),
        ("backend = 'torch'", "a backend that needs them"),
        ("split = {1 = -1}", ">= 0"),
        ("# " + "x" * (1 << 16), "larger than"),
    ],
)
def test_invalid_model_settings_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    fill(tmp_path / "m", **{"model.toml": text})
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path, "m", Config())
