"""The plan of a move: the route of every array, its bytes and seconds, rounds that bound the memory, and the peak."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..global_arrays import is_key
from ..hardware.chips import Chip
from ..hardware.collective_ops import collective_volume
from ..hardware.collective_time import seconds_of
from ..hardware.topology import Places, Stage, torus_of
from ..plan.collectives import Collective, CollectiveOp
from ..plan.shard_shapes import itemsize_of, local_shape
from .route import Operand, Route, joint_elements, spec_of

K = TypeVar("K", bound=Hashable)

MAX_ROUND_SHARE = 0.1
"""Fraction of the bytes of a device that a round may need in addition."""
MIN_ROUND_BYTES = 2**25
"""Bytes that a round may always need: smaller rounds and chunks would take longer, for little memory."""

LINKS = {"slice": "DCN", "switch": "NVLink", "core": "chip", "": "links"}
"""Dim of a torus stage → the kind of its links in reports; all others are ICI."""


@dataclass(frozen=True)
class MovedArray:
    """An array of the target, and how it is made.

    Attributes:
      path: in the tree of the target.
      sources: paths of the arrays of the source that it is made of; several: it is their concatenation.
      dims: the names of its dims on either side, ``batch seq → batch cache`` where they differ.
      shape: its global shape.
      old_dtype, dtype: before and after; the narrower one is sent.
      operands: the arrays of the source.
      sharding: after the move.
      route: how it moves; None: ``jax.device_put`` copies it from host memory, or it is a random key.
      chip: of its devices; None: not known.
      chunks: (number of a part of its dims, number of chunks along it that are moved sequentially); (0, 1): all at once.
      in_place: a donated array is replaced chunk by chunk.
    """

    path: str
    sources: tuple[str, ...]
    dims: str
    shape: tuple[int, ...]
    old_dtype: Any
    dtype: Any
    operands: tuple[Operand, ...]
    sharding: NamedSharding
    route: Route | None
    chip: Chip | None
    chunks: tuple[int, int] = (0, 1)
    in_place: bool = False

    @property
    def wire(self) -> float:
        """Bytes of an element that is sent."""
        return min(itemsize_of(self.old_dtype), itemsize_of(self.dtype))

    @property
    def before(self) -> float:
        """Bytes of a shard of its operands; in host memory 0."""
        if self.route is None:
            return 0.0
        return itemsize_of(self.old_dtype) * sum(_elements(o.sharding, o.shape) for o in self.operands)

    @property
    def after(self) -> float:
        """Bytes of a shard of the target."""
        return itemsize_of(self.dtype) * _elements(self.sharding, self.shape)

    @property
    def temporary(self) -> float:
        """Bytes that its round needs in addition to the arrays: two copies of a block or chunk on the way."""
        if self.route is None:
            return 0.0
        if self.route.rounds:
            chunk = max(self.before, self.after) * (self.chunks[1] > 1)
            return (2 * self.wire * max(math.prod(r.shape) for r in self.route.rounds) + chunk) / self.chunks[1]
        return 2 * max(self.before, self.after) / self.chunks[1] if self.route.joints else 0.0

    @cached_property
    def traffic(self) -> list[tuple[Collective, dict[str, float]]]:
        """(a collective, kind of link → bytes that a device sends over it in all its runs, at most)."""
        if self.route is None:
            return []
        return list((_permutes if self.route.rounds else _exchanges)(self, self.route))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in which a device sends."""
        return tuple(c for c, _ in self.traffic)

    @property
    def links(self) -> dict[str, float]:
        """Kind of link → bytes that a device sends over it: ``ICI``, ``NVLink``, ``DCN``, ``host``, ``links`` if not known."""
        if self.route is None and not is_key(self):
            return {"host": self.after}
        return sum_by_key(links for _, links in self.traffic)

    def collective(
        self, op: CollectiveOp, axes: tuple[str, ...], n: float, calls: int, seconds: float | None
    ) -> Collective:
        """The record of a collective that runs ``calls`` times; each sends ``n`` bytes and takes ``seconds``."""
        names = self.dims.split(" → ")
        before, after = _rules(names[0], self.operands[0].sharding), _rules(names[-1], self.sharding)
        sent = self.old_dtype if itemsize_of(self.old_dtype) == self.wire else self.dtype
        cause = f"{before} before, {after} after"
        return Collective(op, axes, self.path, self.dims, self.shape, str(sent), n, calls, cause, seconds=seconds)

    def chunked(self, donate: bool, most: float) -> MovedArray:
        """The array in chunks of at most ``most`` bytes, as far as its first dim allows; a donated one in place where it can be."""
        if self.route is None:
            return self
        size, same = max(self.before, self.after), self.before == self.after and self.old_dtype == self.dtype
        if self.route.parts is not None and not self.route.joints:  # it stays as it is
            return replace(self, in_place=donate and same)
        if size <= most:
            return self
        at, count = chunks_of(self.route, self.shape, most, size)
        return replace(self, chunks=(at, count), in_place=donate and count > 1 and same and self.route.replaces(at))


