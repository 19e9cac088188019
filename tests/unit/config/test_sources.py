"""Settings of sources, and their relations to models."""

from __future__ import annotations

from pathlib import Path

import pytest

from iskander.config.loader import load_config
from iskander.config.schema import Config
from iskander.errors import ConfigError

MODEL = '[[models]]\nname = "m"\npath = "m.onnx"\n'
SOURCE = '[[sources]]\nname = "s"\npath = "data"\nmodel = "m"\n'


def load(tmp_path: Path, text: str) -> Config:
    (tmp_path / "iskander.toml").write_text(text)
    return load_config(tmp_path / "iskander.toml", environment={}).config


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    reads = '[source_reads]\nkey_file = "key"\n'
    config = load(tmp_path, MODEL + SOURCE + "version = 3\n" + reads)
    (source,) = config.sources
    assert source.path == str(tmp_path / "data")
    assert source.version_text == "3"
    assert config.source_reads.key_file == str(tmp_path / "key")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE.replace('"s"', '"m"'), r"sources\[0\]: `m` is the name of a model"),
        (SOURCE + SOURCE, r"sources\[1\]: duplicate of `s`"),
        (SOURCE.replace('"m"', '"x"'), r"sources\[0\].model = x: no model"),
        (SOURCE + "keep = 3\n", r"sources\[0\].keep = 3"),
        (SOURCE.replace('"s"', '"a b"'), r"sources\[0\].name"),
        (SOURCE + "other = 3\n", "unknown field `other`"),
        (SOURCE + '[source_reads]\nlocations = ["10.0.0.1:50051"]\n', "source_reads.locations"),
        (SOURCE + "[source_reads]\nstreams = 0\n", "source_reads.streams = 0"),
        ("[source_reads]\nstreams = 2\n", r"\[source_reads\] has no effect without"),
    ],
)
def test_invalid_sources_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, MODEL + text)


def test_model_of_a_repository_is_known_at_run_time_only(tmp_path: Path) -> None:
    config = load(tmp_path, '[repository]\npath = "models"\n' + SOURCE)
    assert config.sources[0].model == "m"
