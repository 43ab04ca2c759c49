"""Which collectives are in flight while each kernel runs, and until when.

One analysis per computation (the program, or the body of a loop), which time and memory read:

- :func:`async_collectives`: the collectives that kernels of their computation need not wait for;
- :func:`concurrent_matmuls`: for the other collectives, the matmuls that run concurrently, and the part that stays exposed;
- :func:`kernel_schedules`: the order of the kernels, and the buffers that stay live for a collective in flight.

All follow from the plan, its chip and its compiler options. ``Plan.is_async`` says which kinds of collectives are asynchronous.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..hardware.collective_ops import CollectiveOp
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.steps import Reduce, Reshard, Step
from .buffer_roles import buffer_roles
from .caching import cached_on_plan
from .fusion import FUSIBLE, USER_KERNELS, VIEWS, Buffer, Computation, Kernel
from .kernel_time import KernelTime, kernel_times
from .kernels import computation_of

_LIGHT = FUSIBLE | VIEWS | {"move!", "copy!"}


@dataclass(frozen=True, slots=True)
class AsyncCollective:
    """How a collective overlaps whose result no kernel of its computation depends on, or whose operand none computes.

    Attributes:
      prefetched: its operand comes from outside the computation (an all-gather of a weight), so that it is sent before it is
        needed. Otherwise its result only leaves the computation, or is a gradient.
      until_end: it is in flight, or is sent, until the computation ends.
      separate_result: its result has a buffer of its own, other than its operand's.
    """

    prefetched: bool
    until_end: bool = False
    separate_result: bool = False


@cached_on_plan
def async_collectives(plan: Plan) -> dict[Computation, dict[Kernel, AsyncCollective]]:
    """For every computation of a plan, the ``move!`` kernels whose collectives other kernels need not wait for.

    With all-reduces on the SparseCores, the TPU compiler (libtpu 0.0.42, default effort) has the all-reduces of gradients in flight
    until the end of a loop body, all at once. It sends reductions of gradients that block programs at the end of the body.
    """
    chip, role_of = plan.chip, buffer_roles(plan)
    offloaded = _on_sparse_cores(plan, "all-reduce")
    tpu = chip is not None and bool(chip.torus)

    def of_result(move: Kernel) -> AsyncCollective:
        if tpu and isinstance(move.step, Reduce):
            if offloaded and any(s.entry.slices_locally for s in move.step.scatters):
                return AsyncCollective(False, True, True)
            return AsyncCollective(False, _only_leaves(move) and not any(plan.is_async(c.op) for c in move.step.sends))
        return AsyncCollective(False)

    out: dict[Computation, dict[Kernel, AsyncCollective]] = {}
    for computation in _with_bodies(computation_of(plan)):
        prefetchable, overlapped = prefetchable_moves(computation), out.setdefault(computation, {})
        for kernel in computation.kernels:
            if kernel.name != "move!":
                continue
            if prefetchable(kernel):
                overlapped[kernel] = AsyncCollective(True)
            elif _only_leaves(kernel) or all(role_of(buffer) == "gradients" for buffer in kernel.outs):
                overlapped[kernel] = of_result(kernel)
    return out


def _with_bodies(computation: Computation) -> Iterator[Computation]:
    """A computation, and the bodies of its loops at any depth."""
    yield computation
    for kernel in computation.kernels:
        for body in kernel.bodies:
            yield from _with_bodies(body)


def _only_leaves(move: Kernel) -> bool:
    """Whether the result of a collective is only written into the stack of a loop (``stack!``)."""
    return all(reader.name == "stack!" for buffer in move.outs for reader in buffer.readers)


@cached_on_plan
def hidden_collectives(plan: Plan) -> dict[Collective, int]:
    """The asynchronous collectives of :func:`async_collectives` → ``id`` of the computation whose kernels hide them."""
    return {
        c: id(computation)
        for computation, overlapped in async_collectives(plan).items()
        for kernel in overlapped
        if kernel.step is not None
        for c in kernel.step.sends
        if plan.is_async(c.op)
    }


def separate_collectives(step: Step) -> Sequence[Collective]:
    """The collectives of a step without those of its ring (a collective matmul), whose exposed time is in ``Plan.overlaps``."""
    if isinstance(step, Reshard | Reduce) and step.ring is not None:
        return [c for c in step.sends if not c.entry.ring_step and not c.first]
    return step.sends


@dataclass(frozen=True, slots=True)
class ConcurrentMatmuls:
    """The matmuls that run while a collective is in flight that other matmuls depend on.

    Attributes:
      kernels: of these matmuls.
      exposed: the part of the collective's seconds in which none of them runs, in [0, 1].
    """

    kernels: tuple[Kernel, ...]
    exposed: float


@cached_on_plan
def concurrent_matmuls(plan: Plan) -> dict[Computation, dict[Kernel, ConcurrentMatmuls]]:
    """For every computation, its ``move!`` kernels that matmuls depend on → the matmuls concurrent with their collectives.

    Only asynchronous collectives (``Plan.is_async``) have any. A matmul is concurrent with one collective at most,
    neither computes its operand nor reads its result, and all of these choices hold in one order of the kernels.

    As in the TPU compiler's schedules (libtpu 0.0.42) of backward layers of Llama: the recomputed forward pass runs during the
    all-gather of a cotangent, the matmuls of weight gradients during the reduction of the next cotangent; all-reduces are
    asynchronous where reduce-scatters are, on the SparseCores. The compiler schedules from the end of a body: the last collective
    takes the last matmuls. It assumes a short latency of a reduction on the SparseCores (v5p, v6e): one matmul is concurrent with
    it, and none if no matmul follows from its result.
    """
    times, hidden = kernel_times(plan), hidden_collectives(plan)
    return {computation: _concurrent_in(plan, computation, times, hidden) for computation in async_collectives(plan)}


def _concurrent_in(
    plan: Plan, computation: Computation, times: Mapping[Kernel, KernelTime], hidden: Mapping[Collective, int]
) -> dict[Kernel, ConcurrentMatmuls]:
    """:func:`concurrent_matmuls` of one computation."""
    moves: dict[Kernel, float] = {}
    for kernel in computation.nodes:
        if kernel.name == "move!" and kernel.step is not None:
            sent = [c for c in separate_collectives(kernel.step) if c not in hidden and _is_async(plan, c)]
            seconds = sum(c.seconds or 0.0 for c in sent)
            if seconds:
                moves[kernel] = seconds
    if not moves:
        return {}
    matmuls = [kernel for kernel in computation.nodes if kernel.matmuls and kernel not in moves and kernel in times]
    both = [*moves, *matmuls]
    bits = {kernel: 1 << k for k, kernel in enumerate(both)}
    ancestors: dict[Kernel, int] = {}  # sets of moves and matmuls, as bits; each with itself
    for kernel in computation.nodes:
        mask = bits.get(kernel, 0)
        for buffer in kernel.ins:
            if buffer.made_by is not None:
                mask |= ancestors.get(buffer.made_by, 0)
        ancestors[kernel] = mask
    before = [ancestors[kernel] for kernel in both]
    followed = functools.reduce(operator.or_, before[len(moves) :], 0)
    free = list(range(len(moves), len(both)))[::-1]
    out: dict[Kernel, ConcurrentMatmuls] = {}
    for n, (move, seconds) in reversed([*enumerate(moves.items())]):
        left, taken, bit = seconds, list[Kernel](), bits[move]
        on_sparse_cores = move.step is not None and any(
            _on_sparse_cores(plan, c.op) for c in separate_collectives(move.step)
        )
        limit = int(bool(followed & bit)) if on_sparse_cores else len(matmuls)
        candidates = [k for k in free if not before[k] & bit and not before[n] >> k & 1] if limit else []
        while candidates and left > 0 and len(taken) < limit:
            k, *candidates = candidates
            left -= times[both[k]].seconds
            taken.append(both[k])
            free.remove(k)
            # each starts when the operands of both exist; what depends on one of them depends on both
            pair, ancestors_of_both = bit | 1 << k, before[n] | before[k]
            before = [mask | ancestors_of_both if mask & pair else mask for mask in before]
            candidates = [k for k in candidates if not before[k] & bit and not before[n] >> k & 1]
        out[move] = ConcurrentMatmuls(tuple(taken), max(0.0, left) / seconds)
    return out


def _on_sparse_cores(plan: Plan, op: CollectiveOp) -> bool:
    """Whether compiler options put reductions of this kind on the SparseCores: the chip's default is a synchronous one."""
    return (
        op in ("all-reduce", "reduce-scatter")
        and plan.chip is not None
        and op in plan.chip.compiler.sync_collectives
        and plan.is_async(op)
    )


