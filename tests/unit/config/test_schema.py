"""Settings: valid and rejected values, error messages, precedence, and the reference."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.config.loader import Loaded, load_config
from iskander.config.models import ModelConfig
from iskander.config.reference import TABLES, render_reference, settings
from iskander.config.schema import Config
from iskander.config.section import MIB
from iskander.errors import ConfigError

MODEL = '[[models]]\nname = "m"\npath = "m.onnx"\n'
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads a text as a file, with an empty environment by default."""

    def load_text(text: str, *, environment: dict[str, str] | None = None, **more: Any) -> Loaded:
        file = tmp_path / "iskander.toml"
        file.write_text(text, "utf-8")
        return load_config(file, environment=environment or {}, **more)

    return load_text


def test_one_model_is_a_complete_configuration(load: Load, tmp_path: Path) -> None:
    loaded = load(MODEL)

    model = ModelConfig(name="m", path=str(tmp_path / "m.onnx"), version="1")
    assert loaded.config == Config(models=(model,))
    assert loaded.origins == {}


def test_every_default_is_valid(load: Load) -> None:
    """msgspec does not validate defaults, so the test converts them back as input."""
    model = ModelConfig(name="m", path="m.onnx", version="1")
    raw = msgspec.to_builtins(Config(models=(model,)))

    assert msgspec.convert(raw, Config) == Config(models=(model,))


