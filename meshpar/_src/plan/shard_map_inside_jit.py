"""The ops that the ``"jit"`` lowering partitions itself with a ``shard_map``, because XLA's partitioner gets them wrong."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from ..compat.jax import aval_of
from ..program.ir import Value
from ..rules.registry import SplitOp
from .collectives import is_all_reducible
from .plan import Plan
from .shard_shapes import Spec
from .steps import Reduce, Run, Shard


def on_cpus(plan: Plan) -> bool:
    """Whether the mesh of the plan has CPU devices of this process."""
    return isinstance(plan.mesh, Mesh) and plan.mesh.devices.flat[0].platform == "cpu"


class ManualOps:
    """The ops of a plan that the ``"jit"`` lowering runs by their local form, each under a ``shard_map`` of its own."""

    def __init__(self, plan: Plan):
        self.cpu = on_cpus(plan)
        self.placements = plan.placements
        self.order = {axis: k for k, axis in enumerate(a for a, n in plan.sizes.items() if n > 1)}
        self.reduces = {s.source.value: s for s in plan.body.all_steps if isinstance(s, Reduce)}

    def has(self, run: Run | None) -> bool:
        """Whether an op runs under a ``shard_map``: XLA's partitioner gets it wrong, or it exchanges data along a sharded dim.

        This includes ops that get such a dim replicated, but whose operands or results are stored with the dim sharded.
        """
        if run is None or run.axes is None or run.op.rule is None:
            return False
        op, rule = run.op, run.op.rule
        if op.primitive.family == "opaque" and self.order:
            return True  # XLA cannot partition a TPU kernel, even one with replicated operands
        manual = op.primitive.manual
        if manual is not None and manual(SplitOp(op.eqn, rule, run.axes, any(map(self._is_mixed, run.results)))):
            return True
        if op.primitive.family == "dot" and self._permutes_axes(run):
            return True
        if rule.given is not None:
            return False
        if self.is_extremum(run):
            return True
        if any(axes and kind in ("permutation", "indexed") for axes, kind in zip(run.axes, rule.kinds, strict=False)):
            return True
        return any(
            entry and any(rule.kinds[f] == "permutation" for f in factors)
            for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(op.outs, rule.outs, strict=True)]
            if value is not None and dims
            for entry, factors in zip(self.stored(value) or (), dims, strict=False)
        )

    def is_extremum(self, run: Run) -> bool:
        """Whether a result of an op is a partial maximum or minimum that XLA's partitioner cannot reduce correctly.

        That is: there is no all-reduce for its dtype, or it is floating-point on CPUs, where XLA loses a NaN
        (:data:`compat.quirks.LOST_NAN`).
        """
        extrema = [(s.kind, s.value.aval.dtype) for s in run.results if s.partial and s.kind in ("max", "min")]
        return any(
            not is_all_reducible(*each) or (self.cpu and jnp.issubdtype(each[1], jnp.floating)) for each in extrema
        )

    def _permutes_axes(self, run: Run) -> bool:
        """Whether a dim of an operand or result is sharded over several axes in another order than the mesh's, as an op reads
        and makes it or as it is stored (:data:`compat.quirks.PERMUTED_AXES`). False for an op without elements to multiply: XLA
        folds its operands, and then refuses the ``shard_map``."""
        if not all(aval_of(v).size for v in run.op.eqn.invars):
            return False
        specs = [s.spec for s in (*run.reads, *run.results)]
        specs += [self.stored(v) or () for v in (*run.op.ins, *run.op.outs) if v is not None]
        places = [[self.order[a] for a in entry if a in self.order] for spec in specs for entry in spec]
        return any(place != sorted(place) for place in places)

    def stored(self, value: Value | None) -> Spec | None:
        """The stored spec of a value; None: a literal."""
        placed = None if value is None else self.placements.get(value)
        return None if placed is None else placed.stored.spec

    def _is_mixed(self, shard: Shard) -> bool:
        """Whether a partial result may be reduce-scattered over one of its axes and all-reduced over another."""
        step = self.reduces.get(shard.value)
        return len(shard.partial) > 1 if step is None else bool(step.scatters and step.over)
