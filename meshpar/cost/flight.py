"""What is under way beside the kernels of a region, or waits for its end, and holds memory meanwhile.

Collectives that wait for nothing in a region are sent while its kernels run; products that nothing there waits for are
kept for its end, to have something to run beside what is sent last.
"""

from __future__ import annotations

from collections.abc import Callable

from ..plan.steps import Reduce
from .fusion import FUSED, VIEWS, Item, Node, Region

_LIGHT = FUSED | VIEWS | {"move!", "copy!"}


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


def behind(node: Node, kind_of: Callable[[Item], str]) -> bool:
    """Whether what a move gives only leaves its region, or is a gradient, so that the next kernels need not wait for it."""
    return all(k.name == "stack!" for o in node.outs for k in o.readers) or all(
        kind_of(o) == "gradients" for o in node.outs
    )


def in_flight(region: Region, kind_of: Callable[[Item], str], offloaded: bool = False) -> list[list[Item]]:
    """What is under way beside each kernel of a region, by its index: operands or results of collectives that overlap it.

    A value that is sent for ahead arrives while the product before the one that reads it runs; a gradient is under way until
    the next product is done. The TPU compiler (libtpu 0.0.42, default effort) was seen to schedule about one collective ahead
    and one behind. Where sums are ``offloaded`` to cores of their own (SparseCores), it has those that are sent whole under way to
    the end of a body, all at once, and puts them into other memory.
    """
    out: list[list[Item]] = [[] for _ in region.kernels]
    heavy = [i for i, k in enumerate(region.kernels) if k.products or k.name == "kernel"]
    ahead = ahead_of(region)
    for j, node in enumerate(region.kernels):
        if node.name != "move!":
            continue
        if ahead(node):
            first = max((i for i in heavy if i < j), default=j)
            for i in range(first, j):
                out[i] += node.writes
        elif behind(node, kind_of):
            end = len(region.kernels) - 1
            whole = offloaded and _whole(node)
            last = end if whole else min((i for i in heavy if i > j), default=end)
            sums = [Item(i.bytes, i.value, node) for i in node.reads] if whole else []
            for i in range(j + 1, last + 1):
                out[i] += [*node.reads, *sums]
    return out


def _whole(node: Node) -> bool:
    """Whether a move is a sum that is sent whole, and cut afterwards."""
    return isinstance(node.step, Reduce) and any(s.algorithm == "whole" for s in node.step.scatters)


def waits_for_the_end(region: Region) -> list[Item]:
    """Operands of products that are made block by block when their sum is reduced, a body's last work.

    Where the TPU compiler (libtpu 0.0.42, default effort) sends collectives asynchronously, it was seen to leave the blocks of
    weights' gradients to the end of a loop's body, with the gathered activations and cotangents that they are made of in memory.
    """
    late = [n for n in region.kernels if any(run.in_ring == "reduce" for run in n.products)]
    return [item for node in late for item in node.reads]
