"""How one array moves: one all-to-all and one all-gather if its devices stay, else rounds of permutes; nothing is sent twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ..compat.jax import axes_of_spec
from ..compat.quirks import before_exchange
from ..layout import Spec
from .factored import Factored, Parts, devices_of, factored, parts_of


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of the source that an array of the target is made of.

    Attributes:
      shape, sharding: of the array of the source.
      shift: the index in the target of its first element; negative where the target is a slice of it.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    shift: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """One step of a move by collectives: prime axes, and the parts that they leave and reach.

    Attributes:
      op: ``slice``: to parts; ``all-to-all``: from parts to others; ``all-gather``: from parts.
      axes: of the factored mesh.
      leaves, reaches: numbers of parts (:class:`moves.factored.Parts`), one for each axis; empty: none.
    """

    op: Literal["slice", "all-to-all", "all-gather"]
    axes: tuple[str, ...]
    leaves: tuple[int, ...] = ()
    reaches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """Blocks of one shape that are exchanged at once: a device sends at most one and receives at most one.

    Attributes:
      operand: the number of the array of the source.
      shape: of a block.
      pairs: (source, target) devices; a device that copies a block of its own is both.
      starts: for each device, the first index of its block in its shard of the source, and in its shard of the target.
    """

    operand: int
    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    starts: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class Route:
    """How an array of the target is made.

    Attributes:
      devices: of source and target, the source's first.
      sent, received: elements that each device sends to others and receives from others.
      mesh: source and target on the same devices as one mesh; None: they are not.
      parts, joints: of a move by collectives; None, empty: by rounds.
      rounds: of a move by permutes.
    """

    devices: tuple[Any, ...]
    sent: np.ndarray
    received: np.ndarray
    mesh: Factored | None = None
    parts: Parts | None = None
    joints: tuple[Joint, ...] = ()
    rounds: tuple[Round, ...] = ()

    def replaces(self, at: int) -> bool:
        """Whether a shard may be replaced in place, chunk by chunk along a part of its dims: the chunks are contiguous and as large
        on either side."""
        if self.parts is None:
            return True
        before, after = (self.parts.local(of) for of in (self.parts.have, self.parts.need))
        return math.prod(before) == math.prod(after) and math.prod(before[:at]) == math.prod(after[:at]) == 1

    @property
    def on_cpus(self) -> bool:
        """Whether its devices are CPUs."""
        return getattr(self.devices[0], "platform", "") == "cpu"


@lru_cache(maxsize=4096)
def route(operands: tuple[Operand, ...], shape: tuple[int, ...], target: NamedSharding) -> Route:
    """How an array of the target is made of arrays of the source.

    A device that has an element keeps it, and every other one receives it once. If the devices stay, and the target places no
    axis where the source has another one, this is one all-to-all and one all-gather over all axes together. Else each device
    receives its blocks from devices that have them, of the same slice where possible, in rounds of permutes.

    Args:
      shape: of the array of the target.
      target: its sharding.
    """
    meshes = *(o.sharding.mesh for o in operands), target.mesh
    devices = tuple(dict.fromkeys(d for mesh in meshes for d in devices_of(mesh)))  # each once
    same = operands[0].shape == shape and not any(operands[0].shift)
    mesh = factored(operands[0].sharding.mesh, target.mesh) if same and len(operands) == 1 else None
    if mesh is not None:
        before, after = (spec_of(s, len(shape)) for s in (operands[0].sharding, target))
        parts = parts_of(shape, before, after, mesh)
        joints = None if parts is None else _joints(parts, mesh)
        if parts is not None and joints is not None:
            # each device sends and receives the same
            sent = np.full(len(devices), sum(n for _, n in joint_elements(shape, mesh, parts, joints)))
            return Route(devices, sent, sent, mesh, parts, joints)
    return _by_rounds(operands, shape, target, devices, mesh)


def spec_of(sharding: NamedSharding, rank: int) -> Spec:
    return axes_of_spec(sharding.spec, rank)


# -- collectives


def _joints(parts: Parts, mesh: Factored) -> tuple[Joint, ...] | None:
    """The steps of a move by collectives; None: an axis goes to a part that another one has."""
    have, need = parts.have, parts.need
    taken = set(have.values())
    new = tuple(a for a in mesh.sizes if a in need and a not in have)
    moved = tuple(a for a in mesh.sizes if a in need and a in have and need[a] != have[a])
    gone = tuple(a for a in mesh.sizes if a in have and a not in need)
    if taken & {need[a] for a in (*new, *moved)}:
        return None
    joints = [
        Joint("slice", new, reaches=tuple(need[a] for a in new)),
        Joint("all-to-all", moved, tuple(have[a] for a in moved), tuple(need[a] for a in moved)),
        Joint("all-gather", gone, tuple(have[a] for a in gone)),
    ]
    return tuple(j for j in joints if j.axes)


def joint_elements(
    shape: Sequence[int], mesh: Factored, parts: Parts, joints: Sequence[Joint]
) -> list[tuple[int, int]]:
    """(elements of a shard after a step, elements that a device sends in it) of every step."""
    shard = math.prod(shape) // math.prod(mesh.sizes[a] for a in parts.have)
    out = []
    for joint in joints:
        group, before = math.prod(mesh.sizes[a] for a in joint.axes), shard
        shard = shard // group if joint.op == "slice" else shard * group if joint.op == "all-gather" else shard
        kept = {"slice": shard, "all-to-all": shard - shard // group, "all-gather": shard - before}[joint.op]
        out.append((shard, 0 if joint.op == "slice" else kept))
    return out


def follow(x: jax.Array, parts: Parts, mesh: Factored, joints: Sequence[Joint], cpu: bool) -> jax.Array:
    """The local array of the target, of a move by collectives; arrays have one dim for each part.

    Args:
      cpu: the devices are CPUs.
    """
    numbers = range(len(parts.sizes))
    for joint in joints:
        if joint.op == "slice":
            for axis, k in zip(joint.axes, joint.reaches, strict=True):
                x = lax.dynamic_index_in_dim(x, lax.axis_index(axis), k)
            continue
        rest = [k for k in numbers if k not in joint.reaches]
        x = x.transpose(*joint.reaches, *rest)
        x = x.reshape(-1, *x.shape[len(joint.reaches) :])  # blocks by the index of the device that they go to
        if joint.op == "all-to-all":
            x = lax.all_to_all(before_exchange(x, cpu), joint.axes, 0, 0, tiled=True)
        else:
            x = lax.all_gather(x, joint.axes, axis=0, tiled=True)
        kept = {k: n for k, n in zip(rest, x.shape[1:], strict=True) if k not in joint.leaves}
        x = x.reshape(*(mesh.sizes[a] for a in joint.axes), *kept.values(), *[1] * len(joint.reaches))
        order = [*joint.leaves, *kept, *joint.reaches]
        x = x.transpose([order.index(k) for k in numbers])
    return x


# -- permutes


def _boxes(sharding: NamedSharding, shape: Sequence[int]) -> np.ndarray:
    """[devices of the mesh, dims, 2]: the box of every device's shard."""
    sizes = dict(sharding.mesh.shape)
    index = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), sharding.mesh.size), strict=True))
    out = np.zeros((sharding.mesh.size, len(shape), 2), int)
    for i, (n, axes) in enumerate(zip(shape, spec_of(sharding, len(shape)), strict=True)):
        number, count = np.zeros(sharding.mesh.size, int), 1
        for axis in axes:
            number, count = number * sizes[axis] + index[axis], count * sizes[axis]
        out[:, i, 0] = number * (n // count)
        out[:, i, 1] = out[:, i, 0] + n // count
    return out


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _by_rounds(
    operands: Sequence[Operand],
    shape: tuple[int, ...],
    target: NamedSharding,
    devices: tuple[Any, ...],
    mesh: Factored | None,
) -> Route:
    """The route in rounds of permutes."""
    number = {d: k for k, d in enumerate(devices)}
    ends = [number[d] for d in devices_of(target.mesh)]
    goals = _boxes(target, shape)
    sent, received, n = np.zeros(len(devices)), np.zeros(len(devices)), len(devices)
    blocks: list[tuple[int, int, int, np.ndarray, np.ndarray, np.ndarray]] = []
    for k, operand in enumerate(operands):
        own = _boxes(operand.sharding, operand.shape) + np.array(operand.shift, int).reshape(-1, 1)
        holders: dict[bytes, list[int]] = {}
        for d, box in zip(devices_of(operand.sharding.mesh), own, strict=True):
            holders.setdefault(box.tobytes(), []).append(number[d])
        boxes = np.stack([np.frombuffer(key, int).reshape(-1, 2) for key in holders])
        of = list(holders.values())
        for t, goal in zip(ends, goals, strict=True):
            first, last = np.maximum(boxes[..., 0], goal[:, 0]), np.minimum(boxes[..., 1], goal[:, 1])
            for j in np.flatnonzero((first < last).all(-1)):
                size = last[j] - first[j]

                def cost(s: int, t: int = t) -> tuple[Any, ...]:
                    far = _slice_of(devices[s]) != _slice_of(devices[t])
                    return s != t, far, sent[s], (t - s) % n

                s = min(of[j], key=cost)
                blocks.append((k, s, t, size, first[j] - boxes[j, :, 0], first[j] - goal[:, 0]))
                if s != t:
                    sent[s] += size.prod()
                    received[t] += size.prod()
    rounds = _coloured(sorted(blocks, key=lambda b: (b[2] - b[1]) % n), n, len(shape))
    return Route(devices, sent, received, mesh, rounds=rounds)


def _coloured(blocks: Sequence[Any], n: int, rank: int) -> tuple[Round, ...]:
    """The blocks in rounds: each goes to the first round of its shape in which its devices are free."""
    rounds: dict[Any, list[tuple[set[int], dict[int, Any]]]] = {}  # → for each round, its sources, target → block
    for block in blocks:
        k, s, t, size, *_ = block
        of = rounds.setdefault((k, tuple(size.tolist())), [])
        if (free := next((r for r in of if t not in r[1] and s not in r[0]), None)) is None:
            of.append(free := (set(), {}))
        free[0].add(s)
        free[1][t] = block
    out = []
    for (k, shape), of in rounds.items():
        for _, r in of:
            starts = np.zeros((2, n, rank), int)
            for _, s, t, _, at_source, at_target in r.values():
                starts[0, s], starts[1, t] = at_source, at_target
            first, last = (tuple(map(tuple, table.tolist())) for table in starts)
            out.append(Round(k, shape, tuple((b[1], b[2]) for b in r.values()), (first, last)))
    return tuple(out)


def exchange(
    xs: Sequence[jax.Array], r: Route, shape: Sequence[int], axes: tuple[str, ...], target: Sequence[Any]
) -> jax.Array:
    """The local array of the target, of a move by permutes; zeros where the source has no element.

    Args:
      xs: the local arrays of the source.
      shape: of the local array of the target.
      axes: the mesh axes over all devices of the route.
      target: the devices of the target; on others the result has any values.
    """
    device, ends = lax.axis_index(axes), {r.devices.index(d) for d in target}
    out = jnp.zeros(tuple(shape), xs[0].dtype)
    for step in r.rounds:
        at_source, at_target = (jnp.asarray(table, jnp.int32)[device] for table in step.starts)
        at_source, at_target = ([at[i] for i in range(len(step.shape))] for at in (at_source, at_target))
        block = lax.dynamic_slice(xs[step.operand], at_source, step.shape)
        if any(s != t for s, t in step.pairs):
            block = lax.ppermute(before_exchange(block, r.on_cpus), axes, step.pairs)
        if not ends <= {t for _, t in step.pairs}:
            gets = np.zeros(len(r.devices), bool)
            gets[[t for _, t in step.pairs]] = True
            block = jnp.where(jnp.asarray(gets)[device], block, lax.dynamic_slice(out, at_target, step.shape))
        out = lax.dynamic_update_slice(out, block, at_target)
    return out
