"""What a start has yet to look at: who waits for it, and for how long."""

from __future__ import annotations

import asyncio

from support.input_arena import in_loop, turns

from iskander.repository.repository import StartupBarrier


@in_loop
async def test_a_change_waits_until_the_start_has_begun_with_its_model() -> None:
    barrier = StartupBarrier()
    order: list[str] = []

    async def change(name: str) -> None:
        await barrier.wait_for(name)
        order.append(name)

    changes = [asyncio.create_task(change(name)) for name in ("a", "b", "unknown")]
    await turns()
    assert order == []  # The folder is not listed.
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
