"""Questions about models, whatever state they are in and whatever runs them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.lanes import CONTRACT
from support.observed import make_lane, models_of

from iskander._generated import oip_pb2
from iskander.auth.grants import FULL_GRANT
from iskander.config.schema import LimitsConfig
from iskander.errors import ModelNotFound, NotReady
from iskander.protocols.oip.service import OipService
from iskander.protocols.submit import RequestSubmitter
from iskander.repository.models import Failure, Models
from iskander.repository.peers import Peers
from iskander.repository.routing import Routing


class NoDesk(RequestSubmitter):
    def __init__(self) -> None:
        self.limits = LimitsConfig()


class NoSiblings(Peers):
    def __init__(self) -> None:
        pass


def asked(models: Models, name: str, model: str, version: str = "") -> Any:
    request = getattr(oip_pb2, f"{name}Request")(name=model, version=version)
    return OipService(models, NoDesk(), NoSiblings()).answer(name, request, FULL_GRANT)


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
def test_a_model_that_is_loading_or_does_not_load_is_not_ready(
    version: str, *, is_pending: bool
) -> None:
    models = unloaded(is_pending=is_pending)
    assert asked(models, "ModelReady", "m").ready
    assert not asked(models, "ModelReady", "n", version).ready
    with pytest.raises(NotReady):
        asked(models, "ModelMetadata", "n", version)


@pytest.mark.parametrize(("model", "version"), [("nobody", ""), ("m", "2"), ("n", "3")])
def test_an_unknown_model_is_not_found(model: str, version: str) -> None:
    with pytest.raises(ModelNotFound):
        asked(unloaded(is_pending=True), "ModelReady", model, version)


def test_statistics_are_of_the_version_that_an_alias_means() -> None:
    models = models_of([make_lane("m", "1"), make_lane("m", "2"), make_lane("n")])
    models.route("m", Routing(aliases={"stable": "1"}))

    def versions(*of: str) -> list[tuple[str, str]]:
        stats = asked(models, "ModelStatistics", *of).model_stats
        return [(each.name, each.version) for each in stats]

    assert versions("m", "stable") == versions("m", "1") == [("m", "1")]
    assert versions("m") == [("m", "1"), ("m", "2")]
    assert versions("") == [("m", "1"), ("m", "2"), ("n", "1")]
    with pytest.raises(ModelNotFound):
        versions("m", "canary")


@pytest.mark.parametrize(
    ("backend", "platform", "named", "file"),
    [
        ("onnx", "onnxruntime_onnx", "onnxruntime", "model.onnx"),
        ("python", "", "python", "model.py"),
        ("torch", "pytorch_libtorch", "pytorch", "model.pt2"),
        ("pipeline", "ensemble", "", ""),
        ("of_our_own", "", "of_our_own", ""),
    ],
)
def test_a_model_says_what_runs_it(backend: str, platform: str, named: str, file: str) -> None:
    lane = make_lane("m")
    lane.model = msgspec.structs.replace(lane.model, backend=backend)
    lane.set_contract(CONTRACT)
    models = models_of([lane])

    assert asked(models, "ModelMetadata", "m").platform == platform
    config = asked(models, "ModelConfig", "m").config
    assert (config.platform, config.backend, config.default_model_filename) == (
        platform, named, file,
    )  # fmt: skip
