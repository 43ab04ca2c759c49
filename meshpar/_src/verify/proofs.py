"""Proofs of plans: the program that a plan is lowered to, against the function as it was written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from jax.sharding import Mesh

from ...errors import UnsupportedError
from ..compat.jax import abstract_array, axes_of_spec, make_generated_jaxpr, on_host
from ..lower import lower_to_shard_map
from ..plan.plan import Plan
from ..rules.mesh_in_shard_map import Grid
from .prove import DECOMPOSED, Claims, Proof, prove_program


def prove_plan(plan: Plan) -> Proof:
    """The proof of a plan, against the function as JAX traced it; if that fails, with a proof against the program after the
    rewrites of :mod:`program` (pipelines, gradients of kernels) as :attr:`Proof.planned`.

    Raises:
      UnsupportedError: a plan of ``lowering="jit"``.
    """
    if plan.lowering == "jit":
        reason = "" if plan.lowering_reason is None else f" ({plan.lowering_reason})"
        raise UnsupportedError(
            f'under lowering="jit" XLA partitions the program{reason}: there is no per-device program to prove',
            fixes=['lowering="shard_map", under which meshpar partitions it', "mp.check runs and compares it"],
        )
    values = plan.program.inputs
    avals = [abstract_array(v.shape, v.aval.dtype, v.aval.weak_type, on_host(v.aval)) for v in values]
    lowered = make_generated_jaxpr(lower_to_shard_map(plan, plan.mesh)[0], *avals)
    paths = [h.path for h in plan.outputs]
    written, planned = plan.program.traced.written, plan.program.closed
    proof = prove_program(written, lowered, paths, claims_of(plan))
    return proof if proof.proven else replace(proof, planned=prove_program(planned, lowered, paths))


def claims_of(plan: Plan) -> Claims:
    """What a plan says about its collectives and shardings."""
    sends: defaultdict[tuple[str, frozenset[str]], float] = defaultdict(float)
    for c in plan.collectives:
        axes = frozenset(a for a in c.axes if plan.sizes[a] > 1)
        sends[c.op if c.algorithm == "native" else DECOMPOSED, axes] += c.bytes * (1 if c.count is None else c.count)
    arguments, results = (
        [(h.path, axes_of_spec(h.spec, len(h.shape))) for h in hs] for hs in (plan.inputs, plan.outputs)
    )
    axes = {name: a for a, names in Grid(plan.sizes, plan.torus).fine.items() for name in names}
    platform = "cuda" if plan.chip is not None and plan.chip.switch else "tpu"
    if isinstance(plan.mesh, Mesh) and plan.mesh.devices.flat[0].platform == "cpu":
        platform = "cpu"
    return Claims(sends, arguments, results, plan.sizes, axes, platform)
