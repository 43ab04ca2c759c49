"""Lowered programs: their results, and their collectives compared with the plan's."""

import math
from collections import Counter

import jax

import meshpar as mp
from meshpar._src.compat.jax import jaxprs_in
from meshpar._src.lower import LOWERINGS

MESHES = ["data=2, model=2, idle=2", "data=2, model=4"]
KINDS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip


def same(fn, *args, layout, dims, meshes=MESHES, lowerings=("shard_map",), **kwargs):
    """The numbers of the unsharded run under a layout, or each of a list, on all of these meshes, under these lowerings."""
    layouts = [layout] if isinstance(layout, str) else layout
    report = mp.check(fn, *args, layout=layouts, mesh=meshes, dims=dims, lowerings=lowerings, **kwargs)
    assert report.ok
    assert len(report.rows) == len(meshes) * len(lowerings) * len(layouts)


def equations(jaxpr, times=1):
    """(equation, how often it runs) of a jaxpr and its bodies, in order."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jaxprs_in(eqn):
            yield from equations(body, times * trips)


def group_of(eqn, sizes):
    """Over how many devices a collective is."""
    axes = eqn.params.get("axes") or eqn.params["axis_name"]
    return math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes))


def sent_by(jaxpr, sizes):
    """(collective, bytes on the wire of each device) → how often."""
    found = Counter()
    for eqn, times in equations(jaxpr):
        kind = KINDS.get(eqn.primitive.name)
        if kind is None:
            continue
        group = group_of(eqn, sizes)
        moved = eqn.outvars if kind == "all-gather" else eqn.invars
        volume = sum(v.aval.size * v.aval.dtype.itemsize for v in moved)
        share = 1 if kind == "collective-permute" else (group - 1) / group
        found[kind, (2 if kind == "all-reduce" else 1) * volume * share] += times
    return found


def of_kind(jaxpr, name):
    """The equations of a primitive, in order."""
    return [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == name]


def jaxpr_of(plan, mesh):
    """The function that the lowering returns for a plan."""
    run, _, _ = LOWERINGS["shard_map"](plan, mesh)
    inputs = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in plan.program.inputs]
    return jax.make_jaxpr(run)(*inputs).jaxpr


def lowered(fn, *args, layout, dims, mesh="data=4, model=2", **kwargs):
    """(plan of a function, its lowered function)."""
    mesh = mp.mesh(mesh)
    plan = mp.plan(fn, *args, mesh=mesh, layout=layout, dims=dims, **{"overlap": "off", **kwargs})
    return plan, jaxpr_of(plan, mesh)


def assert_sends_the_plan(fn, *args, **kwargs):
    """Assert that plan and program have the same collectives, in kind and bytes."""
    plan, jaxpr = lowered(fn, *args, **kwargs)
    planned = Counter()
    for c in plan.collectives:
        planned[c.op, c.bytes] += c.count
    assert sent_by(jaxpr, plan.sizes) == planned
    return plan
