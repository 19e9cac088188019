"""Startup barrier: a change of a model waits until startup has begun with it."""

from __future__ import annotations

import asyncio

from support.input_arena import in_loop, turns

from iskander.gateway.repository.repository import StartupBarrier


@in_loop
async def test_change_waits_until_startup_releases_its_model() -> None:
    barrier = StartupBarrier()
    order: list[str] = []

    async def change(name: str) -> None:
        await barrier.wait_for(name)
        order.append(name)

    changes = [asyncio.create_task(change(name)) for name in ("a", "b", "unknown")]
    await turns()
    assert order == []  # The repository is not listed yet.
    barrier.expect("a")
    barrier.expect("b")
    barrier.all_expected()
    await turns()
    assert order == ["unknown"]
    barrier.release("b")
    barrier.release("b")
    await turns()
    assert order == ["unknown", "b"]
    barrier.release("a")
    await asyncio.gather(*changes)
    await change("later")
