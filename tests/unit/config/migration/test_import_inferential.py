"""Import of configurations of the Inferential server, with its own declarations."""

from __future__ import annotations

import builtins
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from inferential.config import InferentialConfig

from iskander.config.loader import load_config
from iskander.config.migration.import_inferential import (
    BATCH_DEFAULTS,
    DEFAULTS,
    DROPPED,
    FILE_BYTES_MAX,
    OVERFLOW,
    SAME,
    UNNAMED,
    UNREACHABLE,
    WAIT_MS_MAX,
    import_inferential,
    read_inferential,
    render_import,
)
from iskander.config.models import LaneConfig
from iskander.errors import ConfigError
from iskander.gateway.transport.addresses import zmq_address

ROBOTS = """
transport:
  bind: tcp://127.0.0.1:6000
  recv_hwm: 50
scheduling:
  strategy: batch_optimized
  max_queue_size: 20
  request_ttl_ms: 250
  overflow_policy: reject_newest
  batch_optimized: {max_batch_size: 16, max_wait_ms: 2.5}
models:
  known:
    manipulation-policy: {max_inflight: 3}
observations:
  max_staleness_ms: 90
"""


def is_address(bind: str) -> bool:
    return zmq_address(bind) is not None


def import_text(tmp_path: Path, text: str, name: str = "robots.yaml") -> Any:
    file = tmp_path / name
    file.write_text(text)
    return import_inferential(read_inferential(file), is_address)


def rejection(tmp_path: Path, text: str, name: str = "robots.yaml") -> str:
    with pytest.raises(ConfigError) as error:
        import_text(tmp_path, text, name)
    assert error.value.message.isprintable()
    return error.value.message


def test_supported_settings_are_imported(tmp_path: Path) -> None:
    """The rendered result loads as a configuration of this server."""
    result = import_text(tmp_path, ROBOTS)
    (tmp_path / "iskander.toml").write_text(render_import(result))
    config = load_config(tmp_path / "iskander.toml", environment={}).config
    (model,) = config.models
    assert config.inferential.address == "tcp://127.0.0.1:6000"
    assert model.name == "manipulation-policy"
    lane = model.lane
    assert (lane.policy, lane.queue_requests, lane.ttl_ms) == ("batch_optimized", 20, 250)
    assert (lane.overflow, lane.linger_us, lane.staleness_ms) == ("reject", 2500, 0)
    assert (lane.preferred_batch_rows, lane.patience_ms) == ((16,), 50)
    assert [path for path, _ in result.dropped] == [
        "transport.recv_hwm",
        "models.known.manipulation-policy.max_inflight",
        "observations.max_staleness_ms",
    ]


def test_json_is_imported_like_yaml(tmp_path: Path) -> None:
    text = json.dumps(yaml.safe_load(ROBOTS))
    assert import_text(tmp_path, text, "robots.json") == import_text(tmp_path, ROBOTS)


def test_omitted_settings_have_the_inferential_defaults(tmp_path: Path) -> None:
    inferential_defaults = InferentialConfig()
    lanes = import_text(tmp_path, "{}").sections["lanes"]
    assert lanes["policy"] == inferential_defaults.scheduling.strategy
    assert lanes["queue_requests"] == inferential_defaults.scheduling.max_queue_size
    assert lanes["ttl_ms"] == inferential_defaults.scheduling.request_ttl_ms
    assert lanes["overflow"] == inferential_defaults.scheduling.overflow_policy
    assert lanes["patience_ms"] == inferential_defaults.clients.defaults.latency_budget_ms
    address = import_text(tmp_path, "{}").sections["inferential"]["address"]
    assert address == inferential_defaults.transport.bind