# Each row: file text, path and value in the message, rule in the message.
REJECTED = [
    ("", "there is nothing to serve", "no [[models]], and no repository.path"),
    ("models = []", "there is nothing to serve", "no [[models]], and no repository.path"),
    ("[repository]\nversions = 'newest'\n" + MODEL, 'repository.versions = "newest"', "latest:N"),
    ("[repository]\nmarker = 'a/b'\n" + MODEL, 'repository.marker = "a/b"', "regex"),
    ("[access]\nanonymous = ['a']\n" + MODEL, "access.anonymous", "without access.tokens"),
    (
        "[access]\ntokens = 't'\n[inferential]\naddress = 'tcp://127.0.0.1:1'\n" + MODEL,
        "inferential.address and access.tokens",
        "set access.anonymous",
    ),
    ("[tls]\nkey = 'k'\n" + MODEL, "tls.key", "no effect without tls.certificate"),
    ("[models]\nname = 'm'", "models", "Expected `array`"),
    ("[[models]]\nname = 'm'", "models[0]", "missing required field `path`"),
    ("[[models]]\nname = 'm'\npath = ''", 'models[0].path = ""', "length >= 1"),
    (MODEL + "[[models]]\nname = 'a b'\npath = 'p'", 'models[1].name = "a b"', "regex"),
    ("[[models]]\nname = ''\npath = 'p'", 'models[0].name = ""', "regex"),
    ("[[models]]\nname = '.a'\npath = 'p'", 'models[0].name = ".a"', "regex"),
    (f"[[models]]\nname = '{'a' * 129}'\npath = 'p'", "models[0].name", "regex"),
    ('[[models]]\nname = "a\\n"\npath = "p"', "models[0].name", "regex"),
    (MODEL + "version = true", "models[0].version = true", "int | str"),
    (MODEL + "version = 1.5", "models[0].version = 1.5", "int | str"),
    (MODEL + "backend = 'to rch'", 'models[0].backend = "to rch"', "regex"),
    (MODEL + "execution_providers = []", "models[0].execution_providers", ">= 1"),
    (MODEL + "execution_providers = ['x']", "models[0].execution_providers[0]", "cuda"),
    (MODEL + "max_batch_rows = 0", "models[0].max_batch_rows = 0", ">= 1"),
    (MODEL + "intra_threads = -1", "models[0].intra_threads = -1", ">= 0"),
    (MODEL + "intra_threads = 1025", "models[0].intra_threads = 1025", "<= 1024"),
    (MODEL + "optimization_level = 'max'", "models[0].optimization_level", "level3"),
    (MODEL + "unknown = 1", "models[0]", "unknown field `unknown`"),
    ("unknown = 1\n" + MODEL, "the file", "unknown field `unknown`"),
    ("limits = 3\n" + MODEL, "limits = 3", "Expected `object`"),
    ("[limits]\nrowz = 1\n" + MODEL, "limits", "unknown field `rowz`"),
    ("[limits]\nrows = 'many'\n" + MODEL, 'limits.rows = "many"', "Expected `int`"),
    ("[limits]\nrows = 1.5\n" + MODEL, "limits.rows = 1.5", "Expected `int`"),
    ("[limits]\nrows = true\n" + MODEL, "limits.rows = true", "Expected `int`"),
    ("[limits]\nrows = 0\n" + MODEL, "limits.rows = 0", ">= 1"),
    ("[limits]\nnesting = 65\n" + MODEL, "limits.nesting = 65", "<= 64"),
    ("[limits]\nmessage_bytes = 2147483648\n" + MODEL, "limits.message_bytes", "<= 2147483647"),
    ("[limits]\narena_wait_ms = -1\n" + MODEL, "limits.arena_wait_ms = -1", ">= 0"),
    ("[server]\naddress = 1\n" + MODEL, "server.address = 1", "str"),
    ("[server]\naddress = [1]\n" + MODEL, "server.address[0] = 1", "str"),
    ("[server]\naddress = []\n" + MODEL, "server.address", "empty list"),
    ("[server]\nunix_mode = '999'\n" + MODEL, 'server.unix_mode = "999"', "regex"),
    ("[server]\ndrain_s = 0\n" + MODEL, "server.drain_s = 0", "> 0"),
    ("[server]\ndrain_s = nan\n" + MODEL, "server.drain_s", "> 0"),
    ("[server]\ndrain_s = inf\n" + MODEL, "server.drain_s", ""),
    ("[workers]\nhang_s = inf\n" + MODEL, "workers.hang_s", ""),
    ("[workers]\ngroups = 'all'\n" + MODEL, 'workers.groups = "all"', "auto"),
    ("[workers]\ncount = 1025\n" + MODEL, "workers.count = 1025", "<= 1024"),
    ("[workers]\nspawn = 1\n" + MODEL, "workers.spawn = 1", "Expected `bool`"),
    ("[workers]\nstart_s = -1\n" + MODEL, "workers.start_s = -1", "> 0"),
    ("[arena]\noutput_bytes = 0\n" + MODEL, "arena.output_bytes = 0", ">= 1"),
    ("[admin]\nlog_level = 'loud'\n" + MODEL, 'admin.log_level = "loud"', "warning"),
]


@pytest.mark.parametrize(
    ("text", "path_and_value", "rule"), REJECTED, ids=[f"{row[1]} {row[2]}" for row in REJECTED]
)
def test_rejection_names_path_value_and_rule(
    load: Load, text: str, path_and_value: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)

    before, _, after = caught.value.message.partition(path_and_value)
    assert before == ""
    assert rule in after


ACCEPTED = [
    ("[limits]\nnesting = 64\n" + MODEL, "limits.nesting", 64),
    ("[limits]\narena_wait_ms = 0\n" + MODEL, "limits.arena_wait_ms", 0),
    ("[server]\naddress = 'unix:/x'\n" + MODEL, "server.address", "unix:/x"),
    ("[server]\naddress = ['a:1', 'b:2']\n" + MODEL, "server.address", ("a:1", "b:2")),
    ("[server]\nunix_mode = '600'\n" + MODEL, "server.unix_mode", "600"),
    ("[server]\ndrain_s = 1\n" + MODEL, "server.drain_s", 1.0),
    ("[workers]\ngroups = ['0-3', '4']\n" + MODEL, "workers.groups", ("0-3", "4")),
    ("[workers]\ngroups = 'auto'\n" + MODEL, "workers.groups", "auto"),
    ("[workers]\nreattach_s = 0\n" + MODEL, "workers.reattach_s", 0.0),
    ("[admin]\nlog_format = 'json'\n" + MODEL, "admin.log_format", "json"),
]


