"""What is under way beside the kernels of a plan, and until when: it follows from the plan, its chip and its options.

Time, memory, and the passes that pair products with collectives read it here: what programs wait for (:func:`goes_on`), which
collectives wait for nothing in their region, beside which of its kernels they are sent, and what they hold meanwhile
(:func:`flights_of`), and what nothing there waits for and is kept for its end (:func:`waits_for_the_end`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..hardware.chips import CollectiveOp
from ..plan.plan import Plan
from ..plan.steps import Reduce
from .fusion import FUSED, VIEWS, Item, Node, Region
from .kernels import kernels_of
from .kinds import kinds_of
from .memo import once_per_plan

_LIGHT = FUSED | VIEWS | {"move!", "copy!"}


def goes_on(plan: Plan, op: CollectiveOp) -> bool:
    """Whether the programs of a plan go on beside collectives of a kind, where something is there to do."""
    return op not in plan.waits


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """A collective that waits for nothing in its region, or that nothing there waits for.

    Attributes:
      ahead: it brings what its region reads but does not make (a weight); else its result only leaves the region, or is a gradient.
      first, end: it is under way beside the kernels of its region from this place to before that one.
      items: what it holds beside them, operands or results.
    """

    ahead: bool
    first: int
    end: int
    items: tuple[Item, ...]


@once_per_plan
def flights_of(plan: Plan) -> dict[Region, dict[Node, Flight]]:
    """What is under way beside the kernels of every region, by the move.

    A value that is sent for ahead arrives while the product before the one that reads it runs; a gradient is under way until
    the next product is done. The TPU compiler (libtpu 0.0.42, default effort) was seen to schedule about one collective ahead
    and one behind. Where options have sums made by cores of their own (SparseCores), it has those that are sent whole under way to
    the end of a body, all at once, and puts them into other memory.
    """
    chip, kind_of = plan.chip, kinds_of(plan)
    offloaded = chip is not None and "all-reduce" in chip.waits and goes_on(plan, "all-reduce")
    return {region: dict(_flights(region, kind_of, offloaded)) for region in _regions(kernels_of(plan))}


def _regions(region: Region) -> Iterator[Region]:
    yield region
    for node in region.kernels:
        for body in node.regions:
            yield from _regions(body)


def _flights(region: Region, kind_of: Callable[[Item], str], offloaded: bool) -> Iterator[tuple[Node, Flight]]:
    heavy = [i for i, k in enumerate(region.kernels) if k.products or k.name == "kernel"]
    end, ahead = len(region.kernels), ahead_of(region)
    for j, node in enumerate(region.kernels):
        if node.name != "move!":
            continue
        if ahead(node):
            first = max((i for i in heavy if i < j), default=j)
            yield node, Flight(True, first, j, tuple(node.writes))
        elif _behind(node, kind_of):
            whole = offloaded and _whole(node)
            after = end if whole else min((i + 1 for i in heavy if i > j), default=end)
            sums = [Item(i.bytes, i.value, node) for i in node.reads] if whole else []
            yield node, Flight(False, j + 1, after, (*node.reads, *sums))


def ahead_of(region: Region) -> Callable[[Node], bool]:
    """Whether a move brings what its region reads but does not make (a weight), so that it can be sent for ahead.

    What light ops (elementwise ones, views, other moves) make of such a value counts as not made.
    """
    inside = set(region.nodes)
    seen: dict[Item, bool] = {}

    def made_here(item: Item) -> bool:
        if item.node is None or item.node not in inside:
            return item.carried and item in region.inputs
        if item not in seen:
            seen[item] = item.node.name not in _LIGHT or any(map(made_here, item.node.ins))
        return seen[item]

    return lambda node: not any(map(made_here, node.ins))


def _behind(node: Node, kind_of: Callable[[Item], str]) -> bool:
    """Whether what a move gives only leaves its region, or is a gradient, so that the next kernels need not wait for it."""
    return all(k.name == "stack!" for o in node.outs for k in o.readers) or all(
        kind_of(o) == "gradients" for o in node.outs
    )


def _whole(node: Node) -> bool:
    """Whether a move is a sum that is sent whole, and cut afterwards."""
    return isinstance(node.step, Reduce) and any(s.algorithm == "whole" for s in node.step.scatters)


def waits_for_the_end(plan: Plan, region: Region) -> list[Item]:
    """Operands of products that are made block by block when their sum is reduced, a body's last work.

    Where the TPU compiler (libtpu 0.0.42, default effort) sends gathers asynchronously, it was seen to leave the blocks of
    weights' gradients to the end of a loop's body, with the gathered activations and cotangents that they are made of in memory.
    """
    if plan.chip is None or not plan.chip.torus or not goes_on(plan, "all-gather"):
        return []
    late = [n for n in region.kernels if any(run.in_ring == "reduce" for run in n.products)]
    return [item for node in late for item in node.reads]
