"""Settings of drift: shares of models, the folder of references, the missing extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from iskander.config.drift import DriftConfig
from iskander.config.loader import load_config
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.observation import drift_installed as installed
from iskander.sampling.drift_consumer import references_folder


def load(folder: Path, drift: str, share: float) -> Config:
    file = folder / "iskander.toml"
    model = f'[[models]]\nname = "m"\npath = "m"\ndrift = {{share = {share}}}\n'
    file.write_text(f"[drift]\n{drift}\n{model}")
    return load_config(file).config


def test_models_with_a_share_are_observed(tmp_path: Path) -> None:
    config = load(tmp_path, "enabled = true\nfolder = 'references'", 0.25)
    assert config.is_observed and config.models[0].observed_share == 0.25
    assert config.drift.folder == str(tmp_path / "references")
    assert references_folder(config) == tmp_path / "references"
    assert not load(tmp_path, "enabled = true", 0.0).is_observed


def test_share_without_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drift.share has no effect without drift.enabled"):
        load(tmp_path, "", 0.25)


@pytest.mark.parametrize(
    "setting",
    ["window_s = 1", "rows_min = 1", "psi = 0", "references = ['other']", "record_rows = 0"],
)
def test_settings_out_of_range(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition(" ")[0]):
        load(tmp_path, setting, 0.0)


def test_folder_of_references_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, "enabled = true", 0.25)
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert references_folder(config) == tmp_path / "iskander" / "drift"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    with pytest.raises(ConfigError, match=r"drift\.folder"):
        references_folder(config)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed.require_sketches(DriftConfig(enabled=True))
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    installed.require_sketches(DriftConfig())
    with pytest.raises(ConfigError, match=r"iskander\[drift\]"):
        installed.require_sketches(DriftConfig(enabled=True))
