"""Readiness and `grpc.health.v1` say the same, from the first look at the repository on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.observed import make_lane, models_of

from iskander._generated import health_pb2
from iskander.auth.grants import FULL_GRANT
from iskander.config.schema import Config, RepositoryConfig
from iskander.errors import ModelNotFound
from iskander.measurement.recent_values import RecentValues
from iskander.protocols.health import HealthService
from iskander.repository.models import Failure, Models, configured
from iskander.repository.routing import Routing

Status = health_pb2.HealthCheckResponse.ServingStatus


def checked(models: Models, name: str = "", *, is_stopped: bool = False) -> str:
    async def check() -> bytes:
        service = HealthService(models, watchers_max=1)
        if is_stopped:
            service.stop()
        raw = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        return await service.check(raw, FULL_GRANT)

    answer = health_pb2.HealthCheckResponse.FromString(asyncio.run(check()))
    return Status.Name(answer.status)


def test_with_nothing_to_serve_the_server_is_well() -> None:
    """A repository that is managed by calls may begin empty."""
    models = Models()
    assert models.is_ready and checked(models) == "SERVING"
    assert checked(models, is_stopped=True) == "NOT_SERVING"
    models.is_stopping = True
    assert checked(models) == "NOT_SERVING"


def test_a_repository_of_which_nothing_is_known_yet_is_not_ready(tmp_path: Path) -> None:
    """From before the port listens, which is before the folder is read."""
    config = Config(repository=RepositoryConfig(path=str(tmp_path)))
    models = configured(config, RecentValues())
    for is_looking, pending, is_ready in ((True, 0, False), (False, 2, False), (False, 0, True)):
        models.is_scanning, models.pending = is_looking, pending
        assert models.is_ready == models.is_settled == is_ready
        assert checked(models) == ("SERVING" if is_ready else "NOT_SERVING")
        assert models.reasons() == (
            [] if is_ready else ["the repository's models are being loaded"]
        )


def test_a_model_whose_workers_are_not_even_planned_is_not_ready() -> None:
    """As when the port listens already and the supervisor has not begun."""
    models = models_of([make_lane("m", is_ready=False)])
    assert models.reasons() == ["model `m/1`: its workers have not come yet"]
    assert not models.is_settled and checked(models) == "NOT_SERVING"


def test_without_a_repository_there_is_nothing_to_look_at() -> None:
    assert configured(Config(), RecentValues()).is_ready


def test_what_is_being_loaded_is_told_by_name_where_it_has_one() -> None:
    models = Models()
    models.pending = 1
    models.failures["a", "1"] = Failure("the file is broken", is_required=True)
    assert models.reasons() == ["model `a/1`: the file is broken"]


@pytest.mark.parametrize("name", ["m", "m/1"])
def test_a_model_is_serving_when_it_is_ready(name: str) -> None:
    assert checked(models_of([make_lane("m")]), name) == "SERVING"
    assert checked(models_of([make_lane("m", is_ready=False)]), name) == "NOT_SERVING"
    assert checked(models_of([make_lane("m")]), name, is_stopped=True) == "NOT_SERVING"


def test_an_alias_is_its_version() -> None:
    models = models_of([make_lane("m", "1", is_ready=False), make_lane("m", "2")])
    models.route("m", Routing(aliases={"stable": "2"}))
    assert checked(models, "m/stable") == "SERVING"
    assert checked(models, "m") == "NOT_SERVING"


@pytest.mark.parametrize("name", ["m", "m/2"])
@pytest.mark.parametrize("is_pending", [False, True])
def test_a_model_that_is_loading_or_does_not_load_is_not_serving(
    name: str, *, is_pending: bool
) -> None:
    models = Models()
    if is_pending:
        lane = make_lane("m", "2")
        lane.is_served = False
        models.by_key[0] = lane
    else:
        models.failures["m", "2"] = Failure("the file is broken", is_required=False)
    assert checked(models, name) == "NOT_SERVING"


@pytest.mark.parametrize("name", ["nobody", "m/9", "nobody/1"])
def test_an_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        checked(models_of([make_lane("m")]), name)
