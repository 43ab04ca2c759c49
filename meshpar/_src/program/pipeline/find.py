"""Finds the loops over stacked layers that are pipelines: a dim of stacked weights is split, and a scan runs over it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

from ....errors import UnsupportedError
from ...compat.loop_operands import loop_parts
from ...rules.rule import REDUCTIONS
from ..ir import Op, Program, Value


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """A scan over stacked weights.

    Attributes:
      op: the scan.
      weight: a stacked operand, whose dim 0 is the stacked dim.
      dim: the name of the stacked dim.
    """

    op: Op
    weight: Value
    dim: str

    @property
    def carries(self) -> list[Value]:
        """The carried values, as inputs of the body."""
        return loop_parts(self.op.eqn).carried(self.op.frames[0].ins())

    def unsupported(self, headline: str, *fixes: str) -> UnsupportedError:
        """The error for layers that cannot be a pipeline; ``fixes``: besides a layout without the rule for their dim."""
        return UnsupportedError(headline, source=self.op.source, fixes=[*fixes, f"or do not shard `{self.dim}`"])


def layer_loops(program: Program) -> list[LayerLoop]:
    """The scans over a named dim that is dim 0 of stacked weights, in program order; scans inside of another one are left out.

    Names decide, not lengths: a loop over eight chunks of the vocabulary is not a loop over eight layers.
    """
    find = program.unifier.find
    stacked = {find(v.nodes[0]) for v in _stacked_weights(program)}
    loops: list[LayerLoop] = []

    pending = list(reversed(program.root.ops))
    while pending:  # no recursive function, which would be a reference cycle that keeps the program's arrays
        op = pending.pop()
        weight = _stacked_operand(op, stacked, find) if op.primitive.family == "scan" else None
        name = None if weight is None else program.dim_name(weight, 0)
        if weight is not None and name is not None:
            loops.append(LayerLoop(op, weight, name))
        else:
            for frame in reversed(op.frames):
                pending += reversed(frame.ops)
    return loops


def _stacked_weights(program: Program) -> list[Value]:
    """The arguments that may be stacked weights: parameters (by Flax metadata or tree path), and named arrays that are neither
    optimizer state nor data. Data have a dim ``batch``: a loop over time steps is no loop over layers.
    """
    return [
        v
        for v in program.inputs
        if len(v.shape) > 1
        and v.shape[0] > 1
        and (v.kind == "params" or (v.kind is None and "batch" not in program.dims(v)))
    ]


def indexed_stacks(program: Program) -> dict[str, str]:
    """Dims of stacked matrices that are taken one by one, over which no loop runs, with the user's line that takes the last one.

    Given ``for i in range(8): x = layer(x, w[i])`` and a ``w`` with the dims ``layers embed mlp``, returns
    ``{"layers": "model.py:12"}``; so for ``jnp.unstack``, ``jnp.take`` and the like, also in a loop over microbatches. A program
    that takes fewer matrices than there are (the best of a population, the last one of ``jnp.roll``) has no such loop.
    """
    find, looped = program.unifier.find, {loop.dim for loop in program.cached(layer_loops)}
    stacks = {
        find(v.nodes[0]): dim
        for v in _stacked_weights(program)
        if len(v.shape) > 2 and (dim := program.dim_name(v, 0)) is not None and dim not in looped
    }
    indexed: dict[str, str] = {}
    taken: collections.Counter[Value] = collections.Counter()
    for op in program.root.walk() if stacks else ():
        value = op.ins[0] if op.rule is not None and op.ins else None
        if op.rule is None or value is None or len(value.shape) < 3 or value.nodes[0] < 0:
            continue
        dim = stacks.get(find(value.nodes[0]))
        if dim is None or op.rule.kinds[op.rule.ins[0][0][0]] in REDUCTIONS - {"indexed"}:
            continue
        loop = microbatch_loop(op)  # in jax.lax.fori_loop one op takes all of them
        times = value.shape[0] if loop is not None and loop.eqn.params["length"] == value.shape[0] else 1
        taken[value] += times * sum(v.shape in (value.shape[1:], (1, *value.shape[1:])) for v in op.outs)
        if taken[value] >= value.shape[0]:
            indexed.setdefault(dim, op.source)
    return indexed


def _stacked_operand(op: Op, stacked: set[int], find: Callable[[int], int]) -> Value | None:
    """The first operand that a scan slices along one of these dims; None: it has none."""
    _, _, stacks = loop_parts(op.eqn).split(op.ins)
    return next((v for v in stacks if v is not None and v.shape[0] > 1 and find(v.nodes[0]) in stacked), None)


def microbatch_loop(op: Op) -> Op | None:
    """The innermost loop around an op, if it is a scan of several iterations; else None."""
    loop = op.frame.home.parent
    return loop if loop is not None and loop.primitive.family == "scan" and loop.eqn.params["length"] > 1 else None
