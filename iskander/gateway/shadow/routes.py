"""Pairs of versions to compare, from the served models and their routing.

Pure.
"""

from __future__ import annotations

from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.lanes.lane import Lane


def shares_of(models: Models) -> dict[tuple[Lane, Lane], float]:
    """Return the share of each pair (served, candidate).

    A shadow version is a candidate for every version of its model that is not one.
    """
    names = dict.fromkeys(lane.model.name for lane in models)
    return {
        (lanes[served], lanes[candidate]): share
        for name in names
        for lanes in [models.versions_of(name)]
        for shares in [models.shadow_shares_of(name)]
        for candidate, share in shares.items()
        if candidate in lanes
        for served in lanes
        if served not in shares
    }
