"""Which products of a backward pass wait for which, in the plan and in the program made of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.passes import schedule as order

WIDTH, HIDDEN, LAYERS = 8, 16, 4
DIMS = {"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"}
STACKED = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "x": "batch embed"}
FSDP = "batch: data; embed: data"


@pytest.fixture(autouse=True)
def small_arrays_count(monkeypatch):
    monkeypatch.setattr(order, "LARGE", 1)


def mlp(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def unrolled(params, x):
    def loss(params):
        y = x
        for layer in params:
            y = mlp(y, layer["up"], layer["down"])
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def scanned(params, x):
    def loss(params):
        def layer(y, w):
            return mlp(y, *(w[k].astype(jnp.bfloat16) for k in ("up", "down"))).astype(y.dtype), None

        y, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def drawn(stack):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (0.1 * rng.normal(size=shape)).astype(np.float32)

    if stack:
        return {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}, normal(8, WIDTH)
    return [{"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)} for _ in range(LAYERS)], normal(8, WIDTH)


def plan_of(step, layout, dims, stack, mesh="data=8"):
    return mp.plan(step, *drawn(stack), mesh=mp.mesh(mesh), layout=layout, dims=dims, overlap="off")


def places(plan):
    """op → its place in the order of its body, for all products."""
    frames = {id(op.frame): op.frame for op in plan.program.root.walk()}
    return {id(op): k for f in frames.values() for k, op in enumerate(plan.order.ops(f))}


def test_a_scattered_sum_waits_for_the_last_use_of_the_gathered_weight():
    plan = plan_of(scanned, FSDP, STACKED, True)
    found = {tuple(op.outs[0].shape): [v.op.name for v in plan.order.after[id(op)]]
             for op in plan.program.root.walk() if id(op) in plan.order.after}  # fmt: skip
    # the gradient of each weight waits for the cotangent that goes on, made with the weight itself; that of `up` is a term of a sum
    assert sorted([found[HIDDEN, WIDTH], found[WIDTH, HIDDEN]]) == [["add_any"], ["dot_general"]]
    place = places(plan)
    for op in plan.program.root.walk():
        for v in plan.order.after.get(id(op), ()):
            assert place[id(v.op)] < place[id(op)]


def test_the_order_is_one_that_the_program_allows():
    plan = plan_of(unrolled, FSDP, DIMS, False)
    made = {id(v) for v in plan.program.inputs}
    frame = plan.program.root
    ops = plan.order.ops(frame)
    assert sorted(map(id, ops)) == sorted(map(id, frame.ops))
    made |= {id(v) for v in frame.env.values() if v.op is None}
    for op in ops:
        if not op.frames:
            assert all(id(v) in made for v in op.ins if v is not None)
        made |= {id(v) for v in op.outs}
        made |= {id(v) for f in op.frames for inner in f.walk() for v in inner.outs}


def test_gradients_of_layers_are_not_left_to_the_end():
    """Without loops too: a product of an earlier layer waits for the gradients of the layers behind it."""
    plan = plan_of(unrolled, "batch: data", DIMS, False)
    ends = {id(v.op) for values in plan.order.after.values() for v in values}
    gradients = [op for op in plan.program.root.walk() if op.name == "dot_general" and 8 not in op.outs[0].shape[:1]]
    gradients = [op for op in gradients if tuple(op.outs[0].shape) == (HIDDEN, WIDTH)]
    assert len(gradients) == LAYERS
    assert sum(id(op) in ends for op in gradients) >= LAYERS - 1


def test_small_products_wait_for_nothing(monkeypatch):
    monkeypatch.setattr(order, "LARGE", 2**24)
    assert not plan_of(unrolled, FSDP, DIMS, False).order.after


@pytest.mark.parametrize("overlap", ["xla", "ring"])
@pytest.mark.parametrize(
    "layout", [FSDP, "batch: data; mlp: model; embed: data", "batch: data+model; mlp: model; embed: data"]
)
@pytest.mark.parametrize("stack", [False, True])
def test_numbers_stay(stack, layout, overlap):
    step, dims = (scanned, STACKED) if stack else (unrolled, DIMS)
    args = drawn(stack)
    want = jax.jit(step)(*args)
    run = mp.jit(step, mesh=mp.mesh("data=4, model=2"), layout=layout, dims=dims, lowering="shard_map", overlap=overlap)
    assert run.plan(*args).order.after
    tolerance = 2e-3 if stack else 2e-6  # products in bfloat16
    for a, b in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_program_says_so():
    """One barrier for every product that waits, one for every slice of a stack that is rounded in its loop."""
    args = drawn(True)
    run = mp.jit(scanned, mesh=mp.mesh("data=8"), layout=FSDP, dims=STACKED, lowering="shard_map", overlap="off")
    plan, text = run.plan(*args), run.lower(*args).as_text()
    slices = 2 * 2  # of two weights, in both loops
    between_loops = 1
    assert len(re.findall(r"optimization_barrier", text)) == len(plan.order.after) + slices + between_loops


def test_a_large_scattered_sum_is_cut_where_it_is_made():
    """XLA may send it whole (an all-reduce), and would then keep the whole where only its part is saved."""

    def fn(x, w):
        return x @ w

    args = jax.ShapeDtypeStruct((4096, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4096), jnp.float32)
    dims = {"x": "batch inner", "w": "inner embed"}
    run = mp.jit(fn, mesh=mp.mesh("data=8"), layout="inner: data; embed: data", dims=dims, lowering="shard_map")
    text = run.lower(*args).as_text()
    assert "reduce_scatter" in text
    assert text.index("optimization_barrier") > text.index("reduce_scatter")


def test_what_a_kernel_makes_small_is_made_with_the_rest():
    @mp.kernel_rule("batch embed! -> batch embed!, batch")
    def kernel(x):
        return x * 2, x.sum(-1)

    x = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    run = mp.jit(kernel, mesh=mp.mesh("data=8"), layout="batch: data", dims={"x": "batch embed"}, lowering="shard_map")
    assert "optimization_barrier" in run.lower(x).as_text()
    y, total = run(x)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_allclose(total, x.sum(-1), rtol=1e-6)


def test_a_ring_holds_a_few_blocks_of_a_sum():
    args = drawn(True)
    how = {"mesh": mp.mesh("data=8"), "layout": FSDP, "dims": STACKED}
    plan = mp.plan(scanned, *args, overlap="ring", **how)
    assert set(plan.rings.parts.values()) == {8}

    def held(plan):
        nodes = [n for r in (plan.kernels, *_bodies(plan.kernels)) for n in r.nodes]
        return {i.held / i.bytes for n in nodes for i in n.outs if i.bytes}

    # of a gather in blocks nothing is held but what is under way (plan.memory), of a sum four blocks of eight
    assert held(plan) == {1.0, 0.5, 0.0}
    assert held(mp.plan(scanned, *args, overlap="off", **how)) == {1.0}


def _bodies(region):
    for node in region.nodes:
        for body in node.regions:
            yield body
            yield from _bodies(body)
