"""Schedules: weights gathered during the matmul before, gradients reduced during the next, matmuls during other collectives."""

from graphlib import TopologicalSorter

import jax
import jax.numpy as jnp
import pytest
from arrays import F32, f32

import meshpar as mp
from meshpar._src.cost.device_computation import computation_of
from meshpar._src.cost.schedule import async_collectives, concurrent_matmuls, schedules

ROWS, EMBED, MLP = 16, 32, 64


def loss(params, x):
    return ((x @ params["up"]) @ params["down"]).sum()


def step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))


PARAMS = {"up": f32(EMBED, MLP), "down": f32(MLP, EMBED)}
DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}


def planned(fn, layout="batch: data; embed: data", topology="v5e:2x2"):
    where = {"mesh": "data=-1", "topology": topology, "layout": layout, "dims": DIMS}
    return mp.plan(fn, PARAMS, f32(ROWS, EMBED), overlap="xla", **where)


def in_flight(plan):
    """(kernel, buffers of collectives in flight while it runs)."""
    schedule = schedules(plan)[computation_of(plan)]
    return [(k, schedule.in_flight.get(i, [])) for i, k in enumerate(schedule.kernels)]


def test_a_weight_is_gathered_during_the_matmul_before():
    buffers = in_flight(planned(lambda params, x: loss(params, x)))
    sizes = [sum(i.bytes for i in items) for k, items in buffers if k.matmuls]
    assert sizes[:2] == [F32 * EMBED * MLP, 0]  # `down` during the first matmul; nothing during the last


@pytest.mark.parametrize(("topology", "is_async"), [("v5e:2x2", False), ("tpu7x:2x2x1", True)])
def test_a_gradient_is_reduced_before_the_next_matmul_or_during_it_where_reduce_scatters_are_asynchronous(
    topology, is_async
):
    plan = planned(step, topology=topology)
    assert {c.op for c in plan.collectives} == {"all-gather", "reduce-scatter"}
    unsharded = F32 * EMBED * MLP  # of `down`, the partial gradient of a device
    schedule = schedules(plan)[computation_of(plan)]
    kernels = schedule.kernels
    first = next(i for i, k in enumerate(kernels) if k.kind == "move" and k.reads[0].bytes == unsharded)
    operand, after = kernels[first].reads[0], next(i for i, k in enumerate(kernels) if i > first and k.matmuls)
    buffers = [items for _, items in in_flight(plan)]
    assert operand in buffers[after]  # it is live so long in either case
    assert all(operand not in items for items in buffers[after + 1 :])
    (transfer,) = [t for t in schedule.transfers if t.kernel is kernels[first]]
    assert transfer.is_async == is_async
    assert (transfer.start <= schedule.starts[after] < transfer.end) == is_async


def scanned(params, x):
    """Layers of four products."""

    def layer(x, p):
        for _ in range(2):
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return x, None

    def loss(params):
        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).sum()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def layered(layout, rows=(8, 2048), **options):
    """The plan of two layers; ``rows`` are the sizes of the batch, and of the sequence if there is one."""
    params = {"up": f32(2, EMBED, MLP), "down": f32(2, MLP, EMBED)}
    dims = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "x": f"batch {'seq ' * (len(rows) > 1)}embed"}
    return mp.plan(scanned, params, f32(*rows, EMBED), overlap="xla", layout=layout, dims=dims, **options)


def is_followed(node):
    """Whether products of its body follow from what a kernel gives."""
    return any(k.matmuls or is_followed(k) for item in node.outs for k in item.readers)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_there_is_an_order_in_which_products_run_beside_what_they_are_said_to(parts):
    """Parts of a batch that need nothing of each other: what is gathered for one may run beside the products of another."""

    def layer(xs, p):
        return [x + jnp.tanh(x @ p["up"]) @ p["down"] for x in xs], None

    def loss(params, *xs):
        return sum((x**2).sum() for x in jax.lax.scan(jax.checkpoint(layer), list(xs), params)[0])

    params, xs = {"up": f32(4, 512, 2048), "down": f32(4, 2048, 512)}, [f32(16, 2048, 512)] * parts
    dims = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "xs/*": "batch seq embed"}
    layout = "batch: data; mlp: model; seq: model"
    plan = mp.plan(jax.grad(loss), params, *xs, overlap="xla", lowering="shard_map", mesh="data=4, model=4",
                   topology="v5e:4x4", layout=layout, dims=dims)  # fmt: skip
    found = {region: besides for region, besides in concurrent_matmuls(plan).items() if region.trip_count == 4}
    assert any(b for besides in found.values() for b in besides.values())
    for region, besides in found.items():
        order: TopologicalSorter[object] = TopologicalSorter()
        for node in region.nodes:
            order.add((node, "begins"), *((i.made_by, "ends") for i in node.ins if i.made_by is not None))
            order.add((node, "ends"), (node, "begins"))
        for move, beside in besides.items():
            for k in beside:
                order.add((k, "begins"), (move, "begins"))
                order.add((move, "ends"), (k, "ends"))
        order.prepare()  # which is an error where there is a cycle


def test_sums_that_programs_wait_for_are_left_to_the_end_of_a_body():
    plan = layered("batch: data; embed: data", (ROWS,), mesh="data=4", topology="v5e:2x2")
    loops = {region: found for region, found in async_collectives(plan).items() if region.trip_count == 2}
    late = [(region, move, f) for region, found in loops.items() for move, f in found.items() if not f.prefetched]
    assert late
    for region, move, found in late:
        assert found.until_end
        assert not found.postponed
        assert move.reads[0] in schedules(plan)[region].in_flight[len(region.kernels) - 1]
