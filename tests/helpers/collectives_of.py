"""The collectives of a function under a layout: of its plan, and of its program compiled by XLA for CPUs."""

from collections import Counter

import meshpar as mp
from meshpar._src.verify.hlo import collectives


def planned_and_compiled(fn, *args, layout, dims, mesh="data=4, model=2"):
    """(plan, {(kind, bytes): count} of the plan, the same of the compiled program) under the "shard_map" lowering."""
    run = mp.jit(fn, mesh=mp.mesh(mesh), layout=layout, dims=dims, lowering="shard_map")
    plan = run.plan(*args)
    planned, compiled = Counter(), Counter()
    for c in plan.collectives:
        planned[c.op, c.bytes] += c.count
    for c in collectives(run.lower(*args).compile().as_text()):
        compiled[c.op, c.bytes] += c.count
    return plan, planned, compiled
