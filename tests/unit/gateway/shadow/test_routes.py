"""Pairs of versions from the routing; calls without a version never get a shadow version."""

from __future__ import annotations

from typing import Any

import pytest
from support.observed import make_lane

from iskander.config.repository import ModelFile
from iskander.errors import ModelNotFound
from iskander.gateway.repository.models import Models
from iskander.gateway.repository.routing import Routing
from iskander.gateway.repository.version_policy import routing_error, routing_of, wanted_versions
from iskander.gateway.shadow.routes import shares_of


def models_with(*versions: str, name: str = "m") -> Models:
    models = Models()
    for version in versions:
        models.serve(make_lane(name, version))
    return models


def pairs_of(models: Models) -> dict[tuple[str, str], float]:
    return {
        (served.model.version, candidate.model.version): share
        for (served, candidate), share in shares_of(models).items()
    }


def test_candidate_is_compared_with_every_other_version() -> None:
    models = models_with("1", "2", "3")
    models.set_shadow_shares({("m", "3"): 0.5, ("other", "1"): 1.0})
    assert pairs_of(models) == {("1", "3"): 0.5, ("2", "3"): 0.5}
    models.withdraw(models.find("m", "2"))
    assert pairs_of(models) == {("1", "3"): 0.5}
    models.set_shadow_shares({})
    assert pairs_of(models) == {}


def test_calls_without_a_version_get_the_highest_that_is_no_shadow() -> None:
    models = models_with("1", "2", "3")
    assert models.find("m", None).model.version == "3"
    models.set_shadow_shares({("m", "3"): 0.0})
    assert models.find("m", None).model.version == "2"
    assert models.find("m", "3").model.version == "3", "a call may name it"
    models.set_shadow_shares({})
    assert models.find("m", None).model.version == "3"


def test_only_shadow_versions_serve_no_call_without_a_version() -> None:
    models = models_with("1")
    models.set_shadow_shares({("m", "1"): 0.1})
    with pytest.raises(ModelNotFound, match="has only shadow versions"):
        models.find("m", None)


def test_shadows_of_a_model_file() -> None:
    settings = ModelFile(aliases={"canary": 4}, default=3, shadows={"canary": 0.25})
    routing = routing_of(settings)
    assert routing.shadow_shares() == {"4": 0.25}
    assert wanted_versions(["2", "3", "4"], (3,), routing) == ["3", "4"]
    by_number = routing_of(ModelFile(shadows={"2": 0.25}))
    assert wanted_versions(["2", "3", "4"], (3,), by_number) == ["2", "3"]
    assert routing.routes_to("4") == ["canary", "shadow of 0.25"]
    models = models_with("3", "4")
    models.route("m", routing)
    assert pairs_of(models) == {("3", "4"): 0.25}
    models.route("m", Routing())
    assert pairs_of(models) == {}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"shadows": {"next": 1.0}}, "shadows: `next` is neither a version nor an alias"),
        (
            {"shadows": {"4": 1.0}, "aliases": {"canary": 4}, "default": "canary"},
            "default: `canary` is in `shadows`: its results are never returned",
        ),
        (
            {"shadows": {"4": 1.0}, "split": {"4": 1, "3": 9}},
            "split: `4` is in `shadows`: its results are never returned",
        ),
        ({"shadows": {"4": 1.0}, "split": {"3": 9}}, ""),
    ],
)
def test_contradictions(settings: dict[str, Any], problem: str) -> None:
    assert routing_error(routing_of(ModelFile(**settings))) == problem


def test_server_is_ready_without_its_shadow_versions() -> None:
    """A served version that is not ready counts."""
    models = models_with("1")
    models.serve(make_lane("m", "2", is_ready=False))
    assert not models.is_ready and not models.is_settled
    models.set_shadow_shares({("m", "2"): 1.0})
    assert models.is_ready and models.is_settled
    assert models.readiness()["models"]["m"] == {
        "ready": True,
        "versions": {"1": True, "2": False},
    }
    models.set_shadow_shares({})
    models.route("m", Routing(shadows={"2": 1.0}))
    assert models.is_ready and models.is_settled
    models.route("m", Routing(shadows={"1": 1.0}))
    assert not models.is_ready and not models.is_settled


def test_each_change_is_reported() -> None:
    models = models_with("1", "2")
    changes: list[int] = []
    models.on_revision = lambda: changes.append(models.revision)
    models.set_shadow_shares({("m", "2"): 0.5})
    models.set_shadow_shares({("m", "2"): 0.5})
    models.route("m", Routing(default="1"))
    models.withdraw(models.find("m", "1"))
    assert len(changes) == 3