@pytest.mark.parametrize(
    ("text", "path", "value"), ACCEPTED, ids=[f"{row[1]} {row[2]}" for row in ACCEPTED]
)
def test_boundary_values_are_accepted(load: Load, text: str, path: str, value: object) -> None:
    loaded = load(text)

    section, key = path.split(".")
    assert getattr(getattr(loaded.config, section), key) == value
    assert loaded.origins == {path: "file"}


@pytest.mark.parametrize(("name", "version"), [("a", "2"), ("A_b.c:d-1", "v1"), ("9" * 128, "")])
def test_valid_names_and_versions(load: Load, name: str, version: str) -> None:
    model = load(f"[[models]]\nname = '{name}'\npath = 'p'\nversion = '{version}'").config.models[0]

    assert (model.name, model.version) == (name, version)


HEADER_SPACE = MIB  # Space for the header of a batch.
CONTRADICTIONS = [
    (
        f"[limits]\nbytes = 1000\nstring_bytes = 1\nmessage_bytes = {HEADER_SPACE + 1000}",
        f"[limits]\nbytes = 1000\nstring_bytes = 1\nmessage_bytes = {HEADER_SPACE + 999}",
        f"limits.message_bytes = {HEADER_SPACE + 999} is less than limits.bytes",
    ),
    (
        f"[limits]\nbytes = 1000\nstring_bytes = 1\n[arena]\ninput_bytes = {HEADER_SPACE + 1000}",
        f"[limits]\nbytes = 1000\nstring_bytes = 1\n[arena]\ninput_bytes = {HEADER_SPACE + 999}",
        f"arena.input_bytes = {HEADER_SPACE + 999} is less than limits.bytes",
    ),
    (
        "[limits]\nbytes = 1000\nstring_bytes = 1\nwindow_bytes = 1000",
        "[limits]\nbytes = 1000\nstring_bytes = 1\nwindow_bytes = 999",
        "limits.window_bytes = 999 is less than limits.bytes",
    ),
    (
        "[limits]\nbytes = 1000\nstring_bytes = 1000",
        "[limits]\nbytes = 1000\nstring_bytes = 1001",
        "limits.string_bytes = 1001 is more than limits.bytes",
    ),
    (
        f"[http]\naddress = 'a:1'\nbodies_bytes = {72 * MIB}",
        f"[http]\naddress = 'a:1'\nbodies_bytes = {72 * MIB - 1}",
        f"http.bodies_bytes = {72 * MIB - 1} is less than limits.message_bytes",
    ),
    (
        "[limits]\nrows = 65536",
        "[limits]\nrows = 65535",
        "models[0].max_batch_rows = 65536 is more than limits.rows = 65535",
    ),
]


@pytest.mark.parametrize(
    ("accepted", "rejected", "message"), CONTRADICTIONS, ids=[row[2] for row in CONTRADICTIONS]
)
def test_contradictory_settings_are_rejected(
    load: Load, accepted: str, rejected: str, message: str
) -> None:
    """Both sides of each relation's boundary."""
    load(f"{accepted}\n{MODEL}")

    with pytest.raises(ConfigError, match=re.escape(message)):
        load(f"{rejected}\n{MODEL}")


