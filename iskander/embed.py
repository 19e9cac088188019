"""Embedding of the gateway in a Python program with its own policies and metric callbacks.

    from iskander.embed import on_metric, register_policy, serve

    @register_policy("shortest_plan_first")
    def shortest_plan_first(request):
        return 0 if request.steps_remaining is None else 10 / (1 + request.steps_remaining)

    @on_metric
    def show(name, value, labels):
        print(name, value, labels)

    serve("iskander.toml")  # With `policy = "shortest_plan_first"` in `[lanes]`.

For a policy that is more than a score, use an entry point of the group `iskander.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from iskander.config.loader import load_config
from iskander.errors import ConfigError
from iskander.foundation.measurement.subscribers import SUBSCRIBERS, Subscriber
from iskander.gateway.__main__ import main
from iskander.gateway.protocols.extension import REGISTERED, Factory
from iskander.gateway.scheduling.lanes.policies import Score, register


def register_policy(name: str) -> Callable[[Score], Score]:
    """Decorate a function that scores a request; the highest score runs first.

    The gateway loop calls it for every request, so it has to be fast. Its argument is a
    `iskander.gateway.scheduling.lanes.policies.Scorable`.

    Raises:
        ConfigError: A policy with this name exists.
    """

    def decorate(score: Score) -> Score:
        register(name, score)
        return score

    return decorate


def register_protocol(name: str) -> Callable[[Factory], Factory]:
    """Decorate a factory of a protocol, which `[extensions.protocols.NAME]` configures.

    Its arguments are `Services` and the table of its settings; it returns a `ProtocolServer`. Both
    are classes of `iskander.gateway.protocols.extension`.
    """

    def decorate(factory: Factory) -> Factory:
        REGISTERED[name] = factory
        return factory

    return decorate


def on_metric(listener: Subscriber) -> Subscriber:
    """Decorate a callback that receives the name, value and labels of every point of a metric.

    The gateway loop calls it, so it has to be fast. Its first exception is logged.
    """
    SUBSCRIBERS.append(listener)
    return listener


def serve(file: str | Path, *, overrides: Sequence[str] = ()) -> None:
    """Run the gateway until it is stopped, as `iskander-gateway` does.

    Args:
        file: Configuration file (TOML).
        overrides: Settings that override the file, as `section.key=value`.

    Raises:
        ConfigError: The file is invalid, or configures several processes.
        SystemExit: The start or the drain failed; the exit code is the code of the command.
    """
    config = load_config(Path(file), overrides=tuple(overrides)).config
    if config.server.processes > 1:
        raise ConfigError(
            "server.processes above 1 is not supported in an embedded gateway: other processes do "
            "not have the policies and callbacks of this program"
        )
    main(["--config", str(file), *(word for override in overrides for word in ("--set", override))])
