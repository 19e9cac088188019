"""Readiness and the `grpc.health.v1` status, from the first repository scan on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.observed import make_lane, models_of

from iskander._generated import health_pb2
from iskander.config.schema import Config, RepositoryConfig
from iskander.errors import ModelNotFound, Overloaded
from iskander.foundation.clock import now_ns
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.auth.shares import IDLE_NS
from iskander.gateway.protocols import health
from iskander.gateway.protocols.health import ANONYMOUS_DIVISOR, HealthService
from iskander.gateway.repository.models import Failure, Models, configured
from iskander.gateway.repository.routing import Routing

Status = health_pb2.HealthCheckResponse.ServingStatus


def status_of(models: Models, name: str = "", *, is_stopped: bool = False) -> str:
    async def check() -> bytes:
        service = HealthService(models, watchers_max=1)
        if is_stopped:
            service.stop()
        raw = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        return await service.check(raw, FULL_GRANT)

    response = health_pb2.HealthCheckResponse.FromString(asyncio.run(check()))
    return Status.Name(response.status)


def test_server_without_models_is_serving() -> None:
    """A repository managed by control calls can start empty."""
    models = Models()
    assert models.is_ready and status_of(models) == "SERVING"
    assert status_of(models, is_stopped=True) == "NOT_SERVING"
    models.is_stopping = True
    assert status_of(models) == "NOT_SERVING"


def test_repository_is_not_ready_before_its_first_scan(tmp_path: Path) -> None:
    """The port listens before the folder is read."""
    config = Config(repository=RepositoryConfig(path=str(tmp_path)))
    models = configured(config, RecentValues())
    for is_scanning, pending, is_ready in ((True, 0, False), (False, 2, False), (False, 0, True)):
        models.is_scanning, models.pending = is_scanning, pending
        assert models.is_ready == models.is_settled == is_ready
        assert status_of(models) == ("SERVING" if is_ready else "NOT_SERVING")
        assert models.reasons() == (
            [] if is_ready else ["the repository's models are being loaded"]
        )


def test_model_without_planned_workers_is_not_ready() -> None:
    """The port listens before the supervisor starts."""
    models = models_of([make_lane("m", is_ready=False)])
    assert models.reasons() == ["model `m/1`: its workers have not attached yet"]
    assert not models.is_settled and status_of(models) == "NOT_SERVING"


def test_models_without_a_repository_are_ready() -> None:
    assert configured(Config(), RecentValues()).is_ready


def test_reasons_name_the_failed_model_instead_of_pending_loads() -> None:
    models = Models()
    models.pending = 1
    models.failures["a", "1"] = Failure("the file is broken", is_required=True)
    assert models.reasons() == ["model `a/1`: the file is broken"]


@pytest.mark.parametrize("name", ["m", "m/1"])
def test_ready_model_is_serving(name: str) -> None:
    assert status_of(models_of([make_lane("m")]), name) == "SERVING"
    assert status_of(models_of([make_lane("m", is_ready=False)]), name) == "NOT_SERVING"
    assert status_of(models_of([make_lane("m")]), name, is_stopped=True) == "NOT_SERVING"


def test_alias_has_the_status_of_its_version() -> None:
    models = models_of([make_lane("m", "1", is_ready=False), make_lane("m", "2")])
    models.route("m", Routing(aliases={"stable": "2"}))
    assert status_of(models, "m/stable") == "SERVING"
    assert status_of(models, "m") == "NOT_SERVING"


@pytest.mark.parametrize("name", ["m", "m/2"])
@pytest.mark.parametrize("is_pending", [False, True])
def test_loading_or_failed_model_is_not_serving(name: str, *, is_pending: bool) -> None:
    models = Models()
    if is_pending:
        lane = make_lane("m", "2")
        lane.is_served = False
        models.by_key[0] = lane
    else:
        models.failures["m", "2"] = Failure("the file is broken", is_required=False)
    assert status_of(models, name) == "NOT_SERVING"


@pytest.mark.parametrize("name", ["nobody", "m/9", "nobody/1"])
def test_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        status_of(models_of([make_lane("m")]), name)


class WatchCall:
    """A call of a caller, with the number of its responses."""

    def __init__(self, caller: str) -> None:
        self.grant, self.caller, self.responses = FULL_GRANT, caller, 0

    async def write(self, *_: bytes) -> None:
        self.responses += 1


def test_oldest_watch_stream_gives_way_to_a_caller_with_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = health_pb2.HealthCheckRequest().SerializeToString()

    async def run() -> None:
        service = HealthService(Models(), watchers_max=8)

        async def watch(caller: str) -> None:
            await service.watch(raw, WatchCall(caller))  # type: ignore[arg-type]

        limit = service.watchers_max // (ANONYMOUS_DIVISOR if FULL_GRANT.is_anonymous else 1)
        greedy = [asyncio.create_task(watch("greedy")) for _ in range(limit)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await watch("other")
        later = now_ns() + IDLE_NS
        monkeypatch.setattr(health, "now_ns", lambda: later)
        with pytest.raises(Overloaded):
            await watch("greedy")
        other = asyncio.create_task(watch("other"))
        with pytest.raises(Overloaded, match="given to another"):
            await greedy[0]
        assert not other.done() and not any(each.done() for each in greedy[1:])
        service.stop()
        await asyncio.gather(other, *greedy[1:])

    asyncio.run(run())
