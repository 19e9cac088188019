"""Settings with deprecated names: warnings, precedence, and the rewriting of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from iskander.config.loader import load_config
from iskander.config.migration.renamed import REMOVED, RENAMED
from iskander.config.reference import settings
from iskander.errors import ConfigError

MODEL = '[[models]]\nname = "m"\npath = "m.onnx"\n'
OLD = f"""# trial = true is explained here
[loading]  # a section
# first: trial
trial = false # "trial" is off
'trial_s'   =   5.5

{MODEL}"""
FIXED = f"""# trial = true is explained here
[loading]  # a section
# first: trial
sandbox = false # "trial" is off
'sandbox_s'   =   5.5

{MODEL}"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "iskander.toml"


def test_only_the_new_names_are_settings() -> None:
    names = {setting.path for setting in settings()}
    assert set(RENAMED.values()) <= names
    assert not set(RENAMED) & names


def test_old_names_work_with_a_warning_that_gives_the_new_name(file: Path) -> None:
    file.write_text(OLD, "utf-8")
    loaded = load_config(
        file, overrides=("loading.trial_s=7",), environment={"ISKANDER_LOADING__TRIAL_BYTES": "9"}
    )
    loading = loaded.config.loading
    assert (loading.sandbox, loading.sandbox_s, loading.sandbox_bytes) == (False, 7.0, 9)
    assert set(loaded.warnings) == {
        f"setting {old} is deprecated: use {new}" for old, new in RENAMED.items()
    }
    assert loaded.origins["loading.sandbox"] == "file"
    assert loaded.origins["loading.sandbox_s"] == "--set"
    assert loaded.origins["loading.sandbox_bytes"] == "environment"


@pytest.mark.parametrize("path", REMOVED)
def test_removed_setting_is_an_error_that_names_its_replacement(file: Path, path: str) -> None:
    section, key = path.split(".")
    value, expected = '"1"', rf"setting {section}\.{key} is removed: .*events\.(enabled|buffer)"
    file.write_text(f"[{section}]\n{key} = {value}\n{MODEL}", "utf-8")
    with pytest.raises(ConfigError, match=expected):
        load_config(file, environment={})
    file.write_text(MODEL, "utf-8")
    with pytest.raises(ConfigError, match=expected):
        load_config(file, overrides=(f"{path}={value}",), environment={})
    with pytest.raises(ConfigError, match=expected):
        load_config(file, environment={f"ISKANDER_{section}__{key}".upper(): value})
    assert path not in {setting.path for setting in settings()}


def test_new_names_cause_no_warning(file: Path) -> None:
    file.write_text(FIXED, "utf-8")
    assert load_config(file, environment={}).warnings == ()


def test_old_and_new_name_together_are_an_error(file: Path) -> None:
    text = f"[loading]\ntrial = true\nsandbox = true\n{MODEL}"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"loading\.trial and loading\.sandbox are the same"):
        load_config(file, environment={})
