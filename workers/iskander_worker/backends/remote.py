"""Backend `remote`: a model on another server, over the Open Inference Protocol.

The server is another Iskander, Triton, a server of KServe, or an application of Ray Serve. The
queue, deadlines and rejections of this gateway are in front of it, and a batch is one call. The
manifest declares the tensors, and the server's metadata, if it has any, confirms them.

Runs on: worker main, of a model with workers of its own.

Source: Open Inference Protocol v2 over gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from iskander._generated import oip_pb2
from iskander.contract.backend_manifest import RemoteSection
from iskander.contract.compile import compile_contract, declared_graph, derive_manifest
from iskander.contract.graph import Graph
from iskander.contract.labels import read_labels
from iskander.contract.manifest import Manifest
from iskander.errors import (
    IskanderError,
    ManifestError,
    RemoteFailed,
    RemoteNotReady,
    RemoteTimeout,
)
from iskander.interprocess.control.identity import ORIGIN
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker import backends
from iskander_worker.backends import Arrays, Run, require_manifest
from iskander_worker.remote.messages import decode_response, encode_request, graph_of, parse
from iskander_worker.remote.server import INFER, RemoteServers
from iskander_worker.remote.statuses import answer_error

HOPS: Final = "iskander-hops"
"""Header with the number of gateways that a call has passed."""
CHECK_TIMEOUT_FACTOR: Final = 2
"""Timeout of a check in multiples of `connect_s`, so that an attempt to connect ends before it."""


def load(spec: ModelSpec, cores: int) -> RemoteModel:
    """Connect to the server and compare its tensors; raise an `IskanderError` on failure."""
    manifest = require_manifest(spec)
    if manifest.remote is None:
        raise ManifestError("manifest.toml has no table [remote]")
    servers = RemoteServers(manifest.remote, Path(spec.path).parent)
    try:
        return RemoteModel(spec, manifest, manifest.remote, servers)
    except IskanderError:
        servers.close()
        raise


def derive_remote_manifest(address: str, model: str, version: str) -> Manifest:
    """Derive a manifest from a server's metadata, or raise an `IskanderError`."""
    section = RemoteSection((address,), model, version)
    servers = RemoteServers(section, Path())
    try:
        graph, _ = _graph_of_server(servers, section, Graph((), ()))
    finally:
        servers.close()
    return msgspec.structs.replace(derive_manifest(graph), remote=section)


class RemoteModel:
    """A model whose server has answered. Owns: the connections."""

    threads = 1

    def __init__(
        self, spec: ModelSpec, manifest: Manifest, section: RemoteSection, servers: RemoteServers
    ) -> None:
        self._section = section
        self._servers = servers
        self.notices: tuple[str, ...] = ()
        self.providers = tuple(f"remote {address}" for address in section.addresses)
        self.graph = declared_graph(manifest)
        self._require_ready(Run())
        if section.is_metadata_checked:
            self.graph = self._compared_graph(spec, manifest)

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute one batch by one call; an abort cancels it."""
        section, graph = self._section, self.graph
        rows = len(next(iter(arrays.values())))
        request = encode_request(section.model, section.version, graph.inputs, arrays, outputs)
        headers = ((HOPS, str(run.hops + 1)),)
        timeout_s = section.timeout_s
        raw, target = self._servers.call(INFER, request, run, headers=headers, timeout_s=timeout_s)
        try:
            return decode_response(raw, outputs, graph, rows)
        except ValueError as error:
            raise answer_error(str(error), target) from None

    def probe(self, run: Run) -> str:
        """Return why the server is not ready.

        Empty if it is ready, or if calls report the reason.
        """
        try:
            self._require_ready(run)
        except IskanderError as error:
            if error.retryable or isinstance(error, RemoteTimeout):
                return error.message
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._servers.close()

    def _require_ready(self, run: Run) -> None:
        """Raise an error unless the server is ready, or lacks the check, as in Ray Serve."""
        section, kind = self._section, oip_pb2.ModelReadyRequest
        request = kind(name=section.model, version=section.version).SerializeToString()
        try:
            raw, target = _call_with_origin(self._servers, section, "ModelReady", request, run)
        except RemoteFailed:
            return
        try:
            is_ready = parse(oip_pb2.ModelReadyResponse, raw).ready
        except ValueError as error:
            raise answer_error(str(error), target) from None
        if not is_ready:
            raise RemoteNotReady(f"{target} is not ready")

    def _compared_graph(self, spec: ModelSpec, manifest: Manifest) -> Graph:
        """Return the graph of the server's metadata, or of the manifest if the server has none.

        Raises a `ManifestError` if the manifest makes no contract with the graph.
        """
        try:
            graph, target = _graph_of_server(self._servers, self._section, self.graph)
        except RemoteFailed as error:
            self.notices = (f"its tensors are not compared: {error.message}",)
            return self.graph
        try:
            labels = read_labels(Path(spec.path), manifest)
            compile_contract(manifest, graph, spec.string_bytes, labels)
        except ManifestError as error:
            problem = f"the manifest does not match {target}: {error.message}"
            raise ManifestError(problem) from None
        return graph


def _graph_of_server(
    servers: RemoteServers, section: RemoteSection, declared: Graph
) -> tuple[Graph, str]:
    """Return the tensors of the server's metadata, and the name of the server in errors."""
    kind = oip_pb2.ModelMetadataRequest
    request = kind(name=section.model, version=section.version).SerializeToString()
    raw, target = _call_with_origin(servers, section, "ModelMetadata", request, Run())
    try:
        return graph_of(parse(oip_pb2.ModelMetadataResponse, raw), declared), target
    except ValueError as error:
        raise answer_error(str(error), target) from None


def _call_with_origin(
    servers: RemoteServers, section: RemoteSection, method: str, request: bytes, run: Run
) -> tuple[bytes, str]:
    headers = ((ORIGIN, backends.gateway_id),)
    timeout_s = CHECK_TIMEOUT_FACTOR * section.connect_s
    return servers.call(method, request, run, headers=headers, timeout_s=timeout_s)
