"""Servers on the nodes of a Ray cluster, and scoring of Ray Data datasets with them.

    Fleet  ->  one actor per node  ->  one gateway with its workers per node
    score  ->  actors of Ray Data  ->  the gateway of their node, or another one

Ray is optional and imported at the first use. Imports `iskander.client`, `iskander.lake` and
pyarrow; never the server's packages.
Runs in: drivers and actors of Ray.
"""

from iskander.ray.dataset import score
from iskander.ray.fleet import Fleet

__all__ = ["Fleet", "score"]
