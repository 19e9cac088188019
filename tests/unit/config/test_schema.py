"""Settings: what is taken, what is refused and in which words, and who overrides whom."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.config.loader import Loaded, load_config
from iskander.config.models import ModelConfig
from iskander.config.reference import render_reference, settings
from iskander.config.schema import Config
from iskander.config.section import MIB
from iskander.errors import ConfigError

MODEL = '[[models]]\nname = "m"\npath = "m.onnx"\n'
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a text as a file, in an environment that is empty unless the test gives one."""

    def load_text(text: str, *, environment: dict[str, str] | None = None, **more: Any) -> Loaded:
        file = tmp_path / "iskander.toml"
        file.write_text(text, "utf-8")
        return load_config(file, environment=environment or {}, **more)

    return load_text


def test_one_model_is_all_that_has_to_be_said(load: Load, tmp_path: Path) -> None:
    loaded = load(MODEL)

    model = ModelConfig(name="m", path=str(tmp_path / "m.onnx"), version="1")
    assert loaded.config == Config(models=(model,))
    assert loaded.origins == {}


def test_every_default_is_in_its_own_range(load: Load) -> None:
    """By giving the defaults back as if they were the user's: msgspec does not check defaults."""
    model = ModelConfig(name="m", path="m.onnx", version="1")
    raw = msgspec.to_builtins(Config(models=(model,)))

    assert msgspec.convert(raw, Config) == Config(models=(model,))


# Each line: what the file says, and the words of the refusal: path, value, rule.
REFUSED = [
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
    ("text", "path_and_value", "rule"), REFUSED, ids=[f"{row[1]} {row[2]}" for row in REFUSED]
)
def test_a_refusal_says_path_value_and_rule(
    load: Load, text: str, path_and_value: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)

    where, _, why = caught.value.message.partition(path_and_value)
    assert where == ""
    assert rule in why


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
def test_what_stands_beside_the_refused_is_taken(
    load: Load, text: str, path: str, value: object
) -> None:
    loaded = load(text)

    section, key = path.split(".")
    assert getattr(getattr(loaded.config, section), key) == value
    assert loaded.origins == {path: "file"}


@pytest.mark.parametrize(("name", "version"), [("a", "2"), ("A_b.c:d-1", "v1"), ("9" * 128, "")])
def test_names_and_versions_that_are_taken(load: Load, name: str, version: str) -> None:
    model = load(f"[[models]]\nname = '{name}'\npath = 'p'\nversion = '{version}'").config.models[0]

    assert (model.name, model.version) == (name, version)


