"""The gateway in a program of your own, with policies and callbacks that it brings.

    from iskander.embed import on_metric, register_policy, serve

    @register_policy("shortest_plan_first")
    def shortest_plan_first(request):
        return 0 if request.steps_remaining is None else 10 / (1 + request.steps_remaining)

    @on_metric
    def show(name, value, labels):
        print(name, value, labels)

    serve("iskander.toml")  # With `policy = "shortest_plan_first"` in `[lanes]`.

A policy of more than a score comes by an entry point of the group `iskander.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from iskander.config.loader import load_config
from iskander.errors import ConfigError
from iskander.gateway.__main__ import main
from iskander.measurement.subscribers import LISTENERS, Listener
from iskander.scheduling.scored_policy import Score, register


def register_policy(name: str) -> Callable[[Score], Score]:
    """Decorate a function that scores a request; the higher score goes first.

    It is called on the gateway loop for every request, and so has to be quick. For what it is told
    see `iskander.scheduling.scored_policy.Scorable`.

    Raises:
        ConfigError: There is a policy of that name.
    """

    def decorate(score: Score) -> Score:
        register(name, score)
        return score

    return decorate


def on_metric(listener: Listener) -> Listener:
    """Have a function called with the name, value and labels of every point that is measured.

    It is called on the gateway loop, and so has to be quick. What it fails with is logged once.
    """
    LISTENERS.append(listener)
    return listener


def serve(file: str | Path, *, overrides: Sequence[str] = ()) -> None:
    """Run the gateway of a configuration until it is told to stop, as `iskander-gateway` does.

    Args:
        file: TOML.
        overrides: Settings that go before those of the file, as `section.key=value`.

    Raises:
        ConfigError: The file is wrong, or wants processes that would not be this one.
        SystemExit: It did not start, or did not drain; the code is that of the command.
    """
    config = load_config(Path(file), overrides=tuple(overrides)).config
    if config.server.processes > 1:
        raise ConfigError(
            "server.processes above 1 starts commands of its own, which know nothing of the "
            "policies and callbacks of this program"
        )
    main(["--config", str(file), *(word for each in overrides for word in ("--set", each))])