@pytest.mark.parametrize(
    ("given", "rows", "linger_us"),
    [
        ("{strategy: batch_optimized}", [8], 10_000),
        ("{strategy: batch_optimized, batch_optimized: {max_batch_size: 16}}", [16], 10_000),
        ("{strategy: batch_optimized, batch_optimized: {max_wait_ms: 2.5}}", [8], 2500),
        ("{strategy: round_robin}", None, None),
    ],
)
def test_batch_strategy_has_the_inferential_defaults(
    tmp_path: Path, given: str, rows: list[int] | None, linger_us: int | None
) -> None:
    lanes = import_text(tmp_path, f"scheduling: {given}").sections["lanes"]
    assert (lanes.get("preferred_batch_rows"), lanes.get("linger_us")) == (rows, linger_us)
    inferential_defaults = InferentialConfig().scheduling.batch_optimized.model_dump()
    assert inferential_defaults == {
        path.rpartition(".")[2]: value for path, value in BATCH_DEFAULTS.items()
    }


def test_every_inferential_setting_is_imported_or_has_a_reason(tmp_path: Path) -> None:
    all_settings = InferentialConfig().model_dump()
    all_settings["ray"] = {"address": "auto"}
    all_settings["clients"]["known"] = [{"id": "7", "model": "policy", "latency_budget_ms": 20}]
    all_settings["models"]["known"] = {"policy": {"max_inflight": 4}}
    result = import_inferential(all_settings, is_address)
    assert result.dropped
    assert {reason for _, reason in result.dropped} <= {*DROPPED.values()}
    text = render_import(result)
    assert all(f"#   {path}: {reason}" in text for path, reason in result.dropped)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("scheduling: {request_ttl_ms: soon}", 'scheduling.request_ttl_ms = "soon"'),
        ("scheduling: {max_queue_size: 0}", "scheduling.max_queue_size = 0"),
        ("- 1", "expected a table"),
        ("a: [", "is not YAML"),
    ],
)
def test_error_names_the_wrong_setting(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in rejection(tmp_path, text)


BATCHED = "scheduling: {strategy: batch_optimized, batch_optimized: {%s}}"
BILLION = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))
MERGED = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10))
BATCHED_JSON = """
{"scheduling": {"strategy": "batch_optimized", "batch_optimized": {"max_wait_ms": %s}}}
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("scheduling: {overflow_policy: [drop_oldest]}", "scheduling.overflow_policy: unknown"),
        ("scheduling: {overflow_policy: {drop_oldest: }}", "scheduling.overflow_policy: unknown"),
        (
            "scheduling: {overflow_policy: drop_newest}",
            'scheduling.overflow_policy = "drop_newest": unknown, '
            "expected one of drop_oldest, reject_newest",
        ),
        ("scheduling: {overflow_policy: 5}", "scheduling.overflow_policy = 5: unknown"),
        ("scheduling: {overflow_policy: }", "scheduling.overflow_policy: unknown"),
        ("scheduling: {strategy: [mine]}", "scheduling.strategy: Expected `str`"),
        ("models: {known: 5}", "models.known = 5: expected a table"),
        ("models: {known: policy}", 'models.known = "policy": expected a table'),
        ("models: {known: [policy]}", "models.known: expected a table"),
        ("models: 5", "models = 5: expected a table"),
        ("metrics: off", "metrics = false: expected a table"),
        ("clients: {defaults: []}", "clients.defaults: expected a table"),
        ("models: {known: {7: {}}}", "models.known: expected text as a key, got int"),
        ("2020-01-01: 5", "the file: expected text as a key, got date"),
        (f"{'a' * 300}: 5", "the file: a key has more than 256 letters"),
        (BATCHED % "max_wait_ms: .nan", "max_wait_ms = NaN: expected a number"),
        (BATCHED % "max_wait_ms: .inf", "max_wait_ms = Infinity: expected a number"),
        (BATCHED % "max_wait_ms: 10001", "max_wait_ms = 10001: expected a number from 0 to 10000"),
        (BATCHED % "max_wait_ms: 0x%s" % ("f" * 9000), "max_wait_ms: expected a number"),
        (BATCHED % "max_batch_size: 1.5", "scheduling.batch_optimized.max_batch_size = 1.5: Exp"),
        ("scheduling: {max_queue_size: 0x%s}" % ("f" * 9000), "max_queue_size: expected at most"),
        ("scheduling: {max_queue_size: []}", "scheduling.max_queue_size: Expected `int`"),
        ("scheduling: {request_ttl_ms: {a: 5}}", "scheduling.request_ttl_ms: Expected `float`"),
        ("scheduling: {request_ttl_ms: .nan}", "scheduling.request_ttl_ms = NaN: Expected"),
        (r'transport: {bind: "a\nb"}', r'transport.bind = "a\nb": expected one line'),
        (f'transport: {{bind: "{"b" * 9000}\\n"}}', "...: expected one line of printable text"),
        ("a: 2020-99-99", "line 1, column 4"),
        ("a: 2020-99-99", "'2020-99-99' is not of the type timestamp"),
        ("a: !!int x", "'x' is not of the type int"),
        ("a: !!bool x", "'x' is not of the type bool"),
        ("a: !!timestamp x", "'x' is not of the type timestamp"),
        ("a: " + "[" * 100_000, "robots.yaml is nested too deep"),
        ("{a: " * 100_000, "robots.yaml is nested too deep"),
        ('"\u202e": 2020-99-99', "is not of the type timestamp"),
        ("{a: " * 12 + "}" * 12, "a.a.a.a.a.a.a.a.a.a.a: nested deeper than 10 tables"),
        ("a: &a {b: *a}", "robots.yaml has more than 100000 values"),
        ("scheduling: {max_queue_size: &a [*a]}", "robots.yaml has more than 100000 values"),
        (f"a0: &a0 [x]\n{BILLION}", "robots.yaml has more than 100000 values"),
        (f"a0: &a0 {{x: y}}\n{MERGED}", "robots.yaml has more than 100000 values"),
        ("#" * (FILE_BYTES_MAX + 1), "robots.yaml has more than 1048576 bytes"),
    ],
    ids=lambda text: text[:40],
)
def test_invalid_yaml_file_gives_a_one_line_error(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in rejection(tmp_path, text)


@pytest.mark.parametrize(
    "text, expected",
    [
        (BATCHED_JSON % "NaN", "scheduling.batch_optimized.max_wait_ms = NaN: expected a number"),
        (BATCHED_JSON % "Infinity", "max_wait_ms = Infinity: expected a number"),
        (BATCHED_JSON % "-1e999", "max_wait_ms = -Infinity: expected a number"),
        (BATCHED_JSON % ("9" * 400), "scheduling.batch_optimized.max_wait_ms: expected a number"),
        (BATCHED_JSON % ("9" * 5000), "robots.json is not JSON"),
        (r'{"transport": {"bind": "\ud800"}}', r'transport.bind = "\ud800": expected one line'),
        ('{"a": ' * 100_000, "robots.json is nested too deep"),
        ("[" * 100_000, "robots.json is nested too deep"),
        ('{"a": ' * 500 + "1" + "}" * 500, "nested deeper than 10 tables"),
    ],
    ids=lambda text: text[:40],
)
def test_invalid_json_file_gives_a_one_line_error(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in rejection(tmp_path, text, "robots.json")


@pytest.mark.parametrize(
    "name, shown",
    [
        ("lerobot/pi0", "models.known.lerobot/pi0"),
        ("a b", "models.known.a b"),
        ("a\nb", r'"models.known.a\nb"'),
        ("\ud800", r'"models.known.\ud800"'),
        ("", "models.known."),
    ],
)
def test_model_with_an_invalid_name_is_reported_and_others_are_imported(
    tmp_path: Path, name: str, shown: str
) -> None:
    text = json.dumps({"models": {"known": {name: {}, "arm": {}}}})
    result = import_text(tmp_path, text, "robots.json")
    assert result.models == ["arm"]
    assert f"#   {shown}: {UNNAMED}\n" in render_import(result)


@pytest.mark.parametrize(
    "bind",
    [
        "inproc://x",
        "tcp://*:*",
        "*:5555",
        "tcp://",
        "udp://a:1",
        "tcp://a b:1",
        "tcp://::1:5",
        "tcp://*:99999",
    ],
)
def test_unsupported_address_is_reported(tmp_path: Path, bind: str) -> None:
    result = import_text(tmp_path, json.dumps({"transport": {"bind": bind}}), "robots.json")
    assert "address" not in result.sections["inferential"]
    assert ("transport.bind", UNREACHABLE) in result.dropped


@pytest.mark.parametrize(
    "bind", ["tcp://*:1", "tcp://10.0.0.1:65535", "ipc:///a/b", "tcp://[::1]:5"]
)
def test_supported_address_is_imported(tmp_path: Path, bind: str) -> None:
    result = import_text(tmp_path, json.dumps({"transport": {"bind": bind}}), "robots.json")
    assert result.sections["inferential"] == {"address": bind}


def test_recursive_table_is_rejected() -> None:
    table: dict[str, Any] = {}
    table["b"] = table
    with pytest.raises(ConfigError, match=r"^b\.b.*: nested deeper than 10 tables$"):
        import_inferential(table, is_address)


@pytest.mark.parametrize("line_break", ["\n", "\r", "\r\n", "\0", "\x7f", "\u2028", "\ud800"])
def test_line_breaks_in_keys_stay_in_the_comment(line_break: str) -> None:
    """A line break in a key would inject settings into the rendered file."""
    text = render_import(
        import_inferential({f"robots{line_break}[server]{line_break}address = '*'": 7}, is_address)
    )
    assert set(tomllib.loads(text)) == {"inferential", "lanes"}
    (comment,) = (line for line in text.splitlines() if "robots" in line)
    assert comment.startswith('#   "robots\\')
    assert comment.endswith(": there is no such setting")


def test_aliases_and_empty_tables_are_accepted(tmp_path: Path) -> None:
    text = "x: &x {max_inflight: 3}\nmodels: {known: {a: *x, b: {<<: *x}}}\nscheduling:\n"
    result = import_text(tmp_path, text)
    assert result.models == ["a", "b"]
    assert dict(result.dropped) == {
        "x.max_inflight": "there is no such setting",
        "models.known.a.max_inflight": "a worker has at most two batches in flight",
        "models.known.b.max_inflight": "a worker has at most two batches in flight",
    }


def test_longest_wait_equals_the_limit_of_a_lane() -> None:
    batches = {"max_wait_ms": WAIT_MS_MAX}
    raw = {"scheduling": {"strategy": "batch_optimized", "batch_optimized": batches}}
    linger_us = import_inferential(raw, is_address).sections["lanes"]["linger_us"]
    assert msgspec.convert({"linger_us": linger_us}, LaneConfig).linger_us == linger_us
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"linger_us": linger_us + 1}, LaneConfig)


TEXTS = st.text('a.\n\x7f\ud800\u00fc"', max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.dates()
    | st.binary()
    | st.sampled_from([*OVERFLOW, *DEFAULTS.values(), 2**63, 10**400]),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*SAME, *DROPPED, "models", "known", "\n"]), VALUES))
def test_any_values_give_toml_or_a_one_line_error(settings_by_path: dict[str, Any]) -> None:
    """Inferential settings with random values."""
    raw: dict[str, Any] = {}
    for path, value in settings_by_path.items():
        *tables, key = path.split(".")
        table = raw
        for name in tables:
            inner = table.get(name)
            table[name] = table = inner if isinstance(inner, dict) else {}
        table[key] = value
    try:
        result = import_inferential(raw, is_address)
    except ConfigError as error:
        assert error.message.isprintable()
    else:
        tomllib.loads(render_import(result))


def test_unknown_settings_are_reported(tmp_path: Path) -> None:
    result = import_text(tmp_path, "scheduling: {strategy: mine}\nrobots: 7")
    assert dict(result.dropped) == {
        "scheduling.strategy": "unknown policy; iskander.embed accepts a scoring function",
        "robots": "there is no such setting",
    }


def test_yaml_without_its_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"iskander\[inferential\]"):
        import_text(tmp_path, ROBOTS)
    assert import_text(tmp_path, "{}", "robots.json")
