"""Models, sources and TLS certificate of the attacked server.

movielens-two-tower   of the innocent client
ids                   `y = x`, with all other columns passed through
decimals              a decimal and a timestamp, converted
vectors               64 floats of a row, cast
lists                 64 floats of a row, from lists
words                 text
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from onnx import TensorProto, helper

from benchmarks.workloads import TWO_TOWER

FEW_ROWS, MANY_ROWS = 1000, 4_000_000
"""Rows of the sources `few` and `many`."""
_VALUE = helper.make_tensor_value_info
_FLOAT, _INT64 = TensorProto.FLOAT, TensorProto.INT64
_DOUBLE, _STRING = TensorProto.DOUBLE, TensorProto.STRING


class _Model(NamedTuple):
    """A graph and its manifest."""

    inputs: list[dict[str, Any]]
    output: str
    nodes: list[Any]
    given: list[Any]
    result: Any
    constants: tuple[Any, ...] = ()
    passthrough: str = "none"


def _input(name: str, kind: str, **more: str | bool | int) -> dict[str, Any]:
    return {"tensor": name, "column": name, "type": kind} | more


def _identity(kind: str, element: int, passthrough: str, **more: str) -> _Model:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    given, result = _VALUE("x", element, ["r"]), _VALUE("y", element, ["r"])
    return _Model([_input("x", kind, **more)], kind, nodes, [given], result, (), passthrough)


def _sum(kind: str, **more: bool | int) -> _Model:
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    given, result = _VALUE("x", _FLOAT, ["r", 64]), _VALUE("y", _FLOAT, ["r"])
    axes = helper.make_tensor("axes", _INT64, [1], [1])
    return _Model([_input("x", kind, **more)], "float32", nodes, [given], result, (axes,))


_MODELS = {
    "ids": _identity("int64", _INT64, "all"),
    "decimals": _Model(
        [
            _input("t", "timestamp", unit="h", nulls="nan"),
            _input("p", "decimal", **{"as": "number", "nulls": "nan"}),
        ],
        "float64",
        [helper.make_node("Add", ["t", "p"], ["y"])],
        [_VALUE("t", _DOUBLE, ["r"]), _VALUE("p", _DOUBLE, ["r"])],
        _VALUE("y", _DOUBLE, ["r"]),
    ),
    "vectors": _sum("fixed_size_list<float32>[64]", cast=True),
    "lists": _sum("list<float32>", max_length=64),
    "words": _identity("utf8", _STRING, "none", nulls="fill", fill=""),
}


def models(folder: Path) -> list[dict[str, Any]]:
    """Write the models, and return their entries `[[models]]`."""
    entries = [{"name": TWO_TOWER.model, "path": str(TWO_TOWER.folder), "intra_threads": 1}]
    for name, made in _MODELS.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        graph = helper.make_graph(made.nodes, "g", made.given, [made.result], made.constants)
        opset = helper.make_opsetid("", 17)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        onnx.save(model, target / "model.onnx")
        text = f'format = 1\npassthrough = "{made.passthrough}"\n'
        text += "".join(f"[[inputs]]\n{toml(each)}" for each in made.inputs)
        text += f"[[outputs]]\n{toml({'tensor': 'y', 'column': 'y', 'type': made.output})}"
        (target / "manifest.toml").write_text(text)
        entries.append({"name": name, "path": str(target), "max_batch_rows": 1024})
    return entries


def sources(folder: Path) -> list[dict[str, Any]]:
    """Write the files of the sources, and return their entries `[[sources]]`."""
    entries = []
    for name, rows in (("few", FEW_ROWS), ("many", MANY_ROWS)):
        file = folder / f"{name}.parquet"
        if not file.exists():
            ids = pa.array(np.arange(rows) % 600 + 1)
            pq.write_table(pa.table({"user_id": ids, "item_id": ids}), file)
        entries.append({"name": name, "path": str(file), "model": TWO_TOWER.model})
    return entries


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate with an RSA key of 2,048 bits; returns its file and that of the key."""
    files = folder / "certificate.pem", folder / "key.pem"
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    loopback = ipaddress.ip_address("127.0.0.1")
    names = [x509.DNSName("localhost"), x509.IPAddress(loopback)]
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    files[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    files[1].write_bytes(encoded)
    return files


def toml(value: Any) -> str:  # noqa: ANN401
    """A value, a table, or a list of values in TOML."""
    if isinstance(value, dict):
        return "\n".join(f"{key} = {toml(each)}" for key, each in value.items()) + "\n"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def write_config(folder: Path) -> Path:
    """Write the configuration of the server, without addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    text = '[admin]\naddress = ""\nlog_level = "warning"\n\n'
    text += "".join(f"[[models]]\n{toml(each)}\n" for each in models(folder / "models"))
    text += "".join(f"[[sources]]\n{toml(each)}\n" for each in sources(folder))
    path = folder / "iskander.toml"
    path.write_text(text)
    return path