def sum_by_key(tables: Iterable[Mapping[K, float]]) -> dict[K, float]:
    """Key → the sum of its values in some tables."""
    total: Counter[K] = Counter()
    for table in tables:
        total.update(table)
    return dict(total)


def _elements(sharding: NamedSharding, shape: Sequence[int]) -> int:
    return math.prod(local_shape(shape, spec_of(sharding, len(shape)), dict(sharding.mesh.shape)))


def _rules(dims: str, sharding: NamedSharding) -> str:
    """The sharding of an array as rules, of the dims that are sharded."""
    names = dims.split()
    axes = spec_of(sharding, len(names)) if len(names) >= len(sharding.spec) else ()
    rules = "; ".join(f"{name}: {'+'.join(of)}" for name, of in zip(names, axes, strict=False) if of)
    return f"`{rules}`" if rules else f"`{sharding.spec}`" if any(sharding.spec) else "replicated"


def chunks_of(route: Route, shape: Sequence[int], most: float, size: float) -> tuple[int, int]:
    """The part of the dims, sharded on neither side, and the number of chunks along it with which no chunk of an array has more
    than ``most`` bytes, or as few as possible: along the first dim if it is such a part, since an array is then replaced in place.

    Args:
      size: bytes of the larger shard.
    """
    if route.parts is None:  # by rounds: the first dim, if no block is a part of it
        unsplit = shape and all(r.operand == 0 and r.shape[0] == shape[0] for r in route.rounds)
        free = {0: shape[0]} if unsplit else {}
    else:
        sharded = {*route.parts.have.values(), *route.parts.need.values()}
        free = {k: n for k, n in enumerate(route.parts.sizes) if k not in sharded and route.joints}
    fits = {k: next((c for c in range(1, n + 1) if n % c == 0 and size / c <= most), n) for k, n in free.items()}
    return min(fits.items(), key=lambda x: (size / x[1] > most, x[0]), default=(0, 1))


# -- traffic


def _exchanges(array: MovedArray, route: Route) -> Iterator[tuple[Collective, dict[str, float]]]:
    """The traffic of an array that moves by one all-to-all and one all-gather."""
    assert route.parts is not None
    assert route.mesh is not None
    chunks, chip = array.chunks[1], array.chip
    torus = torus_of(program_mesh(route)) if isinstance(array.sharding.mesh, Mesh) else {}
    of = {name: axis for axis, names in route.mesh.source.items() for name in names}
    steps = zip(route.joints, joint_elements(array.shape, route.mesh, route.parts, route.joints), strict=True)
    for joint, (_, sent) in steps:
        if joint.op == "slice":
            continue
        stages = [s for a in joint.axes for s in torus.get(a, (Stage(route.mesh.sizes[a]),))]
        n, group = sent * array.wire / chunks, math.prod(s.size for s in stages)
        seconds = None if chip is None else seconds_of(joint.op, collective_volume(joint.op, n, group), stages, chip)
        c = array.collective(joint.op, tuple(dict.fromkeys(of[a] for a in joint.axes)), n, chunks, seconds)
        sends = c.entry.stage_bytes(joint.op, n, [s for s in stages if s.size > 1])
        yield c, sum_by_key({LINKS.get(stage.dim, "ICI"): each * chunks} for stage, each in sends)


