"""Schedules: their known numbers, and a simulation of the slots of every stage at every tick."""

from fractions import Fraction

import pytest

from meshpar._src.program.pipeline import Schedule


@pytest.mark.parametrize(
    ("stages", "microbatches", "rounds", "bubble", "in_flight", "ticks"),
    [
        (4, 16, 1, Fraction(3, 19), 7, 22),
        (4, 16, 2, Fraction(3, 35), 5.5, 42),
        (4, 16, 4, Fraction(3, 67), 4.75, 82),
        (8, 32, 1, Fraction(7, 39), 15, 46),
        (8, 32, 2, Fraction(7, 71), 11.5, 86),
        (8, 32, 4, Fraction(7, 135), 9.75, 166),
    ],
)
def test_numbers_of_1f1b(stages, microbatches, rounds, bubble, in_flight, ticks):
    schedule = Schedule("1f1b", stages, microbatches, rounds)
    assert (schedule.bubble, schedule.in_flight, schedule.ticks) == (bubble, in_flight, ticks)


@pytest.mark.parametrize(("name", "order"), [("1f1b", "FB"), ("1f1b-overlap", "FB"), ("gpipe", "FB"), ("zb", "FBW")])
@pytest.mark.parametrize(
    ("stages", "microbatches", "rounds"),
    [(1, 1, 1), (2, 1, 1), (2, 4, 1), (3, 5, 1), (4, 16, 1), (8, 32, 1), (5, 2, 1), (2, 4, 3), (4, 16, 2), (4, 16, 4), (8, 32, 4)],
)  # fmt: skip
def test_a_simulation_agrees(name, order, stages, microbatches, rounds):
    """A slot runs after the slots that it needs; the idle slots and the stored activations are counted."""
    schedule = Schedule(name, stages, microbatches, rounds, order)
    forward: dict[tuple[int, int], int] = {}  # (microbatch, layers) → tick
    backward: dict[tuple[int, int], int] = {}
    weights: dict[tuple[int, int], int] = {}
    loops = (forward, backward, weights)[: len(order)]
    stored: list[set[tuple[int, int]]] = [set() for _ in range(stages)]
    most = idle = 0
    for tick in range(schedule.ticks):
        for loop, done in enumerate(loops):
            active = schedule.starts[loop] <= tick < schedule.starts[loop] + schedule.slots(loop)
            for k in range(stages):
                slot = schedule.slot(loop, k, tick)
                if slot is None:
                    idle += active
                    continue
                assert active
                microbatch, layers = slot[0], slot[1] * stages + k
                assert (microbatch, layers) not in done
                done[microbatch, layers] = tick
                if loop == 0:
                    assert layers == 0 or forward[microbatch, layers - 1] == tick - 1
                    stored[k].add((microbatch, layers))
                    most = max(most, len(stored[k]))
                elif loop == 1:
                    last = layers == stages * rounds - 1
                    assert forward[microbatch, layers] <= tick - schedule.joint
                    assert last or backward[microbatch, layers + 1] == tick - 1
                else:
                    assert backward[microbatch, layers] <= tick
                if loop == len(order) - 1:  # the last loop that reads the activations
                    stored[k].remove((microbatch, layers))
    assert {len(done) for done in loops} == {microbatches * stages * rounds}
    assert not any(stored)
    assert Fraction(idle, stages * sum(map(schedule.slots, range(len(loops))))) == schedule.bubble
    assert Fraction(most, rounds) == schedule.in_flight


def test_without_a_backward_loop():
    schedule = Schedule("1f1b", 4, 16, order="F")
    assert (schedule.ticks, schedule.bubble, schedule.in_flight) == (19, Fraction(3, 19), 1)
