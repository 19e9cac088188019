"""Consumers of samples that a configuration asks for.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Mapping

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.sampling.sample import Consumer


def create_consumers(
    config: Config, models: Mapping[tuple[str, str], ModelConfig]
) -> dict[str, Consumer]:
    """Create the consumers by name, which is the key of their report.

    Args:
        config: Configuration of the gateway, without its models.
        models: Settings of each model version by name and version, once a sample of it arrives.
    """
    consumers: dict[str, Consumer] = {}
    if config.prediction_log.path:
        from iskander.sampling.prediction_log.log import PredictionLog

        consumers["prediction_log"] = PredictionLog(config.prediction_log, models)
    if config.drift.enabled:
        from iskander.sampling.drift_consumer import DriftConsumer, references_folder

        consumers["drift"] = DriftConsumer(config.drift, references_folder(config), models)
    return consumers