def test_larger_batches_of_the_operating_page(load: Load) -> None:
    """The page's block is accepted, and refused with the default of a setting that it checks."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "operating.md").read_text("utf-8")
    block = re.search(r"^### Larger batches\n.*?^```toml\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    lines = block[1].splitlines()
    load("\n".join([*lines, MODEL]))
    checked = [line for line in lines if "# at least" in line and "or 0" not in line]
    assert len(checked) == 4
    for line in checked:
        with pytest.raises(ConfigError):
            load("\n".join([*(each for each in lines if each != line), MODEL]))


MODEL_CONTRADICTIONS = [
    ('execution_providers = ["cuda", "cpu"]', 'execution_providers = ["cpu", "cpu"]', "twice"),
    ("inter_threads = 1", "inter_threads = 2", "models[0].inter_threads = 2 has no effect"),
    (
        "inter_threads = 2\nparallel_execution = true",
        "inter_threads = 2\nparallel_execution = false",
        "parallel_execution = true",
    ),
]


@pytest.mark.parametrize(("accepted", "rejected", "message"), MODEL_CONTRADICTIONS)
def test_contradictory_model_settings_are_rejected(
    load: Load, accepted: str, rejected: str, message: str
) -> None:
    load(MODEL + accepted)

    with pytest.raises(ConfigError, match=re.escape(message)):
        load(MODEL + rejected)


def test_duplicate_model_version_is_rejected(load: Load) -> None:
    """A model without a version number has version 1."""
    load(MODEL + MODEL + "version = 2")

    with pytest.raises(ConfigError, match=r"models\[1\]: duplicate of `m` version 1"):
        load(MODEL + MODEL + "version = '1'")


@pytest.mark.parametrize(
    ("path", "version", "expected"),
    [
        ("m.onnx", None, "1"),
        ("models/m/7/model.onnx", None, "7"),
        ("models/m/7/other.onnx", None, "7"),
        ("models/m/007/model.onnx", None, "007"),
        ("models/m/v7/model.onnx", None, "1"),
        ("folder/12", None, "12"),
        ("folder/12", 3, "3"),
        ("folder/12", "'blue'", "blue"),
        ("models/m/7/model.onnx", 8, "8"),
    ],
)
def test_version_is_explicit_or_the_folder_number_or_one(
    load: Load, tmp_path: Path, path: str, version: str | int | None, expected: str
) -> None:
    (tmp_path / "folder" / "12").mkdir(parents=True)
    version_line = "" if version is None else f"version = {version}"

    model = load(f"[[models]]\nname = 'm'\npath = '{path}'\n{version_line}").config.models[0]

    assert model.version == expected


def test_model_path_is_relative_to_the_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")

    models = load(MODEL + "[[models]]\nname = 'n'\npath = '/abs/n.onnx'").config.models

    assert [model.path for model in models] == [str(tmp_path / "m.onnx"), "/abs/n.onnx"]


def test_model_path_is_relative_to_the_target_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "c.toml").write_text(MODEL)
    (tmp_path / "link.toml").symlink_to(tmp_path / "real" / "c.toml")

    loaded = load_config(tmp_path / "link.toml", environment={})

    assert loaded.config.models[0].path == str(tmp_path / "real" / "m.onnx")


FILE = "[workers]\ncount = 1\n" + MODEL
ENVIRONMENT = {"ISKANDER_WORKERS__COUNT": "2"}
OVERRIDES = ("workers.count=3",)


@pytest.mark.parametrize(
    ("text", "environment", "overrides", "count", "origins"),
    [
        (MODEL, {}, (), 0, {}),
        (FILE, {}, (), 1, {"workers.count": "file"}),
        (FILE, ENVIRONMENT, (), 2, {"workers.count": "environment"}),
        (MODEL, ENVIRONMENT, (), 2, {"workers.count": "environment"}),
        (FILE, ENVIRONMENT, OVERRIDES, 3, {"workers.count": "--set"}),
        (FILE, {}, OVERRIDES, 3, {"workers.count": "--set"}),
        (MODEL, {}, (*OVERRIDES, "workers.count=4"), 4, {"workers.count": "--set"}),
    ],
)
def test_later_source_overrides_and_its_origin_is_recorded(
    load: Load,
    text: str,
    environment: dict[str, str],
    overrides: tuple[str, ...],
    count: int,
    origins: dict[str, str],
) -> None:
    loaded = load(text, environment=environment, overrides=overrides)

    assert loaded.config.workers.count == count
    assert loaded.origins == origins


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("limits.rows=100000", "limits.rows", 100_000),
        (" limits.rows = 100_000 ", "limits.rows", 100_000),
        ("admin.log_level=debug", "admin.log_level", "debug"),
        ('admin.log_level="debug"', "admin.log_level", "debug"),
        ("workers.spawn=false", "workers.spawn", False),
        ("server.drain_s=1.5", "server.drain_s", 1.5),
        ("server.address=127.0.0.1:0", "server.address", "127.0.0.1:0"),
        ("server.address=unix:/a=b", "server.address", "unix:/a=b"),
        ('server.address=["a:1", "b:2"]', "server.address", ("a:1", "b:2")),
        ("server.unix_mode=0600", "server.unix_mode", "0600"),
        ("server.runtime_directory=", "server.runtime_directory", ""),
        ('workers.groups=["0", "1"]', "workers.groups", ("0", "1")),
    ],
)
def test_override_is_a_toml_value_or_plain_text(
    load: Load, override: str, path: str, value: object
) -> None:
    """`--set` and environment variables parse values alike."""
    name, _, text = override.partition("=")
    variable = "ISKANDER_" + name.strip().upper().replace(".", "__")

    for loaded in (load(MODEL, overrides=(override,)), load(MODEL, environment={variable: text})):
        section, key = path.split(".")
        assert getattr(getattr(loaded.config, section), key) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limits.rows", "--set limits.rows: expected section.key=value"),
        ("", "expected section.key=value"),
        ("rows=1", "only section.key of a [section] can be set"),
        ("limits=1", "only section.key of a [section] can be set"),
        ("models.name=a", "only section.key of a [section] can be set"),
        ("limits.rowz=1", "unknown field `rowz`"),
        ("limit.rows=1", "unknown field `limit`"),
        ("limits.rows.more=1", "unknown field `rows.more`"),
        ("limits.rows=many", 'limits.rows = "many": Expected `int`'),
        ("limits.rows=0", "limits.rows = 0: Expected `int` >= 1"),
    ],
)
def test_invalid_override_is_rejected(load: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(MODEL, overrides=(override,))


def test_unknown_setting_in_the_environment_is_rejected(load: Load) -> None:
    with pytest.raises(ConfigError, match="unknown field `rowz`"):
        load(MODEL, environment={"ISKANDER_LIMITS__ROWZ": "1"})


def test_other_environment_variables_are_ignored(load: Load) -> None:
    """Variables without a double underscore or with another prefix are ignored."""
    loaded = load(MODEL, environment={"ISKANDER_HOME": "/x", "LIMITS__ROWS": "1", "PATH": "/bin"})

    assert loaded.origins == {}


def test_process_environment_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(MODEL)
    monkeypatch.setenv("ISKANDER_WORKERS__COUNT", "5")

    assert load_config(tmp_path / "c.toml").config.workers.count == 5


@pytest.mark.parametrize(
    "raw", [b"[server\n", b"a = ", b"\xff\xfe", b"a = 1\na = 2\n", b"a = " + b"9" * 5000]
)
def test_invalid_toml_is_rejected_with_the_file_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "broken.toml").write_bytes(raw)

    with pytest.raises(ConfigError, match=r"^broken\.toml is not TOML"):
        load_config(tmp_path / "broken.toml", environment={})


def test_deeply_nested_toml_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)

    with pytest.raises(ConfigError, match=r"^deep\.toml is nested too deeply"):
        load_config(tmp_path / "deep.toml", environment={})


def test_path_that_no_file_can_have_is_of_version_1(tmp_path: Path) -> None:
    """The load reports it; nothing else may fail before."""
    (tmp_path / "c.toml").write_text(f'[[models]]\nname = "m"\npath = "{"x" * 5000}"\n')

    (model,) = load_config(tmp_path / "c.toml", environment={}).config.models
    assert model.version == "1"


def test_missing_file_is_rejected_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^none\.toml cannot be read: No such file"):
        load_config(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("address", "addresses"), [('"a:1"', ("a:1",)), ('["a:1", "b:2"]', ("a:1", "b:2"))]
)
def test_addresses_are_always_a_tuple(load: Load, address: str, addresses: tuple[str, ...]) -> None:
    assert load(f"[server]\naddress = {address}\n{MODEL}").config.addresses == addresses


def uncommented_models(reference: str) -> str:
    """Return the `[[models]]` part of the reference without its comment marks."""
    part = reference[reference.index("# [[models]]") :]
    lines = (line.removeprefix("# ") for line in part.splitlines())
    return "\n".join(line for line in lines if re.match(r"\[\[|\w+ = (?!\.\.\.)", line))


def test_reference_is_toml_with_the_defaults() -> None:
    reference = render_reference()
    model = ModelConfig(name="m", path="p")

    raw = tomllib.loads(reference)
    (raw_model,) = tomllib.loads(uncommented_models(reference))["models"]

    assert msgspec.convert(raw | {"models": [{"name": "m", "path": "p"}]}, Config) == Config(
        models=(model,)
    )
    assert msgspec.convert(raw_model | {"name": "m", "path": "p"}, ModelConfig) == model


def test_reference_lists_every_setting_once() -> None:
    reference = render_reference()
    paths = [setting.path for setting in settings()]

    keys = re.findall(r"^(?:# )?(\w+) = ", reference, re.MULTILINE)

    assert keys == [path.split(".")[1] for path in paths]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("setting", [pytest.param(s, id=s.path) for s in settings()])
def test_every_setting_has_a_sentence_and_a_type(setting: Any) -> None:
    assert re.fullmatch(r"[A-Z`].*\.", setting.sentence)
    assert re.fullmatch(r'[a-z0-9_ "|-]+', setting.type)
    assert setting.default is not None or setting.path.startswith(("models.", "sources."))


def test_settings_match_the_declared_fields() -> None:
    """Every declared field must be in the reference."""
    declared = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(TABLES.get(section.name, section.type))
    ]

    assert [setting.path for setting in settings()] == declared


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            MODEL + "provider_options = {cuda = {device_id = 1}}",
            "models[0].provider_options has `cuda`, which is not in execution_providers",
        ),
        (
            "[workers]\nthread_pool = 'worker'\n" + MODEL + "intra_threads = 2",
            "models[0]: intra_threads and inter_threads have no effect with "
            'workers.thread_pool = "worker"',
        ),
    ],
)
def test_model_settings_without_effect_are_rejected(load: Load, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.message == rule


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ("", 0),
        ("workers = 3", 3),
        ("backend = 'python'", 1),
        ("backend = 'pipeline'", 0),
        ("backend = 'pipeline'\nworkers = 2", 2),
        ("backend = 'of.others'", 1),
        ("python = 'bin/python'", 1),
    ],
)
def test_models_with_their_own_worker_pool(
    load: Load, tmp_path: Path, more: str, count: int
) -> None:
    (model,) = load(MODEL + more).config.models
    assert model.own_workers == count
    assert model.pool == (f"{model.name}/{model.version}" if count else "")
    assert model.python in ("", str(tmp_path / "bin" / "python"))


def test_folder_and_overrides_that_are_not_utf8_are_rejected(tmp_path: Path) -> None:
    """Paths of the file are relative to it, and are sent to workers."""
    folder = tmp_path / os.fsdecode(b"a\xff")
    folder.mkdir()
    text = '[repository]\npath = "models"\n'
    for file in (folder / "c.toml", tmp_path / "c.toml"):
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"folder of the configuration `.*a\\xff` is not UTF-8"):
        load_config(folder / "c.toml", environment={})
    for given in (
        {"environment": {"ISKANDER_REPOSITORY__PATH": "/a\udcff"}},
        {"environment": {}, "overrides": ("repository.path=/a\udcff",)},
    ):
        with pytest.raises(ConfigError, match=r"`repository.path=/a\\xff` is not UTF-8"):
            load_config(tmp_path / "c.toml", **given)  # type: ignore[arg-type]
