"""Check for the sketch library, without loading it.

Runs on: gateway loop.
"""

from __future__ import annotations

from importlib.util import find_spec

from iskander.config.drift import DriftConfig
from iskander.errors import ConfigError


def require_sketches(config: DriftConfig) -> None:
    """Check that the library is installed, if it is needed.

    Raises:
        ConfigError: It is not.
    """
    if config.enabled and find_spec("datasketches") is None:
        raise ConfigError("`drift.enabled` needs the extra `drift`: pip install 'iskander[drift]'")