ROOM = MIB  # Beside a batch's body, for its header.
CONTRADICTIONS = [
    (
        f"[limits]\nbytes = 1000\nstring_bytes = 1\nmessage_bytes = {ROOM + 1000}",
        f"[limits]\nbytes = 1000\nstring_bytes = 1\nmessage_bytes = {ROOM + 999}",
        f"limits.message_bytes = {ROOM + 999} is less than limits.bytes",
    ),
    (
        f"[limits]\nbytes = 1000\nstring_bytes = 1\n[arena]\ninput_bytes = {ROOM + 1000}",
        f"[limits]\nbytes = 1000\nstring_bytes = 1\n[arena]\ninput_bytes = {ROOM + 999}",
        f"arena.input_bytes = {ROOM + 999} is less than limits.bytes",
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
    ("accepted", "refused", "words"), CONTRADICTIONS, ids=[row[2] for row in CONTRADICTIONS]
)
def test_settings_that_contradict_each_other_are_refused(
    load: Load, accepted: str, refused: str, words: str
) -> None:
    """Both sides of each relation's boundary."""
    load(f"{accepted}\n{MODEL}")

    with pytest.raises(ConfigError, match=re.escape(words)):
        load(f"{refused}\n{MODEL}")


MODEL_CONTRADICTIONS = [
    ('execution_providers = ["cuda", "cpu"]', 'execution_providers = ["cpu", "cpu"]', "twice"),
    ("inter_threads = 1", "inter_threads = 2", "models[0].inter_threads = 2 has no effect"),
    (
        "inter_threads = 2\nparallel_execution = true",
        "inter_threads = 2\nparallel_execution = false",
        "parallel_execution = true",
    ),
]


@pytest.mark.parametrize(("accepted", "refused", "words"), MODEL_CONTRADICTIONS)
def test_model_settings_that_contradict_each_other_are_refused(
    load: Load, accepted: str, refused: str, words: str
) -> None:
    load(MODEL + accepted)

    with pytest.raises(ConfigError, match=re.escape(words)):
        load(MODEL + refused)


def test_one_model_version_twice_is_refused(load: Load) -> None:
    """Version 1 is what an unnumbered path is, so the second one collides without saying so."""
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
def test_the_version_is_said_or_the_folders_number_or_one(
    load: Load, tmp_path: Path, path: str, version: str | int | None, expected: str
) -> None:
    (tmp_path / "folder" / "12").mkdir(parents=True)
    said = "" if version is None else f"version = {version}"

    model = load(f"[[models]]\nname = 'm'\npath = '{path}'\n{said}").config.models[0]

    assert model.version == expected


def test_a_models_path_is_relative_to_the_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")

    models = load(MODEL + "[[models]]\nname = 'n'\npath = '/abs/n.onnx'").config.models

    assert [model.path for model in models] == [str(tmp_path / "m.onnx"), "/abs/n.onnx"]


def test_a_link_to_a_file_is_relative_to_what_it_points_at(tmp_path: Path) -> None:
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
def test_the_nearer_word_wins_and_its_origin_is_kept(
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
def test_an_override_is_a_toml_value_or_else_text(
    load: Load, override: str, path: str, value: object
) -> None:
    """The same words as `--set` and as an environment variable."""
    name, _, text = override.partition("=")
    variable = "ISKANDER_" + name.strip().upper().replace(".", "__")

    for loaded in (load(MODEL, overrides=(override,)), load(MODEL, environment={variable: text})):
        section, key = path.split(".")
        assert getattr(getattr(loaded.config, section), key) == value


@pytest.mark.parametrize(
    ("override", "words"),
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
def test_an_override_that_means_nothing_is_refused(load: Load, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(MODEL, overrides=(override,))


def test_the_environment_is_refused_like_the_file(load: Load) -> None:
    with pytest.raises(ConfigError, match="unknown field `rowz`"):
        load(MODEL, environment={"ISKANDER_LIMITS__ROWZ": "1"})


def test_other_variables_are_not_ours(load: Load) -> None:
    """No double underscore, or another prefix: a service manager may set what it likes."""
    loaded = load(MODEL, environment={"ISKANDER_HOME": "/x", "LIMITS__ROWS": "1", "PATH": "/bin"})

    assert loaded.origins == {}


def test_the_real_environment_is_read_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(MODEL)
    monkeypatch.setenv("ISKANDER_WORKERS__COUNT", "5")

    assert load_config(tmp_path / "c.toml").config.workers.count == 5


@pytest.mark.parametrize("raw", [b"[server\n", b"a = ", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_what_is_not_toml_is_refused_by_the_files_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "broken.toml").write_bytes(raw)

    with pytest.raises(ConfigError, match=r"^broken\.toml is not TOML"):
        load_config(tmp_path / "broken.toml", environment={})


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^none\.toml cannot be read: No such file"):
        load_config(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("address", "addresses"), [('"a:1"', ("a:1",)), ('["a:1", "b:2"]', ("a:1", "b:2"))]
)
def test_addresses_are_a_tuple_however_they_were_written(
    load: Load, address: str, addresses: tuple[str, ...]
) -> None:
    assert load(f"[server]\naddress = {address}\n{MODEL}").config.addresses == addresses


def uncommented_models(reference: str) -> str:
    """The `[[models]]` part of the reference with its marks of comment taken off."""
    part = reference[reference.index("# [[models]]") :]
    lines = (line.removeprefix("# ") for line in part.splitlines())
    return "\n".join(line for line in lines if re.match(r"\[\[|\w+ = (?!\.\.\.)", line))


def test_the_reference_is_toml_and_equals_the_defaults() -> None:
    reference = render_reference()
    model = ModelConfig(name="m", path="p")

    raw = tomllib.loads(reference)
    (raw_model,) = tomllib.loads(uncommented_models(reference))["models"]

    assert msgspec.convert(raw | {"models": [{"name": "m", "path": "p"}]}, Config) == Config(
        models=(model,)
    )
    assert msgspec.convert(raw_model | {"name": "m", "path": "p"}, ModelConfig) == model


def test_the_reference_names_every_setting_once() -> None:
    reference = render_reference()
    known = [setting.path for setting in settings()]

    keys = re.findall(r"^(?:# )?(\w+) = ", reference, re.MULTILINE)

    assert keys == [path.split(".")[1] for path in known]
    assert len(set(known)) == len(known)


@pytest.mark.parametrize("setting", [pytest.param(s, id=s.path) for s in settings()])
def test_every_setting_has_a_sentence_and_a_type(setting: Any) -> None:
    assert re.fullmatch(r"[A-Z`].*\.", setting.sentence)
    assert re.fullmatch(r'[a-z0-9_ "|]+', setting.type)
    assert setting.default is not None or setting.path.startswith("models.")


def test_settings_are_those_of_the_structs() -> None:
    """Read from the declarations themselves, so that none can be left out of the reference."""
    declared = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(
            ModelConfig if section.name == "models" else section.type
        )
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
def test_settings_of_a_model_that_could_have_no_effect_are_refused(
    load: Load, text: str, rule: str
) -> None:
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
def test_which_models_have_workers_of_their_own(
    load: Load, tmp_path: Path, more: str, count: int
) -> None:
    (model,) = load(MODEL + more).config.models
    assert model.own_workers == count
    assert model.pool == (f"{model.name}/{model.version}" if count else "")
    assert model.python in ("", str(tmp_path / "bin" / "python"))
