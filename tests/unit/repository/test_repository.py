"""Which versions are wanted, which one a call means, and how a generation lives."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.repository.generation_lifecycle import TABLE, Action, Event, Stage, step
from iskander.repository.routing import Routing
from iskander.repository.scan import ScannedModel, list_model, list_models, read_settings, stamp_of
from iskander.repository.version_policy import (
    complaint_about,
    move,
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
def test_versions_are_numbers_and_the_policy_chooses(
    policy: str | tuple[int, ...], chosen: list[str]
) -> None:
    assert wanted_versions(["10", "9", "1", "2"], policy, Routing()) == chosen


def test_what_something_leads_to_is_wanted_too() -> None:
    routing = Routing(default="stable", aliases={"stable": "2"}, split={"1": 1, "canary": 1})
    assert wanted_versions(["1", "2", "3"], "latest:1", routing) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("routing", "version", "means"),
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
def test_which_version_a_call_means(
    routing: Routing, version: str | None, means: str | None
) -> None:
    assert routing.choose(version, "key", SERVED) == means


@given(keys)
def test_a_key_keeps_its_version(key: str) -> None:
    assert HALF.choose(None, key, SERVED) == HALF.choose(None, key, SERVED) in ("1", "2")


@given(keys, st.floats(0.01, 100), st.floats(0.01, 100), st.floats(1, 10))
def test_only_keys_of_who_loses_move_and_only_to_who_grows(
    key: str, first: float, second: float, grown: float
) -> None:
    before = Routing(split={"1": first, "2": second, "3": 1.0}).choose(None, key, SERVED)
    after = Routing(split={"1": first, "2": second * grown, "3": 1.0}).choose(None, key, SERVED)
    assert after in (before, "2")


@given(keys)
def test_a_version_that_goes_moves_its_own_keys_only(key: str) -> None:
    routing = Routing(split={"1": 20, "2": 30, "3": 50})
    before = routing.choose(None, key, SERVED)
    after = routing.choose(None, key, ("1", "3"))
    assert before in (after, "2")


def test_shares_are_as_the_weights_say() -> None:
    routing = Routing(split={"1": 90, "2": 10})
    drawn = [routing.choose(None, f"user-{n}", SERVED) for n in range(20_000)]
    assert 0.08 < drawn.count("2") / len(drawn) < 0.12


def test_what_leads_to_a_version_is_told() -> None:
    routing = Routing("stable", {"stable": "1", "canary": "2"}, {"stable": 90, "canary": 10})
    assert routing.routes_to("1") == ["stable", "default", "90 of 100"]
    assert routing.routes_to("2") == ["canary", "10 of 100"]
    assert routing.routes_to("3") == []


def test_names_that_lead_nowhere_are_complained_about() -> None:
    assert complaint_about(Routing("stable", {"stable": "1"}, {"stable": 1})) == ""
    assert "neither a version nor an alias" in complaint_about(Routing("stable"))
    assert "split" in complaint_about(Routing(split={"gone": 1}))
    assert "every weight is 0" in complaint_about(Routing(split={"1": 0}))


def test_the_old_goes_when_all_of_the_new_is_there() -> None:
    assert move(["1"], ["2"], Routing()) == ([], True)
    assert move(["1", "2"], ["2"], Routing()) == (["1"], True)
    assert move(["1", "2"], [], Routing()) == (["1", "2"], True)


def test_routes_change_when_all_that_they_lead_to_is_there() -> None:
    routing = Routing(aliases={"stable": "2"})
    assert move(["1"], ["1", "2"], routing) == ([], False)
    assert move(["1", "2"], ["1", "2", "3"], routing) == ([], True)


def test_nothing_changes_while_names_lead_to_what_is_not_there() -> None:
    """Neither routes nor versions: what they led to until now may be what would go."""
    routing = Routing(default="stable", aliases={"stable": "4"})
    assert move(["3"], ["3"], routing) == ([], False)
    assert move(["2", "3"], ["3"], routing) == ([], False)
    assert move(["3", "4"], ["4"], routing) == (["3"], True)
    assert move(["3"], [], routing) == (["3"], True), "a model that goes takes its names along"


def test_only_what_was_left_alone_is_followed() -> None:
    assert settled({}, {"a": 1}, {}) == {}
    assert settled({"a": 1}, {"a": 1}, {}) == {"a": 1}
    assert settled({"a": 1}, {"a": 2}, {"a": 1}) == {"a": 1}
    assert settled({"a": 2}, {"a": 2}, {"a": 1}) == {"a": 2}
    assert settled({"a": 2}, {}, {"a": 2}) == {"a": 2}
    assert settled({}, {}, {"a": 2}) == {}


def test_the_table_of_stages_is_one_way_and_forgets_what_is_gone() -> None:
    order = list(Stage)
    for stage, event in itertools.product(Stage, Event):
        following, actions = step(stage, event)
        assert order.index(following) >= order.index(stage)
        assert (Action.UNLOAD in actions) == (following is Stage.GONE is not stage)
        if stage is Stage.LOADING and following is Stage.GONE:
            assert actions[0] is Action.REPORT_FAILURE
    assert step(Stage.SERVING, Event.REFUSED) == (Stage.SERVING, ())
    assert all(actions for _, actions in TABLE.values())


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_listing_has_numbers_below_names_and_passes_the_rest_over(tmp_path: Path) -> None:
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


def test_every_change_of_a_folder_makes_another_stamp(tmp_path: Path) -> None:
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


def test_a_models_own_settings_go_before_those_of_all(tmp_path: Path) -> None:
    config = Config(lanes=msgspec.structs.replace(Config().lanes, linger_us=7))
    assert read_settings(tmp_path, "m", config).lane.linger_us == 7
    said = 'aliases = {stable = 3}\ndefault = "stable"\nlane = {weight = 2.0}'
    fill(tmp_path / "m", **{"model.toml": said})
    settings = read_settings(tmp_path, "m", config)
    assert (settings.lane.linger_us, settings.lane.weight) == (7, 2.0)
    assert routing_of(settings) == Routing("stable", {"stable": "3"}, {})


@pytest.mark.parametrize(
    ("text", "rule"),
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
        ("split = {1 = -1}", ">= 0"),
        ("# " + "x" * (1 << 16), "larger than"),
    ],
)
def test_settings_that_say_what_they_may_not_are_refused(
    tmp_path: Path, text: str, rule: str
) -> None:
    fill(tmp_path / "m", **{"model.toml": text})
    with pytest.raises(ConfigError, match=rule):
        read_settings(tmp_path, "m", Config())
