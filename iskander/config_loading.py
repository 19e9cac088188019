"""The settings of how model files are opened, declared as those of `config`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from iskander.config_section import MIB, Positive, Section


class LoadingConfig(Section, frozen=True, kw_only=True):
    """How model files are opened: what is believed, what it may take, what workers share."""

    trial: Annotated[
        bool,
        Meta(
            description="Open and warm a new model in a process of its own first, so that one that "
            "ends, hangs or bursts its process harms no worker. Models on the CPU only."
        ),
    ] = True
    trial_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that this may take; at most 0.8 of workers.start_s.",
        ),
    ] = 60.0
    trial_bytes: Annotated[
        int,
        Meta(ge=0, description="Private bytes that it may take; 0: what the system has free."),
    ] = 0
    model_bytes: Annotated[
        int, Positive, Meta(description="Bytes of a model's files, and of all its weights.")
    ] = 65_536 * MIB
    share_weights: Annotated[
        bool,
        Meta(
            description="Optimise each model once and map its weights, as the processor reads "
            "them, into every worker, where the trial showed that its results are the same."
        ),
    ] = True
    cache: Annotated[
        str,
        Meta(
            description="Folder of optimised models, which nobody else may write. Empty: "
            "$CACHE_DIRECTORY, else `iskander` below $XDG_CACHE_HOME or ~/.cache."
        ),
    ] = ""
    cache_bytes: Annotated[
        int, Positive, Meta(description="Bytes of it; the least recently used models go first.")
    ] = 16_384 * MIB
    custom_ops: Annotated[
        tuple[str, ...],
        Meta(
            description="Operator libraries that models may ask for: absolute paths, or packages "
            "with a `get_library_path`."
        ),
    ] = ()
    public_key: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9+/]{43}=)?\Z",
            description="Ed25519 public key, 32 bytes as base64. Where it is set, a model is "
            "refused without a `manifest.toml.sig` that fits, and pins of all its files.",
        ),
    ] = ""
