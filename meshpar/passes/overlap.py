"""Products beside collectives: which gathers and which reduce-scatters are sent in blocks while products run.

A pass over a plan. For the gathers whose values products take, and the sums of products that are settled as reduce-scatters
(:mod:`meshpar.passes.finding`), it decides by what is expected to be left exposed (:mod:`meshpar.cost.exposed`), and lists what a
ring or a kernel sends instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..cost.exposed import (
    carried,
    devices_of,
    exposed_by,
    is_line,
    major_of,
    product_seconds,
    waits_for_nothing,
    warn_of_lines,
)
from ..dims import did_you_mean
from ..errors import UnsupportedError
from ..hardware.algorithms import AlgorithmName, wire_bytes
from ..hardware.chips import CollectiveOp
from ..hardware.collective_time import hop_seconds, seconds_of
from ..layout import Spec
from ..plan.collectives import Collective, local_shape
from .ahead import Free
from .finding import gather_of, scatter_of, uses_of
from .fused import fused_of
from .pairs import Choice, GatherRing, Overlap, ScatterRing
from .pairs import describe as plus

if TYPE_CHECKING:
    from ..plan.plan import Plan, Sent
    from ..program.ir import Value

MODES = ("auto", "xla", "ring", "pallas", "off")
"""``auto``: by cost, of ``xla`` and ``ring``; ``xla``, ``ring``: that way wherever it is possible; ``pallas``: by the fused TPU
kernel wherever it takes the pair, as ``auto`` elsewhere; ``off``: not looked for. ``xla`` and ``off`` give one program."""
LEAST = 5e-6
"""Seconds, once, that a ring must save."""
MOST = 64
"""Devices of the longest ring."""


def decide(plan: Plan, mode: str) -> None:
    """Decide for every pair of a plan, and list what is sent accordingly; before seconds are filled in.

    ``auto`` never takes the kernel: none that talks to other devices is a default before it was timed. Its reasons say where one
    would run.

    Args:
      mode: of :data:`MODES`.

    Raises:
      UnsupportedError: another mode.
    """
    if mode not in MODES:
        raise UnsupportedError(f"there is no overlap {mode!r}", fixes=did_you_mean(mode, MODES, "modes"))
    plan.overlap = mode
    if mode == "off":
        return
    uses = uses_of(plan)
    inside = carried(plan)
    taken, together = _together(plan, uses, inside)
    free = Free(plan, taken)
    for sent in plan.sent:
        pair = _pair(plan, sent, uses)
        if pair is None:
            continue
        chained = _chained(pair, inside)
        found = _decision(plan, sent, pair, mode, free, together.get(pair.axes) if chained else None, chained)
        plan.overlaps.append(found)
        if found.choice != "xla":
            _take(plan, sent, pair, found)
    warn_of_lines(plan)


# -- deciding


def _pair(plan: Plan, sent: Sent, uses: dict[int, int]) -> GatherRing | ScatterRing | None:
    return gather_of(plan, sent) if sent.users else scatter_of(plan, sent, uses)


def _chained(pair: GatherRing | ScatterRing, inside: set[int]) -> bool:
    """Whether a pair waits for others or others for it: all but gathers of weights do."""
    return isinstance(pair, ScatterRing) or not waits_for_nothing(pair.value, inside)


def _together(
    plan: Plan, uses: dict[int, int], inside: set[int]
) -> tuple[set[int], dict[tuple[str, ...], tuple[float, float]]]:
    """(ids of the products of all pairs; axes → seconds of a step that collectives of their own, and rings, leave exposed).

    What products of activations gather and scatter over the same axes is decided as a whole: between collectives of their own,
    which are synchronous, the compiler (libtpu 0.0.42) puts hardly a product beside the hops of a ring. Five mixtures were
    compiled, chosen pair by pair: each was longer than one of the pure forms, two of them longer than both. Gathers of weights,
    and sums of gradients on axes where nothing else is gathered, are each on their own.
    """
    if plan.chip is None:
        return set(), {}
    pairs = [(sent, pair) for sent in plan.sent if (pair := _pair(plan, sent, uses)) is not None]
    taken = {id(op) for _, p in pairs for op, _ in (p.dots if isinstance(p, GatherRing) else p.leaves)}
    free = Free(plan, taken)
    chained = {p.axes for _, p in pairs if isinstance(p, GatherRing) and _chained(p, inside)}
    found: dict[tuple[str, ...], tuple[float, float]] = {}
    for sent, pair in pairs:
        idle = devices_of(plan, pair.axes) == 1 or 0 in pair.value.shape
        if idle or pair.axes not in chained or not _chained(pair, inside):
            continue
        others = free.beside(sent) if isinstance(pair, GatherRing) else []
        seconds = [product_seconds(plan, plan.chip, op) for op in others]
        once = exposed_by(plan, plan.chip, sent, pair, ring_collectives(plan, sent, pair), None, True, seconds)
        free.take(sent, others)
        count, (xla, ring) = sent.count or 1, found.get(pair.axes, (0.0, 0.0))
        found[pair.axes] = xla + count * once["xla"], ring + count * once["ring"]
    return taken, found


def _decision(
    plan: Plan, sent: Sent, pair: GatherRing | ScatterRing, mode: str, free: Free,
    whole: tuple[float, float] | None, chained: bool,
) -> Overlap:  # fmt: skip
    gather = isinstance(pair, GatherRing)
    dots = [op for op, _ in (pair.dots if isinstance(pair, GatherRing) else pair.leaves)]
    kind = "gather" if gather else "scatter"
    devices = devices_of(plan, pair.axes)
    idle = devices == 1 or 0 in pair.value.shape
    stages = [] if idle else major_of(plan, pair.axes)
    fused = fused_of(plan, pair, stages) if mode in ("auto", "pallas") else ""
    exposed, others = None, []
    if plan.chip is not None:
        part = None if isinstance(fused, str) else fused
        others = free.beside(sent) if gather else []
        seconds = [product_seconds(plan, plan.chip, op) for op in others]
        exposed = exposed_by(plan, plan.chip, sent, pair, ring_collectives(plan, sent, pair), part, chained, seconds)
    choice, reason = "xla", ""
    if idle:
        reason = "nothing is sent"
    elif mode == "xla":
        reason = "as asked for"
    elif mode == "ring":
        choice, reason = "ring", "as asked for"
    elif mode == "pallas" and not isinstance(fused, str):
        choice, reason = "pallas", "as asked for: one kernel sends blocks while it multiplies others"
        pair.fused = fused  # type: ignore[assignment]
    else:
        choice, reason = _by_cost(devices, exposed, gather, whole)
        if mode == "pallas":
            reason = f"no kernel: {fused}; {reason}"
        elif not isinstance(fused, str):
            reason += '; a fused kernel would run it too (overlap="pallas"), but none was timed yet'
    if others:
        free.take(sent, others)
    if exposed is not None and any(map(is_line, stages)):
        reason += f"; {plus(pair.axes)} is no ring of the torus, so that hops share links"
    return Overlap(kind, choice, reason, sent.collectives[0].tensor, pair.axes, len(dots), sent.count, exposed, dots[0])


def _by_cost(
    devices: int, exposed: dict[str, float] | None, gather: bool, whole: tuple[float, float] | None
) -> tuple[Choice, str]:
    """A collective of its own, or a ring; and why.

    Args:
      whole: seconds of a step that these two leave exposed of all pairs that are decided together; None: it is on its own.
    """
    if exposed is None:
        return "xla", "the chip is not known"
    if devices > MOST:
        return "xla", f"a ring of {devices} devices is longer than {MOST}"
    xla, ring = whole or (exposed["xla"], exposed["ring"])
    if xla - ring < LEAST:
        if exposed["xla"] == 0:
            return "xla", "the compiler sends for it while other products run"
        few = "the products of a block are too short to hide a hop, and what stands between hops"
        return "xla", few if ring else "there is too little to gain"
    while_what = "others are multiplied" if gather else "the next are made"
    of = "" if whole is None or xla == exposed["xla"] else " of all over these axes"
    return "ring", f"blocks travel while {while_what}: {100 * (1 - ring / xla):.0f} % hidden{of}"


# -- what is sent in blocks


def _take(plan: Plan, sent: Sent, ring: GatherRing | ScatterRing, found: Overlap) -> None:
    """Run a pair on a ring or by a kernel: note how, and list what it sends."""
    if isinstance(ring, GatherRing):
        plan.rings.gathers.update((id(op), ring) for op, _ in ring.dots)
        if ring.keep:
            plan.rings.kept[id(sent.frame), id(ring.value), ring.need] = ring
    else:
        plan.rings.scatters[id(ring.value)] = ring
        _pend(plan, ring.value, {id(op) for op, _ in ring.leaves}, devices_of(plan, ring.axes))
    old = sent.collectives[0]
    at = next(i for i, c in enumerate(plan.collectives) if c is old)
    new = ring_collectives(plan, sent, ring)
    for c in new:
        c.algorithm = "pallas" if c.algorithm == "ring" and found.choice == "pallas" else c.algorithm
    plan.collectives[at : at + 1] = new
    plan.rings.sent.update(map(id, new))


def _pend(plan: Plan, value: Value, leaves: set[int], parts: int) -> None:
    plan.rings.pending.add(id(value))
    plan.rings.parts[id(value)] = parts
    if value.op is not None and id(value.op) not in leaves:
        for v in value.op.ins:
            if v is not None:
                _pend(plan, v, leaves, parts)


def ring_collectives(plan: Plan, sent: Sent, ring: GatherRing | ScatterRing) -> list[Collective]:
    """What is sent instead of one collective: its minor stages as before, the major one hop by hop."""
    from meshpar_kernels.collective_matmul.schedule import gather_hops

    old = sent.collectives[0]
    devices = devices_of(plan, ring.axes)
    minor = math.prod(plan.sizes[a] for a in ring.axes) // devices
    gather = isinstance(ring, GatherRing)
    spec: Spec = sent.need if gather else sent.have
    shape = local_shape(ring.value.shape, spec, plan.sizes)
    size = old.bytes * (devices * minor) / (devices * minor - 1)  # of the whole array on a device
    rows = shape[ring.dim] // devices
    out = []
    for h in gather_hops(devices, rows):
        hop = _like(old, "collective-permute", size * h.rows / shape[ring.dim], "ring")
        hop.count = None if sent.count is None else sent.count * h.count
        if plan.chip is not None:
            both = hop_seconds(hop.bytes, major_of(plan, ring.axes)[0], plan.chip)
            hop.seconds = both / min(2, devices - 1)
        out.append(hop)
    if minor > 1:
        inner = [s for a in ring.axes for s in plan.torus[a] if s.size > 1][1:]
        algorithm: AlgorithmName = "staged" if old.op == "reduce-scatter" else "native"
        part = _like(old, old.op, wire_bytes(old.op, size / devices, minor), algorithm)
        part.first = 1
        if plan.chip is not None:
            part.seconds = seconds_of(old.op, size / devices, inner, plan.chip, part.algorithm)
        out = [part, *out] if gather else [*out, part]
    return out


def _like(old: Collective, op: CollectiveOp, size: float, algorithm: AlgorithmName) -> Collective:
    return Collective(
        op,
        old.axes,
        old.tensor,
        old.dims,
        old.shape,
        old.dtype,
        size,
        old.count,
        old.cause,
        old.origin,
        algorithm=algorithm,
    )
