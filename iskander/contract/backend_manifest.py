"""Manifest tables of backends: `[python]`, `[torch]`, `[remote]`, `[graph]`, `[[steps]]`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

STEPS_MAX = 32
ADDRESSES_MAX = 32
HEADERS_MAX = 32

Address = Annotated[str, Meta(pattern=r"^(unix:.+|(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):\d{1,5})\Z")]
# gRPC sends names with `-bin` as binary values, and reserves names with `grpc-`.
HeaderName = Annotated[str, Meta(pattern=r"^(?!grpc-|iskander-)[0-9a-z_.-]{1,64}(?<!-bin)\Z")]
HeaderValue = Annotated[str, Meta(pattern=r"^[\x20-\x7e]{0,1024}\Z")]
CallSeconds = Annotated[float, Meta(gt=0, le=86_400)]
ConnectSeconds = Annotated[float, Meta(ge=0.1, le=60)]
MessageBytes = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PythonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[python]` of a manifest.

    Attributes:
        file: Python file, or the folder of a package, in the model's folder.
        class_name: Class to instantiate; `class` in the manifest.
        settings: Settings that only the class reads.
    """

    file: str = "model.py"
    class_name: str = msgspec.field(default="Model", name="class")
    settings: dict[str, Any] = {}


class TorchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[torch]` of a manifest.

    Attributes:
        file: Program of `torch.export` (`.pt2`), or TorchScript, in the model's folder.
        weights: Safetensors file whose tensors replace those of the program.
        outputs: Names of the results, in order; by default the names of the manifest's tensors.
    """

    file: str = "model.pt2"
    weights: str = ""
    outputs: tuple[str, ...] = ()


class RemoteTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[remote.tls]` of a manifest; files are read at load, relative to the model's folder.

    Attributes:
        ca: Certificates of the accepted authorities; empty: the authorities that gRPC accepts.
        certificate: Certificate of this client, if the remote requires one.
        key: Private key of `certificate`.
        server_name: Name in the remote's certificate, if it is not the name in the address.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""


class RemoteSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[remote]` of a manifest.

    Attributes:
        addresses: `HOST:PORT` or `unix:PATH` of servers of the Open Inference Protocol with the
            same model. Calls take turns; a call that a server cannot take goes to the next server.
        model: Name of the model on the remote server.
        version: Version of the model on the remote server; empty: the remote's default.
        metadata: Headers of each call, such as `application` for Ray Serve.
        tls: `[remote.tls]`; without it, connections are plaintext.
        token_file: File with a bearer token, read again when it changes; relative to the model's
            folder.
        timeout_s: Seconds for a call; a batch whose callers have less time gets less.
        connect_s: Seconds for a connection; a call of a load or a readiness check has twice as
            long.
        message_bytes: Maximum bytes of a request or a response.
        is_metadata_checked: Compare the tensors with the remote's ModelMetadata at load.
    """

    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=ADDRESSES_MAX)]
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    version: str = ""
    metadata: Annotated[dict[HeaderName, HeaderValue], Meta(max_length=HEADERS_MAX)] = {}
    tls: RemoteTls | None = None
    token_file: str = ""
    timeout_s: CallSeconds = 30.0
    connect_s: ConnectSeconds = 5.0
    message_bytes: MessageBytes = 72 << 20
    is_metadata_checked: bool = True


class GraphSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[graph]` of a manifest: tensors of a model whose files declare none, by name.

    A tensor that is a column without conversion needs no entry. Types are spelled as for columns.

    Attributes:
        inputs: Types of the inputs.
        outputs: Types of the outputs.
    """

    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


class PipelineStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[steps]]` of a manifest.

    Attributes:
        name: Name in errors and metrics.
        model: Model file or folder, in the pipeline's folder.
        backend: Backend that runs the model.
        inputs: Names of the model's input tensors, mapped to tensor names of the pipeline, where
            the names differ.
        outputs: The same mapping for the outputs.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    model: str
    backend: str = "onnx"
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


Steps = Annotated[tuple[PipelineStep, ...], msgspec.Meta(max_length=STEPS_MAX)]