def _permutes(array: MovedArray, route: Route) -> Iterator[tuple[Collective, dict[str, float]]]:
    """The traffic of an array that moves in rounds of permutes."""
    sending, chip = [r for r in route.rounds if any(s != t for s, t in r.pairs)], array.chip
    if not sending:
        return
    has_places = chip is not None and not chip.switch and getattr(route.devices[0], "coords", None) is not None
    places = Places.of(np.array(route.devices, dtype=object)) if has_places else None
    kinds: dict[str, np.ndarray] = {}
    seconds = 0.0
    for step in sending:
        size, slowest, hops = math.prod(step.shape) * array.wire, 0.0, []
        for s, t in step.pairs:
            if s == t:
                continue
            dim, count = _link(route.devices[s], route.devices[t], (s, t), places, chip)
            kinds.setdefault(LINKS.get(dim, "ICI"), np.zeros(len(route.devices)))[s] += size
            hops.append(count)
            if chip is not None:
                slowest = max(slowest, chip.latency * count, size / chip.rate(dim))
        # messages over several links share them: each device has a link in each dimension of the torus
        crowd = 1.0 if chip is None else max(1.0, sum(hops) / len(hops) / max(1, len(chip.torus)))
        seconds += slowest * crowd
    calls = len(sending) * array.chunks[1]
    n, each = float(route.sent.max()) * array.wire / calls, None if chip is None else seconds / calls
    record = array.collective("collective-permute", ("devices",), n, calls, each)
    yield record, {kind: float(sent.max()) for kind, sent in kinds.items()}


def _link(a: Any, b: Any, pair: tuple[int, int], places: Places | None, chip: Chip | None) -> tuple[str, int]:
    """(dim of the links between two devices, number of links that a message passes)."""
    if places is not None:
        stage, hops = places.hop(pair)
        return ("slice", 1) if getattr(a, "slice_index", 0) != getattr(b, "slice_index", 0) else (stage.dim, hops)
    if chip is None:
        return "", 1
    return ("switch" if a.process_index == b.process_index else "slice"), 1


def program_mesh(route: Route) -> Mesh:
    """The mesh on which a route runs: the prime axes, or one axis ``devices``."""
    sizes = {"devices": len(route.devices)} if route.mesh is None or not route.mesh.sizes else route.mesh.sizes
    return Mesh(np.array(route.devices, dtype=object).reshape(tuple(sizes.values())), tuple(sizes))


# -- rounds and memory


def ordered(arrays: Iterable[MovedArray]) -> list[MovedArray]:
    """The arrays in the order with the lowest peak, as the donated ones are freed one after the other (Johnson, 1954): first those
    that shrink, the smallest result first, then those that grow, the largest source first."""
    return sorted(arrays, key=lambda a: (a.after >= a.before, a.after if a.after < a.before else -a.before))


