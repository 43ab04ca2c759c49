"""What is under way beside the kernels of a plan, and until when: it follows from the plan, its chip and its options.

Time and memory read it here: which collectives wait for nothing in their region (:func:`async_collectives`), which products run
beside those that others wait for (:func:`concurrent_matmuls`), and in what order kernels run therefore, with what is held beside each
(:func:`kernel_schedules`). Whether programs go on beside a kind of collectives at all is ``Plan.goes_on``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..hardware.chips import CollectiveOp
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.steps import Reduce, Reshard, Step
from .buffer_roles import buffer_roles
from .caching import cached_on_plan
from .fusion import FUSIBLE, VIEWS, Buffer, Computation, Kernel
from .kernel_time import KernelTime, kernel_times
from .kernels import computation_of

_LIGHT = FUSIBLE | VIEWS | {"move!", "copy!"}


@dataclass(frozen=True, slots=True)
class AsyncCollective:
    """A collective that waits for nothing in its region, or that nothing there waits for.

    Attributes:
      ahead: it brings what its region reads but does not make (a weight); else its result only leaves the region, or is a gradient.
      last: it is under way to the end of its region, or sent there.
      apart: what it gives lies in other memory than what it sends.
    """

    ahead: bool
    last: bool = False
    apart: bool = False


@cached_on_plan
def async_collectives(plan: Plan) -> dict[Computation, dict[Kernel, AsyncCollective]]:
    """The collectives of every region that kernels need not wait for, by the move.

    Where options have sums made by cores of their own (SparseCores), the TPU compiler (libtpu 0.0.42, default effort) has those
    that are sent whole under way to the end of a body, all at once. Sums of gradients that programs wait for it leaves to a
    body's end.
    """
    chip, kind_of = plan.chip, buffer_roles(plan)
    offloaded = _on_own_cores(plan, "all-reduce")
    tpu = chip is not None and bool(chip.torus)

    def behind(node: Kernel) -> AsyncCollective:
        if tpu and isinstance(node.step, Reduce):
            if offloaded and any(s.algorithm == "whole" for s in node.step.scatters):
                return AsyncCollective(False, True, True)
            return AsyncCollective(False, _leaves(node) and not any(plan.goes_on(c.op) for c in node.step.sends))
        return AsyncCollective(False)

    out: dict[Computation, dict[Kernel, AsyncCollective]] = {}
    for region in _regions(computation_of(plan)):
        ahead, found = ahead_of(region), out.setdefault(region, {})
        for node in region.kernels:
            if node.name == "move!" and ahead(node):
                found[node] = AsyncCollective(True)
            elif node.name == "move!" and (_leaves(node) or all(kind_of(o) == "gradients" for o in node.outs)):
                found[node] = behind(node)
    return out


def _regions(region: Computation) -> Iterator[Computation]:
    yield region
    for node in region.kernels:
        for body in node.regions:
            yield from _regions(body)


def _leaves(node: Kernel) -> bool:
    """Whether what a move gives only leaves its region, as a slice of a stack."""
    return all(k.name == "stack!" for o in node.outs for k in o.readers)


@cached_on_plan
def hidden_collectives(plan: Plan) -> dict[Collective, int]:
    """The collectives that hide behind kernels, and the loop (the id of its region) whose kernels they are: those of
    :func:`async_collectives` that programs do not wait for.
    """
    return {
        c: id(region)
        for region, flights in async_collectives(plan).items()
        for node in flights
        if node.step is not None
        for c in node.step.sends
        if plan.goes_on(c.op)
    }


def separate_collectives(step: Step) -> Sequence[Collective]:
    """The collectives of a step that are sent by themselves: those of rings are in the decisions."""
    if isinstance(step, Reshard | Reduce) and step.ring is not None:
        return [c for c in step.sends if c.algorithm not in ("ring", "pallas") and not c.first]
    return step.sends


@dataclass(frozen=True, slots=True)
class ConcurrentMatmuls:
    """What runs beside a collective that products wait for.

    Attributes:
      products: the kernels.
      exposed: the part of its time in which none of them runs.
    """

    products: tuple[Kernel, ...]
    exposed: float


@cached_on_plan
def concurrent_matmuls(plan: Plan) -> dict[Computation, dict[Kernel, ConcurrentMatmuls]]:
    """What runs beside the collectives of every region that products wait for, by the move, where programs go on beside them.

    Those products that neither make what it sends nor follow from what it gives, each beside one, so that there is an order in
    which all run so. So the TPU compiler (libtpu 0.0.42) has it in backward layers of Llama: beside what is gathered of a cotangent
    runs the recomputed forward pass, beside the sum of the next one the gradients of the weights; all-reduces are asynchronous
    where reduce-scatters are, on cores of their own. It schedules from the end of a body: the last collective takes the last
    products. To a sum that its options put on the SparseCores (v5p, v6e) it gives hardly a latency: one product is beside it, and
    none where none follows from it.
    """
    took, where = kernel_times(plan), hidden_collectives(plan)
    return {region: _beside(plan, region, took, where) for region in async_collectives(plan)}


def _beside(
    plan: Plan, region: Computation, took: Mapping[Kernel, KernelTime], where: Mapping[Collective, int]
) -> dict[Kernel, ConcurrentMatmuls]:
    moves: dict[Kernel, float] = {}
    for node in region.nodes:
        if node.name == "move!" and node.step is not None:
            seconds = sum(
                c.seconds or 0.0 for c in separate_collectives(node.step) if c not in where and _goes_on(plan, c)
            )
            if seconds:
                moves[node] = seconds
    if not moves:
        return {}
    products = [node for node in region.nodes if node.products and node not in moves and node in took]
    both = [*moves, *products]
    bits = {node: 1 << k for k, node in enumerate(both)}
    found: dict[Kernel, int] = {}
    for node in region.nodes:
        mine = bits.get(node, 0)
        for item in node.ins:
            if item.node is not None:
                mine |= found.get(item.node, 0)
        found[node] = mine
    before = [found[node] for node in both]  # of each, which of them come before it, and itself
    followed = functools.reduce(operator.or_, before[len(moves) :], 0)
    free = list(range(len(moves), len(both)))[::-1]
    out: dict[Kernel, ConcurrentMatmuls] = {}
    for n, (node, seconds) in reversed([*enumerate(moves.items())]):
        left, taken, bit = seconds, list[Kernel](), bits[node]
        alone = node.step is not None and any(_on_own_cores(plan, c.op) for c in separate_collectives(node.step))
        most = int(bool(followed & bit)) if alone else len(products)
        able = [k for k in free if not before[k] & bit and not before[n] >> k & 1] if most else []
        while able and left > 0 and len(taken) < most:
            k, *able = able
            left -= took[both[k]].seconds
            taken.append(both[k])
            free.remove(k)
            # each begins when what the other waits for is there; what waits for one waits for both
            pair, waits = bit | 1 << k, before[n] | before[k]
            before = [mine | waits if mine & pair else mine for mine in before]
            able = [k for k in able if not before[k] & bit and not before[n] >> k & 1]
        out[node] = ConcurrentMatmuls(tuple(taken), max(0.0, left) / seconds)
    return out


def _on_own_cores(plan: Plan, op: CollectiveOp) -> bool:
    """Whether options have such sums made by cores of their own."""
    return (
        op in ("all-reduce", "reduce-scatter") and plan.chip is not None and op in plan.chip.waits and plan.goes_on(op)
    )


def _goes_on(plan: Plan, c: Collective) -> bool:
    return c.op in ("all-gather", "reduce-scatter", "all-reduce") and plan.goes_on(c.op)


@dataclass(slots=True)
class KernelSchedule:
    """The kernels of a region in the order in which they run.

    Attributes:
      kernels: of the region.
      last: where each array is read last.
      beside: what is under way beside kernels, and held for it, by their place.
    """

    kernels: list[Kernel]
    last: dict[Buffer, int] = field(default_factory=dict)
    beside: dict[int, list[Buffer]] = field(default_factory=dict)


@cached_on_plan
def kernel_schedules(plan: Plan) -> dict[Computation, KernelSchedule]:
    """The kernels of every region in the order in which they run.

    They run in the order of the program; but in bodies of loops products that come before a collective and run beside it (the
    gradients of weights beside what is sent of cotangents) come after it, with all that follows from them. What it sends is held
    until they are done. (Without loops, ResNet-50 with split features on v5e, the compiler holds what the program's order does.) A
    value that is sent for ahead arrives while the product before the one that reads it runs; a gradient is under way until
    the next product is done: the TPU compiler (libtpu 0.0.42, default effort) was seen to schedule about one collective ahead
    and one behind. It puts sums that are under way to the end into other memory.
    """
    flights, besides, whole = async_collectives(plan), concurrent_matmuls(plan), computation_of(plan)
    return {region: _running(region, flights[region], {} if region is whole else besides[region]) for region in flights}


def _running(
    region: Computation, flights: Mapping[Kernel, AsyncCollective], besides: Mapping[Kernel, ConcurrentMatmuls]
) -> KernelSchedule:
    out = KernelSchedule(_in_turn(region, besides))
    kernels, under_way = out.kernels, out.beside
    for k, node in enumerate(kernels):
        for item in node.reads:
            out.last[item] = k
    heavy = [i for i, k in enumerate(kernels) if k.products or k.name == "kernel"]
    end, place = len(kernels), {node: k for k, node in enumerate(kernels)}
    for node, flight in flights.items():
        j = place[node]
        if flight.ahead:
            begin, after, items = max((i for i in heavy if i < j), default=j), j, [*node.writes]
        else:
            begin, after = j + 1, end if flight.last else min((i + 1 for i in heavy if i > j), default=end)
            items = [*node.reads, *(Buffer(i.bytes, i.value, node) for i in node.reads if flight.apart)]
        for i in range(begin, after):
            under_way.setdefault(i, []).extend(items)
    for node, beside in besides.items():
        for k in beside.products:
            if place[k] > place[node]:
                under_way.setdefault(place[k], []).extend(node.reads)
    return out


def _in_turn(region: Computation, besides: Mapping[Kernel, ConcurrentMatmuls]) -> list[Kernel]:
    place = {node: float(k) for k, node in enumerate(region.kernels)}
    late = {k: place[node] + 0.5 for node, b in besides.items() for k in b.products if place[k] < place[node]}
    if not late:
        return region.kernels
    maker = {item: node for node in region.kernels for item in node.writes}
    for node in region.kernels:
        after = [place[made] for item in node.reads if (made := maker.get(item)) is not None and made is not node]
        place[node] = max([place[node], late.get(node, 0.0), *after])
    return sorted(region.kernels, key=place.__getitem__)


def ahead_of(region: Computation) -> Callable[[Kernel], bool]:
    """Whether a move brings what its region reads but does not make (a weight), so that it can be sent for ahead.

    What light ops (elementwise ones, views, other moves) make of such a value counts as not made.
    """
    inside, seen = set(region.nodes), dict[Buffer, bool]()
    return lambda node: not any(_made_here(item, region, inside, seen) for item in node.ins)


def _made_here(item: Buffer, region: Computation, inside: set[Kernel], seen: dict[Buffer, bool]) -> bool:
    if item.node is None or item.node not in inside:
        return item.carried and item in region.inputs
    if item not in seen:
        light = item.node.name in _LIGHT
        seen[item] = not light or any(_made_here(i, region, inside, seen) for i in item.node.ins)
    return seen[item]
