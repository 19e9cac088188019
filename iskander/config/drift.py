"""Settings of the detection of drift."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from iskander.config.observation import Share
from iskander.config.section import Section, require

Origin = Literal["training", "warm-up", "live"]
Limit = Annotated[float, Meta(gt=0, le=1)]


class DriftConfig(Section, frozen=True, kw_only=True):
    """Drift of sampled inputs and outputs; see `docs/observing.md`. Needs the extra `drift`.

    A model is compared with its reference only if its `[models.drift]` has a share.

    Attributes:
        enabled: Detect drift.
        window_s: Seconds of recent samples that are compared; a sixth of them is dropped at once.
        rows_min: Values of a column, on both sides, from which they are compared.
        columns: Summarized columns of a model; further ones are counted only.
        columns_listed: Columns of a model in the metrics and on the page, those with the most drift
            first.
        references: Sources of a model's reference, in order: `training`, the file of `iskander
            drift record`; `warm-up`, the recorded batches of its manifest; `live`, recorded
            requests.
        record_rows: Sampled rows that become the `live` reference of a model version without one.
        folder: Folder of recorded references, relative to this file. Empty: `drift` in the folder
            of `loading.cache`.
        psi: Population stability index above which a column drifts.
        ks: Kolmogorov-Smirnov distance above which a column drifts.
        missing: Difference of the shares of null, NaN and infinite values above which a column
            drifts.
        out_of_range: Share of numbers below the least or above the greatest one of the reference,
            above which a column drifts.
        new_labels: Share of labels that the reference does not have, above which a column drifts.
    """

    restart_reason: ClassVar[str] = "the observer process receives it at its start"

    enabled: bool = False
    window_s: Annotated[float, Meta(ge=6, le=604_800)] = 3600.0
    rows_min: Annotated[int, Meta(ge=50, le=1_000_000_000)] = 500
    columns: Annotated[int, Meta(ge=1, le=1024)] = 256
    columns_listed: Annotated[int, Meta(ge=1, le=100)] = 20
    references: tuple[Origin, ...] = ("training", "warm-up", "live")
    record_rows: Annotated[int, Meta(ge=50, le=1_000_000_000_000)] = 10_000
    folder: str = ""
    psi: Annotated[float, Meta(gt=0, le=100)] = 0.2
    ks: Limit = 0.2
    missing: Limit = 0.05
    out_of_range: Limit = 0.05
    new_labels: Limit = 0.05


class ModelDriftConfig(Section, frozen=True, kw_only=True):
    """Drift of one model.

    Attributes:
        share: Share of its requests that are summarized: 0 to 1.
    """

    restart_reason: ClassVar[str] = "the observer process receives it at its start"

    share: Share = 0.0


def require_model_drift(model: ModelDriftConfig, drift: DriftConfig, where: str) -> None:
    """Check the share of a model against `[drift]`.

    Raises:
        ConfigError: The share has no effect.
    """
    has_effect = drift.enabled or not model.share
    require(has_effect, f"{where}.share has no effect without drift.enabled")
