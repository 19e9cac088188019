"""`iskander bench`: marks of a point."""

from __future__ import annotations

from iskander.cli.bench_output import render
from iskander.cli.load_generator.figures import Answer, figures_of
from iskander.cli.load_generator.schedule import Load
from iskander.foundation.clock import NS_PER_MS


def text_of(cpu: float) -> str:
    """The text of a point whose requests all waited for an idle client."""
    answer = Answer(0, 200 * NS_PER_MS, 201 * NS_PER_MS, was_busy=True)
    return "\n".join(render([figures_of(Load(1, 10.0), 1, [answer] * 10, 1.0, cpu=cpu)]))


def test_server_is_not_blamed_for_a_generator_that_used_its_core() -> None:
    assert ": the server is too slow for the rate" in text_of(0.5)
    text = text_of(0.97)
    assert "the generator used 97% of a core" in text
    assert ": the generator or the server is too slow for the rate" in text
