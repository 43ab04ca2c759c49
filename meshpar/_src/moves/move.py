"""The result of ``mp.move``: a plan that prints itself, and a function that runs it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...errors import UnsupportedError
from ..compat import nnx
from ..dims import did_you_mean
from ..global_arrays import place
from ..hardware.chips import Chip
from ..plan.collectives import Collective
from ..pods.names import by_name, nested
from ..report import Document
from .plan import Memory, MovedArray, memory_of
from .report import move_html, move_renderable, move_title
from .run import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Source or target of a move, in words.

    Attributes:
      mesh: axis → size; layout: as text; "": not given as rules.
      devices: their number.
    """

    mesh: Mapping[str, int]
    layout: str
    devices: int


class Move(Document):
    """A move of a tree between two layouts or meshes: print it for its plan, call it to run it.

    ``move(params)`` returns the tree of the target, ``move(model, into=sampler)`` writes into an nnx module. Nothing is compiled
    before the first call; later calls reuse the programs.

    Attributes:
      arrays: of the target, in the order in which they are made.
      rounds: the arrays of every round: one program each, after which the donated arrays of the round are freed.
      donate: whether the arrays of the source are freed.
      source, target: where the tree is before and after.
      chip: of the devices; None: not known, and there are no seconds.

    Example:
      >>> move = mp.move(params, source=("data=8", "embed: data"), target=("model=8", "mlp: model"), dims=weights)
      >>> move.bytes_sent, move.rounds_text
      (14336, '1 program, 2 collectives')
      >>> sampler = move(jax.device_put(params, mp.shardings(params, "embed: data", "data=8", dims=weights)))
      >>> sampler["up"].sharding.spec
      PartitionSpec(None, 'model')
    """

    uncounted_loops = ()

    def __init__(
        self, rounds: Sequence[Sequence[MovedArray]], source: Side, target: Side, donate: bool, renamed: bool,
        chip: Chip | None, prepare: Any = None,
    ):  # fmt: skip
        """The move of some arrays in these rounds.

        Args:
          renamed: the tree of the target has other paths than the source's.
          prepare: the step that quantizes the source first; None: nothing does.
        """
        self.rounds, self.source, self.target, self.donate, self.chip = tuple(rounds), source, target, donate, chip
        self.arrays = tuple(a for of in rounds for a in of)
        self._renamed, self._prepare = renamed, prepare
        self._programs: dict[int, Program] = {}

    # -- the plan

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the move, with dims, axes, bytes, count, cause."""
        return tuple(c for a in self.arrays for c in a.collectives)

    @cached_property
    def _traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each device sends, and receives."""
        totals: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
        for a in self.arrays:
            if a.route is not None:
                for total, of in zip(totals, (a.route.sent, a.route.received), strict=True):
                    for d, n in zip(a.route.devices, of.tolist(), strict=True):
                        total[d] = total.get(d, 0.0) + n * a.wire
        sent, received = (np.array([*total.values(), 0.0]) for total in totals)
        return sent, received

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends, at most."""
        return int(self._traffic[0].max())

    @property
    def bytes_received(self) -> int:
        """Bytes that a device receives, at most: what it needs and does not have."""
        return int(self._traffic[1].max())

    @property
    def links(self) -> dict[str, float]:
        """Kind of link (``ICI``, ``NVLink``, ``DCN``, ``host``; ``links``: not known) → bytes that a device sends over it."""
        total: Counter[str] = Counter()
        for a in self.arrays:
            total.update(a.links)
        return dict(total)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds, one collective after the other; None: the chip is not known."""
        if self.chip is None:
            return None
        copies = self.links.get("host", 0.0) / self.chip.per_device().host_link
        return sum(c.total_seconds for c in self.collectives) + copies

    @cached_property
    def memory(self) -> Memory:
        """Bytes of a device before and after the move, and at its peak."""
        return memory_of(self.rounds, self.donate)

    @property
    def rounds_text(self) -> str:
        """``3 programs, 12 collectives``."""
        calls, n = sum(c.runs for c in self.collectives), len(self.rounds)
        return f"{n} program{'s' * (n != 1)}, {calls} collective{'s' * (calls != 1)}"

    def to_json(self) -> str:
        """The move as JSON: source, target, bytes, links, seconds, memory, and every array."""
        arrays = [
            {"path": a.path, "sources": a.sources, "dims": a.dims, "shape": a.shape, "dtype": str(a.dtype),
             "before": [str(o.sharding.spec) for o in a.operands], "after": str(a.sharding.spec), "links": a.links,
             "collectives": [c.to_dict() for c in a.collectives]} for a in self.arrays
        ]  # fmt: skip
        sides = {k: dataclasses.asdict(side) for k, side in (("source", self.source), ("target", self.target))}
        numbers = {k: getattr(self, k) for k in ("bytes_sent", "bytes_received", "links", "seconds", "donate")}
        memory = dataclasses.asdict(self.memory)
        return json.dumps({**sides, **numbers, "memory": memory, "rounds": len(self.rounds), "arrays": arrays})

    def __rich__(self) -> Any:
        return move_renderable(self)

    def __repr__(self) -> str:
        return f"<Move of {len(self.arrays)} arrays: {move_title(self)}>"

    def _title(self) -> str:
        return move_title(self)

    def _html(self) -> str:
        return move_html(self)

    # -- the run

    def program(self, k: int) -> Program | None:
        """The program of a round; None: its arrays are copied by ``jax.device_put``."""
        of = self.rounds[k]
        if of[0].route is None:
            return None
        if k not in self._programs:
            later = {p for others in self.rounds[k + 1 :] for a in others for p in a.sources}
            paths = {p for a in of for p in a.sources}
            self._programs[k] = Program(of, frozenset(paths - later if self.donate else ()))
        return self._programs[k]

    def __call__(self, params: Any, *, into: Any = None) -> Any:
        """Move a tree, in the sharding of the source that was planned.

        Args:
          params: arrays, in the tree that the move was planned for; nnx modules too.
          into: an nnx module or a tree that gets the arrays by their paths; arrays of other paths stay. A module is updated in
            place.

        Returns:
          The tree on the target: of the same structure, or after ``rename=`` nested dicts; a module is a new one, or with
          ``donate=True`` the given one. With ``into``, that one.

        Raises:
          UnsupportedError: an array that is missing, deleted, or of another shape, dtype or sharding than planned.
        """
        given = params
        if self._prepare is not None:
            params = self._prepare(params)
        found, back = by_name(params)
        self._check(found)
        out: dict[str, Any] = {}
        for k, of in enumerate(self.rounds):
            program = self.program(k)
            if program is None:
                out.update((a.path, place(found[a.sources[0]], a.sharding, copy=True)) for a in of)
            else:
                out.update(program(found))
        if into is not None:
            has, back_into = by_name(into)
            missing = [p for p in out if p not in has]
            if missing:
                raise UnsupportedError(
                    f"into= has no `{missing[0]}`", path=missing[0], fixes=did_you_mean(missing[0], has, "arrays")
                )
            return _updated(into, back_into({**has, **out}))
        if self._renamed:
            return nested(out)
        moved = back({p: out.get(p, x) for p, x in found.items()})
        return _updated(given, moved) if self.donate and self._prepare is None else moved

    def _check(self, found: Mapping[str, Any]) -> None:
        """Raise UnsupportedError for an array that is not as it was planned."""
        for array in self.arrays:
            for path, operand in zip(array.sources, array.operands, strict=True):
                x = found.get(path)
                if x is None:
                    raise UnsupportedError(
                        f"the tree has no `{path}`, which this move was planned for", path=path,
                        fixes=did_you_mean(path, found, "arrays"),
                    )  # fmt: skip
                if isinstance(x, jax.Array) and x.is_deleted():
                    raise UnsupportedError(
                        f"{path}: this array was donated or deleted", path=path,
                        fixes=["move with donate=False, or a copy of it"],
                    )  # fmt: skip
                if x.shape != operand.shape or x.dtype != array.old_dtype:
                    raise UnsupportedError(
                        f"{path} is {x.dtype}{list(x.shape)}, and the move was planned for "
                        f"{array.old_dtype}{list(operand.shape)}", path=path, shape=x.shape,
                        fixes=["plan another move: mp.move(params, …)"],
                    )  # fmt: skip
                planned = operand.sharding
                if array.route is not None and not x.sharding.is_equivalent_to(planned, x.ndim):
                    raise UnsupportedError(
                        f"{path} has the sharding {getattr(x.sharding, 'spec', x.sharding)}, and the move was planned from "
                        f"{planned.spec}", path=path, shape=x.shape,
                        fixes=["leave source= out: the move then starts from the shardings of the arrays"],
                    )  # fmt: skip


def _updated(x: Any, moved: Any) -> Any:
    """An nnx module with the arrays of ``moved``, its copy; of another tree, ``moved``."""
    if not nnx.is_graph_node(x):
        return moved
    nnx.update(x, nnx.state(moved))
    return x