def _is_async(plan: Plan, c: Collective) -> bool:
    """Whether a gather or reduction is asynchronous in programs for the plan's chip."""
    return c.op in ("all-gather", "reduce-scatter", "all-reduce") and plan.is_async(c.op)


@dataclass(slots=True)
class KernelSchedule:
    """The kernels of a computation in the order in which they run.

    Attributes:
      kernels: in this order.
      last_read: buffer → index of the last kernel that reads it.
      in_flight: index of a kernel → the buffers that stay live during it because a collective in flight reads or writes them.
    """

    kernels: list[Kernel]
    last_read: dict[Buffer, int] = field(default_factory=dict)
    in_flight: dict[int, list[Buffer]] = field(default_factory=dict)


@cached_on_plan
def kernel_schedules(plan: Plan) -> dict[Computation, KernelSchedule]:
    """For every computation, the order of its kernels, and the buffers of collectives in flight.

    The order is the program's, except in loop bodies: a matmul that is concurrent with a later collective (the gradient of a weight
    with the reduction of a cotangent) runs after it, as does all that depends on the matmul, and the collective's operand stays
    live until then. (Without loops, ResNet-50 with split features on v5e, the compiler's peak is that of the program's order.)

    A prefetched weight arrives while the matmul before its reader runs; a gradient is in flight until the next matmul ends: the TPU
    compiler (libtpu 0.0.42, default effort) was observed to schedule about one collective before and one after.
    """
    overlapped, concurrent, program = async_collectives(plan), concurrent_matmuls(plan), computation_of(plan)
    return {c: _schedule(c, overlapped[c], {} if c is program else concurrent[c]) for c in overlapped}


