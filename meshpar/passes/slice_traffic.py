"""What crosses slices in every layer: gathered weights, and activations; sums of gradients are what slices are for."""

from __future__ import annotations

from dataclasses import replace

from ..plan.collectives import dcn_bytes_sent
from ..plan.plan import Plan


def note_crossings(plan: Plan) -> Plan:
    """The plan with a note of what each layer waits for from other slices, where there is any."""
    if plan.chip is None or not plan.chip.torus:
        return plan  # nodes of GPUs have a link to others for every GPU
    weights = {d for h in plan.inputs if h.kind in ("params", "opt") for d in h.dims if d}
    crossing = [
        (dcn_bytes_sent(c, plan.torus) * (c.count or 1), c)
        for c in plan.collectives
        if c.count != 1 and (c.op not in ("all-reduce", "reduce-scatter") or set(c.dims.split()) - weights)
    ]
    crossing = [(sent, c) for sent, c in crossing if sent]
    if not crossing:
        return plan
    total, (_, worst) = sum(sent for sent, _ in crossing), max(crossing, key=lambda x: x[0])
    note = (
        f"each layer waits for other slices: {total / 1e9:.3g} GB a device in a step, most of it {worst.op} over "
        f"{'+'.join(worst.axes)} of `{worst.dims}` ({worst.cause}); keep weights within a slice, and split only the batch "
        "over slices: `batch: slice+data; embed: data`"
    )
    return replace(plan, notes=(*plan.notes, note))
