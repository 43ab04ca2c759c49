"""Products beside collectives: which gathers and which reduce-scatters are sent in blocks while products run.

A pass over a plan. It finds the gathers whose values products take, and the sums of products that are settled as
reduce-scatters; decides for each, by what is expected to be left exposed; and lists what a ring sends instead.

The rule, with A devices on a ring, t the seconds of a hop (blocks go both ways at once), m those of the products of a block:

- a collective of its own is exposed for as long as it takes; but the gather of what waits for nothing (a weight) is not: the
  TPU compiler sends for it while the products before it run;
- a ring takes ``(A-1)/2`` steps of ``max(t, 2·m)``, the first of ``max(t, m)``, and if A is even a last one of ``max(t/2, m)``;
  what that is longer than the products themselves is exposed;
- every block costs a start, a contracted block reads and writes the float32 sum once more, and rows that do not fill the matrix
  unit are paid for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._compat import scan_counts
from ..dims import did_you_mean
from ..errors import UnsupportedError
from ..layout import Spec
from ..program.graph import Frame, Op, Value
from .collectives import Collective, CollectiveOp, Form, form_of, local_shape, settlement, wire_bytes
from .flops import padded_flops
from .fusion import FUSED, VIEWS
from .hardware import Chip, hop_seconds, seconds_of, volume_of
from .pairs import GatherRing, Overlap, ScatterRing, describe
from .relayout import part_of, relayout
from .torus import Stage

if TYPE_CHECKING:
    from .plan import Plan, Sent

MODES = ("auto", "xla", "ring", "off")
"""``auto``: by cost; ``xla``, ``ring``: that way wherever it is possible; ``off``: not looked for. ``xla`` and ``off`` give one
program."""
BLOCK = 2e-6
"""Seconds that starting the products of one more block takes."""
LEAST = 5e-6
"""Seconds, once, that a ring must save."""
MOST = 64
"""Devices of the longest ring."""


def decide(plan: Plan, mode: str) -> None:
    """Decide for every pair of a plan, and list what is sent accordingly; before seconds are filled in.

    Args:
      mode: of :data:`MODES`.

    Raises:
      UnsupportedError: another mode.
    """
    if mode == "pallas":
        raise UnsupportedError(
            'overlap="pallas": the compiler has no fused kernel for general products yet',
            fixes=['overlap="ring", or overlap="auto"', "or call meshpar_kernels.all_gather_matmul in a shard_map"],
        )
    if mode not in MODES:
        raise UnsupportedError(f"there is no overlap {mode!r}", fixes=did_you_mean(mode, MODES, "modes"))
    plan.overlap = mode
    if mode == "off":
        return
    uses = _uses(plan)
    for sent in plan.sent:
        ring = _gather(plan, sent) if sent.users else _scatter(plan, sent, uses)
        if ring is None:
            continue
        found = _decision(plan, sent, ring, mode)
        plan.overlaps.append(found)
        if found.choice == "ring":
            _take(plan, sent, ring)


# -- deciding


def _decision(plan: Plan, sent: Sent, ring: GatherRing | ScatterRing, mode: str) -> Overlap:
    gather = isinstance(ring, GatherRing)
    dots = [op for op, _ in (ring.dots if isinstance(ring, GatherRing) else ring.leaves)]
    first = sent.collectives[0]
    devices = _devices(plan, ring.axes)
    exposed = None if plan.chip is None else _exposed(plan, plan.chip, sent, ring, dots)
    choice, reason = "xla", ""
    if devices == 1 or 0 in ring.value.shape:
        reason = "nothing is sent"
    elif mode == "xla":
        reason = "as asked for"
    elif mode == "ring":
        choice, reason = "ring", "as asked for"
    elif exposed is None:
        reason = "the chip is not known"
    elif devices > MOST:
        reason = f"a ring of {devices} devices is longer than {MOST}"
    elif exposed["xla"] == 0:
        reason = "it waits for nothing: the compiler sends for it while other products run"
    elif exposed["xla"] - exposed["ring"] < LEAST:
        reason = (
            "the products of a block are too short to hide a hop" if exposed["ring"] else "there is too little to gain"
        )
    else:
        choice = "ring"
        hidden = 1 - exposed["ring"] / exposed["xla"]
        reason = f"blocks travel while {'others are multiplied' if gather else 'the next are made'}: {100 * hidden:.0f} % hidden"
    if exposed is not None and not all(s.wraps for s in _major(plan, ring.axes)):
        reason += f"; {describe(ring.axes)} is no ring of the torus, so that hops share links"
    return Overlap(
        "gather" if gather else "scatter", choice, reason, first.tensor, ring.axes, len(dots), sent.count, exposed,
        dots[0].eqn,
    )  # fmt: skip


def _major(plan: Plan, axes: Sequence[str]) -> list[Stage]:
    """The stage that the ring runs over: the major one of the torus."""
    return [s for a in axes for s in plan.torus[a] if s.size > 1][:1]


def _devices(plan: Plan, axes: Sequence[str]) -> int:
    return math.prod(s.size for s in _major(plan, axes))


def _exposed(plan: Plan, chip: Chip, sent: Sent, ring: GatherRing | ScatterRing, dots: list[Op]) -> dict[str, float]:
    """Seconds, once, in which nothing is multiplied: of a collective of its own, and of a ring."""
    device = chip.per_device()
    stages = [s for a in ring.axes for s in plan.torus[a]]
    first = sent.collectives[0]
    alone = seconds_of(first.op, volume_of(first, plan.sizes), stages, chip, first.form)
    total = 0.0
    for op in dots:
        rate = device.matmul_rate(str(op.eqn.invars[0].aval.dtype)) * chip.matmul_efficiency
        total += padded_flops(op, plan, chip.lanes) / rate
    devices, (stage, *_) = _devices(plan, ring.axes), _major(plan, ring.axes) or [Stage(1)]
    new = _ring_collectives(plan, sent, ring)
    rest = sum(c.seconds or 0.0 for c in new if c.form != "ring")
    hop = hop_seconds(max((c.bytes for c in new if c.form == "ring"), default=0.0), stage, chip)
    block = total / devices + BLOCK * len(dots)
    block += _again(plan, ring, devices) / (device.hbm_bandwidth * chip.hbm_efficiency)
    took, steps = block, (devices - 1) // 2
    if steps:
        took = max(hop, block) + (steps - 1) * max(hop, 2 * block) + 2 * block
    if devices % 2 == 0:
        took += max(0.0, hop / (1 if devices == 2 else 2) - 2 * block) + block
    if isinstance(ring, GatherRing) and _waits_for_nothing(ring.value, _carried(plan)):
        alone = 0.0
    return {"xla": alone, "ring": rest + max(0.0, took - total)}


def _again(plan: Plan, ring: GatherRing | ScatterRing, devices: int) -> float:
    """Bytes that each block reads and writes beside what the products do at once: sums over contracted blocks, in float32."""
    if isinstance(ring, ScatterRing) or devices == 1:
        return 0.0
    found = 0.0
    for op, side in ring.dots:
        (lc, rc), _ = op.eqn.params["dimension_numbers"]
        if ring.dim in (lc, rc)[side]:
            found += 8.0 * math.prod(local_shape(op.outs[0].shape, plan.ops[id(op)].outs[0], plan.sizes))
    return found


def _waits_for_nothing(value: Value, carried: set[int]) -> bool:
    """Whether a value follows from what its body is given for reading (a weight), not from what it carries or makes."""
    todo, seen = [value], set[int]()
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if v.op is not None:
            if v.op.name not in FUSED | VIEWS:
                return False
            todo += [x for x in v.op.ins if x is not None]
        elif id(v) in carried:
            return False
    return True


def _carried(plan: Plan) -> set[int]:
    """Ids of what loops carry, as their bodies see it."""
    found: set[int] = set()
    for op in plan.program.root.walk():
        if op.name == "scan":
            nc, nk = scan_counts(op.eqn.params)
            found.update(map(id, op.frames[0].ins()[nc : nc + nk]))
        elif op.name == "while":
            found.update(id(v) for f in op.frames for v in f.ins())
    return found


# -- what a ring sends


def _take(plan: Plan, sent: Sent, ring: GatherRing | ScatterRing) -> None:
    """Run a pair on a ring: note how, and list what it sends."""
    if isinstance(ring, GatherRing):
        plan.rings.gathers.update((id(op), ring) for op, _ in ring.dots)
        if ring.keep:
            plan.rings.kept[id(sent.frame), id(ring.value), ring.need] = ring
    else:
        plan.rings.scatters[id(ring.value)] = ring
        _pend(plan, ring.value, {id(op) for op, _ in ring.leaves})
    old = sent.collectives[0]
    at = next(i for i, c in enumerate(plan.collectives) if c is old)
    new = _ring_collectives(plan, sent, ring)
    plan.collectives[at : at + 1] = new
    plan.rings.sent.update(map(id, new))


def _pend(plan: Plan, value: Value, leaves: set[int]) -> None:
    plan.rings.pending.add(id(value))
    if value.op is not None and id(value.op) not in leaves:
        for v in value.op.ins:
            if v is not None:
                _pend(plan, v, leaves)


def _ring_collectives(plan: Plan, sent: Sent, ring: GatherRing | ScatterRing) -> list[Collective]:
    """What is sent instead of one collective: its minor stages as before, the major one hop by hop."""
    from meshpar_kernels.collective_matmul.schedule import gather_hops

    old = sent.collectives[0]
    devices = _devices(plan, ring.axes)
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
            both = hop_seconds(hop.bytes, _major(plan, ring.axes)[0], plan.chip)
            hop.seconds = both / min(2, devices - 1)
        out.append(hop)
    if minor > 1:
        part = _like(old, old.op, wire_bytes(old.op, size / devices, minor), old.form)
        part.first = 1
        if plan.chip is not None:
            inner = [s for a in ring.axes for s in plan.torus[a] if s.size > 1][1:]
            part.seconds = seconds_of(old.op, size / devices, inner, plan.chip, form_of(old.op, inner))
        out = [part, *out] if gather else [*out, part]
    return out


def _like(old: Collective, op: CollectiveOp, size: float, form: Form) -> Collective:
    return Collective(
        op, old.axes, old.tensor, old.dims, old.shape, old.dtype, size, old.count, old.cause, old.origin, form=form
    )
