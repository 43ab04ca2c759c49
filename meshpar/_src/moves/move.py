"""The result of ``mp.move``: a plan that prints itself, and a function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ...errors import UnsupportedError
from ..compat import nnx
from ..dims import did_you_mean
from ..global_arrays import place
from ..pods.names import by_name, nested
from ..report import Document
from .planned import MovePlan
from .report import move_html, move_renderable, move_title
from .run import Program


class Move(MovePlan, Document):
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

    def __init__(self, plan: MovePlan, renamed: bool, prepare: Callable[[Any], Any] | None = None):
        """The move with this plan.

        Args:
          renamed: the tree of the target has other paths than the source's.
          prepare: the step that quantizes the source first; None: nothing does.
        """
        vars(self).update(vars(plan))
        self._renamed, self._prepare = renamed, prepare
        self._programs: dict[int, Program] = {}

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