def rounds_of(arrays: Sequence[MovedArray], most: float) -> tuple[tuple[MovedArray, ...], ...]:
    """The arrays in rounds, each a program that needs at most ``most`` bytes in addition, or has one array."""
    rounds: list[list[MovedArray]] = []
    key: Any = None
    total = 0.0
    for array in arrays:
        need = array.temporary if array.in_place else array.temporary + max(array.before, array.after)
        own = None if array.route is None else (array.route.devices, array.route.mesh and tuple(array.route.mesh.sizes))
        if not rounds or own != key or total + need > most:
            rounds.append([])
            key, total = own, 0.0
        rounds[-1].append(array)
        total += need
    return tuple(map(tuple, rounds))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device during a move.

    Attributes:
      source, target: of all arrays before and after.
      peak: the most that are allocated at once on a device that has both; without donation at least their sum.
      round: of the peak, from 0.
    """

    source: float
    target: float
    peak: float
    round: int


@dataclass(frozen=True, slots=True)
class Side:
    """Source or target of a move, in words.

    Attributes:
      mesh: axis → size; layout: as text; "": not given as rules.
      devices: their number.
    """

    mesh: Mapping[str, int]
    layout: str
    devices: int


@dataclass(frozen=True, eq=False)
class MovePlan:
    """What each device sends and needs in a move; :class:`moves.move.Move` describes the attributes."""

    rounds: tuple[tuple[MovedArray, ...], ...]
    source: Side
    target: Side
    donate: bool

    @cached_property
    def arrays(self) -> tuple[MovedArray, ...]:
        """The arrays of all rounds."""
        return tuple(a for of in self.rounds for a in of)

    @property
    def chip(self) -> Chip | None:
        """The chip of the devices; None: not known, and there are no seconds."""
        return self.arrays[0].chip

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the move, with dims, axes, bytes, count, cause."""
        return tuple(c for a in self.arrays for c in a.collectives)

    def _largest(self, elements: Callable[[Route], np.ndarray]) -> int:
        """The largest of the bytes of each device, from the elements of each device in a route."""
        routes = ((a.route, a.wire) for a in self.arrays if a.route is not None)
        tables = (dict(zip(r.devices, elements(r) * wire, strict=True)) for r, wire in routes)
        return int(max(sum_by_key(tables).values(), default=0))

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that a device sends, at most."""
        return self._largest(lambda route: route.sent)

    @cached_property
    def bytes_received(self) -> int:
        """Bytes that a device receives, at most: the elements that it needs and does not have."""
        return self._largest(lambda route: route.received)

    @property
    def links(self) -> dict[str, float]:
        """Kind of link (``ICI``, ``NVLink``, ``DCN``, ``host``; ``links``: not known) → bytes that a device sends over it."""
        return sum_by_key(a.links for a in self.arrays)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds, one collective after the other; None: the chip is not known."""
        if self.chip is None:
            return None
        copies = self.links.get("host", 0.0) / self.chip.per_device().host_link
        return sum(c.total_seconds for c in self.collectives) + copies

    @cached_property
    def memory(self) -> Memory:
        """Bytes of a device that has the source and the target of all arrays, before and after the move, and at its peak."""
        last = {path: k for k, of in enumerate(self.rounds) for a in of for path in a.sources}
        sent = [(a, p, o) for a in self.arrays if a.route for p, o in zip(a.sources, a.operands, strict=True)]
        sizes = {p: itemsize_of(a.old_dtype) * _elements(o.sharding, o.shape) for a, p, o in sent}
        source, target = sum(sizes.values()), sum(a.after for a in self.arrays)
        live, peak, at = source, source, 0
        for k, of in enumerate(self.rounds):
            grows = sum(a.after for a in of if not a.in_place)
            during = live + grows + sum(a.temporary for a in of)
            if during > peak:
                peak, at = during, k
            freed = {p for a in of for p in a.sources if self.donate and last[p] == k}
            live += sum(a.after for a in of) - sum(sizes.get(p, 0.0) for p in freed)
        return Memory(source, target, peak, at)

    @property
    def rounds_text(self) -> str:
        """``3 programs, 12 collectives``."""
        calls, n = sum(c.runs for c in self.collectives), len(self.rounds)
        return f"{n} program{'s' * (n != 1)}, {calls} collective{'s' * (calls != 1)}"

    def to_json(self) -> str:
        """The move as JSON: source, target, bytes, links, seconds, memory, and every array."""

        def facts(a: MovedArray) -> dict[str, Any]:
            given = {name: getattr(a, name) for name in ("path", "sources", "dims", "shape")}
            specs = {"before": [str(o.sharding.spec) for o in a.operands], "after": str(a.sharding.spec)}
            sent = {"links": a.links, "collectives": [c.to_dict() for c in a.collectives]}
            return {**given, "dtype": str(a.dtype), **specs, **sent}

        sides = {"source": asdict(self.source), "target": asdict(self.target)}
        numbers = {k: getattr(self, k) for k in ("bytes_sent", "bytes_received", "links", "seconds", "donate")}
        arrays = {"rounds": len(self.rounds), "arrays": list(map(facts, self.arrays))}
        return json.dumps({**sides, **numbers, "memory": asdict(self.memory), **arrays})
