"""Readiness, metadata, configuration and statistics of models over OIP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.lanes import CONTRACT
from support.observed import make_lane, models_of

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.errors import ModelNotFound, NotReady
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.protocols.oip.service import OipService
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.repository.models import Failure, Models
from iskander.gateway.repository.peers import Peers
from iskander.gateway.repository.routing import Routing


class NullSubmitter(RequestSubmitter):
    def __init__(self) -> None:
        self.limits = LimitsConfig()


class NullPeers(Peers):
    def __init__(self) -> None:
        pass


def response_of(models: Models, name: str, model: str, version: str = "") -> Any:
    request = getattr(oip_pb2, f"{name}Request")(name=model, version=version)
    return OipService(models, NullSubmitter(), NullPeers()).answer(name, request, FULL_GRANT)


def unloaded(*, is_pending: bool) -> Models:
    models = models_of([make_lane("m")])
    if is_pending:
        lane = make_lane("n", "2")
        lane.is_served = False
        models.by_key[1] = lane
    else:
        models.failures["n", "2"] = Failure("the file is broken", is_required=True)
    return models


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("version", ["", "2"])
def test_loading_or_failed_model_is_not_ready(version: str, *, is_pending: bool) -> None:
    models = unloaded(is_pending=is_pending)
    assert response_of(models, "ModelReady", "m").ready
    assert not response_of(models, "ModelReady", "n", version).ready
    with pytest.raises(NotReady):
        response_of(models, "ModelMetadata", "n", version)


@pytest.mark.parametrize(("model", "version"), [("nobody", ""), ("m", "2"), ("n", "3")])
def test_unknown_model_is_not_found(model: str, version: str) -> None:
    with pytest.raises(ModelNotFound):
        response_of(unloaded(is_pending=True), "ModelReady", model, version)


def test_statistics_resolve_aliases() -> None:
    models = models_of([make_lane("m", "1"), make_lane("m", "2"), make_lane("n")])
    models.route("m", Routing(aliases={"stable": "1"}))

    def versions(*names: str) -> list[tuple[str, str]]:
        stats = response_of(models, "ModelStatistics", *names).model_stats
        return [(each.name, each.version) for each in stats]

    assert versions("m", "stable") == versions("m", "1") == [("m", "1")]
    assert versions("m") == [("m", "1"), ("m", "2")]
    assert versions("") == [("m", "1"), ("m", "2"), ("n", "1")]
    with pytest.raises(ModelNotFound):
        versions("m", "canary")


@pytest.mark.parametrize(
    ("backend", "platform", "reported", "file"),
    [
        ("onnx", "onnxruntime_onnx", "onnxruntime", "model.onnx"),
        ("python", "", "python", "model.py"),
        ("torch", "pytorch_libtorch", "pytorch", "model.pt2"),
        ("pipeline", "ensemble", "", ""),
        ("of_our_own", "", "of_our_own", ""),
    ],
)
def test_metadata_and_config_name_the_backend(
    backend: str, platform: str, reported: str, file: str
) -> None:
    lane = make_lane("m")
    lane.model = msgspec.structs.replace(lane.model, backend=backend)
    lane.set_contract(CONTRACT)
    models = models_of([lane])

    assert response_of(models, "ModelMetadata", "m").platform == platform
    config = response_of(models, "ModelConfig", "m").config
    assert (config.platform, config.backend, config.default_model_filename) == (
        platform, reported, file,
    )  # fmt: skip
