"""The result of ``mp.move``: a plan that prints itself, and a function that runs it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ...errors import UnsupportedError
from ..compat import lazy_nnx as nnx
from ..dims import did_you_mean
from ..global_arrays import place
from ..pods.state_by_name import by_name, nested
from ..report import Document
from .plan import MovePlan
from .report import move_html, move_renderable, move_title
from .run import Program


@dataclass(frozen=True, eq=False, repr=False)
class Move(MovePlan, Document):
    """A move of a tree between two layouts or meshes: print it for its plan, call it to run it.

    ``move(params)`` returns the tree of the target, ``move(model, into=sampler)`` writes into an nnx module. Nothing is compiled
    before the first call; later calls reuse the programs.

    Attributes:
      rounds: the arrays of the target, in every round: one program each, after which the donated arrays of the round are freed.
      donate: whether the arrays of the source are freed.
      source, target: where the tree is before and after.
      renamed: the tree of the target has other paths than the source's.
      prepare: the function that quantizes the source first; None: nothing is quantized.

    Example:
      >>> move = mp.move(params, source=("data=8", "embed: data"), target=("model=8", "mlp: model"), dims=weights)
      >>> move.bytes_sent, move.rounds_text
      (14336, '1 program, 2 collectives')
      >>> sampler = move(jax.device_put(params, mp.shardings(params, "embed: data", "data=8", dims=weights)))
      >>> sampler["up"].sharding.spec
      PartitionSpec(None, 'model')
    """

    renamed: bool = False
    prepare: Callable[[Any], Any] | None = None
    _programs: dict[int, Program] = field(default_factory=dict)

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
        out, back = self._moved(params)
        if into is not None:
            return _written(into, out)
        if self.renamed:
            return nested(out)
        moved = back(out)
        return _updated(params, moved) if self.donate and self.prepare is None else moved

    def offer(self, params: Any, uuid: int = 0, *, host: str = "127.0.0.1") -> str:
        """Move a tree, and offer the result to another job, which plans a move to the same shardings and calls :meth:`fetch`.

        The target is a mesh of this job's devices, with the axes and sizes of the mesh in the other job. The arrays stay allocated
        until they are fetched.

        Args:
          params: as for a call.
          uuid: a number that no other pending offer has; ``fetch`` takes the same one.
          host: the address of this host, as the other one reaches it.

        Returns:
          The address for ``fetch``.

        Raises:
          UnsupportedError: JAX has no transfer server, or a job has several processes.
        """
        transfers = _transfer_server(host)
        transfers.await_pull(uuid, self._moved(params)[0])
        return transfers.address()

    def fetch(self, address: str, uuid: int = 0, *, into: Any = None, host: str = "127.0.0.1") -> Any:
        """The tree of the target that another job offers: nested dicts, or ``into`` with its arrays, as of a call.

        Args:
          address: that :meth:`offer` returned.

        Raises:
          UnsupportedError: as :meth:`offer`.
        """
        shapes = {a.path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in self.arrays}
        out = _transfer_server(host).connect(address).pull(uuid, shapes)
        return nested(out) if into is None else _written(into, out)

    def _moved(self, params: Any) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
        """(path in the target → array, the function from these to the tree of ``params``)."""
        found, back = by_name(params if self.prepare is None else self.prepare(params))
        self._check(found)
        out: dict[str, Any] = {}
        for k, of in enumerate(self.rounds):
            program = self.program(k)
            if program is None:
                out.update((a.path, place(found[a.sources[0]], a.sharding, copy=True)) for a in of)
            else:
                out.update(program(found))
        return out, back

    def _check(self, found: Mapping[str, Any]) -> None:
        """Raise UnsupportedError for an array that is not as it was planned."""
        for array in self.arrays:
            for path, operand in zip(array.sources, array.operands, strict=True):
                if path not in found:
                    text, fixes = f"the tree has no `{path}`", did_you_mean(path, found, "arrays")
                    raise UnsupportedError(f"{text}, which this move was planned for", path=path, fixes=fixes)
                x, text, fix = found[path], "", ""
                has, planned = getattr(x, "sharding", None), operand.sharding
                if isinstance(x, jax.Array) and x.is_deleted():
                    text, fix = f"{path}: this array was donated or deleted", "move with donate=False, or a copy of it"
                elif x.shape != operand.shape or x.dtype != array.old_dtype:
                    text = f"{path} is {x.dtype}{list(x.shape)}, and the move was planned for "
                    text += f"{array.old_dtype}{list(operand.shape)}"
                    fix = "plan another move: mp.move(params, …)"
                elif array.route is not None and (has is None or not has.is_equivalent_to(planned, x.ndim)):
                    where = "is in host memory" if has is None else f"has the sharding {getattr(has, 'spec', has)}"
                    text = f"{path} {where}, and the move was planned from {planned.spec}"
                    fix = "plan the move from these arrays, without source=: mp.move(arrays, target=…)"
                if text:
                    raise UnsupportedError(text, path=path, shape=x.shape, fixes=[fix])


def _written(into: Any, arrays: Mapping[str, Any]) -> Any:
    """A module or tree with some of its arrays replaced, by their paths.

    Raises:
      UnsupportedError: it has no such path.
    """
    has, back = by_name(into)
    if (other := next((p for p in arrays if p not in has), None)) is not None:
        raise UnsupportedError(f"into= has no `{other}`", path=other, fixes=did_you_mean(other, has, "arrays"))
    return _updated(into, back({**has, **arrays}))


def _updated(x: Any, moved: Any) -> Any:
    """An nnx module with the arrays of ``moved``, its copy; of another tree, ``moved``."""
    if not nnx.is_graph_node(x):
        return moved
    nnx.update(x, nnx.state(moved))
    return x


@functools.cache
def _transfer_server(host: str) -> Any:
    """The server of ``jax.experimental.transfer`` in this process, at an address that other jobs reach.

    Raises:
      UnsupportedError: this JAX has none, or the job has several processes.
    """
    fixes = ["save a checkpoint (mp.Checkpoints), and restore it under the other layout"]
    try:
        transfer = importlib.import_module("jax.experimental.transfer")
    except ImportError:
        raise UnsupportedError("this JAX has no jax.experimental.transfer", fixes=fixes) from None
    if jax.process_count() > 1:
        raise UnsupportedError("arrays of several processes cannot be offered to another job", fixes=fixes)
    return transfer.start_transfer_server(jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"])
