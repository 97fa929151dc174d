"""Few pieces of work per iteration of a loop."""

import asyncio

from lazydecode.turns import Turns


async def test_pieces_wait_for_an_iteration_that_has_room_for_them() -> None:
    turns = Turns(10)
    order: list[tuple[int, int]] = []
    iteration = 0

    async def piece(number: int, cost: int) -> None:
        await turns.wait(cost)
        order.append((iteration, number))

    costs = [6, 4, 5, 50, 3, 3, 9]
    tasks = [asyncio.create_task(piece(number, cost)) for number, cost in enumerate(costs)]
    tasks.insert(5, cancelled := asyncio.create_task(piece(100, 1)))
    await asyncio.sleep(0)
    assert [number for _, number in order] == [0, 1]
    assert not turns.take()  # others wait
    cancelled.cancel()
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
    assert [number for _, number in order] == [0, 1, 2, 3, 4, 5, 6]
    rounds: dict[int, list[int]] = {}
    for when, number in order:
        rounds.setdefault(when, []).append(number)
    assert list(rounds.values()) == [[0, 1], [2], [3], [4, 5], [6]]
    await asyncio.sleep(0)
    assert turns.take(50)
    assert not turns.take()