def _schedule(
    computation: Computation,
    overlapped: Mapping[Kernel, AsyncCollective],
    concurrent: Mapping[Kernel, ConcurrentMatmuls],
) -> KernelSchedule:
    """:func:`kernel_schedules` of one computation."""
    out = KernelSchedule(_in_order(computation, concurrent))
    kernels, in_flight = out.kernels, out.in_flight
    for k, kernel in enumerate(kernels):
        for buffer in kernel.reads:
            out.last_read[buffer] = k
    heavy = [i for i, k in enumerate(kernels) if k.matmuls or k.name in USER_KERNELS]
    end, index = len(kernels), {kernel: k for k, kernel in enumerate(kernels)}
    for move, collective in overlapped.items():
        j = index[move]
        if collective.prefetched:
            begin, after, buffers = max((i for i in heavy if i < j), default=j), j, [*move.writes]
        else:
            begin = j + 1
            after = end if collective.until_end else min((i + 1 for i in heavy if i > j), default=end)
            copies = [Buffer(b.bytes, b.value, move) for b in move.reads if collective.separate_result]
            buffers = [*move.reads, *copies]
        for i in range(begin, after):
            in_flight.setdefault(i, []).extend(buffers)
    for move, matmuls in concurrent.items():
        for kernel in matmuls.kernels:
            if index[kernel] > index[move]:
                in_flight.setdefault(index[kernel], []).extend(move.reads)
    return out


def _in_order(computation: Computation, concurrent: Mapping[Kernel, ConcurrentMatmuls]) -> list[Kernel]:
    """The kernels in program order, but each concurrent matmul after its collective, and what reads its result after that."""
    index = {kernel: float(k) for k, kernel in enumerate(computation.kernels)}
    delayed = {k: index[move] + 0.5 for move, m in concurrent.items() for k in m.kernels if index[k] < index[move]}
    if not delayed:
        return computation.kernels
    maker = {buffer: kernel for kernel in computation.kernels for buffer in kernel.writes}
    for kernel in computation.kernels:
        makers = [maker.get(buffer) for buffer in kernel.reads]
        after = [index[made] for made in makers if made is not None and made is not kernel]
        index[kernel] = max([index[kernel], delayed.get(kernel, 0.0), *after])
    return sorted(computation.kernels, key=index.__getitem__)


def prefetchable_moves(computation: Computation) -> Callable[[Kernel], bool]:
    """A function that says whether a ``move!`` kernel's operand comes from outside the computation (a weight).

    Light ops (elementwise ones, views, other moves) on such values count as outside too; what a loop carries does not.
    """
    inside, cache = set(computation.nodes), dict[Buffer, bool]()
    return lambda move: not any(_is_computed(buffer, computation, inside, cache) for buffer in move.ins)


def _is_computed(buffer: Buffer, computation: Computation, inside: set[Kernel], cache: dict[Buffer, bool]) -> bool:
    """Whether a buffer is carried by the computation's loop, or follows from a kernel inside that is not light."""
    if buffer.made_by is None or buffer.made_by not in inside:
        return buffer.carried and buffer in computation.inputs
    if buffer not in cache:
        light = buffer.made_by.name in _LIGHT
        cache[buffer] = not light or any(_is_computed(b, computation, inside, cache) for b in buffer.made_by.ins)
    return cache[buffer]
