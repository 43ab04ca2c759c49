"""A note on inter-slice (DCN) traffic in every layer: weights and activations. Slices are meant to exchange gradients only."""

from __future__ import annotations

from dataclasses import replace

from ..plan.collectives import dcn_bytes_sent
from ..plan.plan import Plan


def note_slice_traffic(plan: Plan) -> Plan:
    """The plan with a note of the weights and activations that each layer receives from other slices, if there are any."""
    if plan.chip is None or not plan.chip.torus:
        return plan  # nodes of GPUs have a link to others for every GPU
    weights = {d for h in plan.inputs if h.kind in ("params", "opt") for d in h.dims if d}
    traffic = [
        (dcn_bytes_sent(c, plan.torus) * c.runs, c)
        for c in plan.collectives
        if c.count != 1 and (c.op not in ("all-reduce", "reduce-scatter") or set(c.dims.split()) - weights)
    ]
    total, (_, largest) = sum(sent for sent, _ in traffic), max(traffic, key=lambda x: x[0], default=(0.0, None))
    if not total or largest is None:
        return plan
    note = (
        f"each layer waits for other slices: {total / 1e9:.3g} GB a device in a step, most of it {largest.op} over "
        f"{'+'.join(largest.axes)} of `{largest.dims}` ({largest.cause}); keep weights within a slice, and split only the batch "
        "over slices: `batch: slice+data; embed: data`"
    )
    return replace(plan, notes=(*plan.notes, note))
