"""The jit lowering: the same numbers as the unsharded run, also where XLA's own partitioner gets them wrong."""

import functools
import re

import arrays
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp

RNG = np.random.default_rng(0)


normal = functools.partial(arrays.normal, RNG)


def assert_same(fn, args, mesh, layout, dims, tolerance=1e-5):
    """Every leaf within ``tolerance`` of the unsharded run's largest value."""
    expected = jax.device_get(jax.jit(fn)(*args))
    got = jax.device_get(mp.jit(fn, mesh=mesh, layout=layout, dims=dims, lowering="jit")(*args))
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        scale = np.abs(want).max() + 1e-30
        assert np.abs(have - want).max() <= tolerance * scale, jax.tree_util.keystr(path)


CONVS = {
    "strided": {"features": (4, 8), "groups": 1, "stride": 2, "padding": "SAME"},
    "valid": {"features": (4, 8), "groups": 1, "stride": 1, "padding": "VALID"},
    "grouped": {"features": (8, 16), "groups": 4, "stride": 1, "padding": "SAME"},
    "depthwise": {"features": (8, 8), "groups": 8, "stride": 1, "padding": "SAME"},
}


@pytest.mark.parametrize(
    ("kind", "layout"), covering.each(CONVS, ["batch: data; features: model", "batch: data; height: model"] * 2)
)
def test_convolutions_and_their_gradients(kind, layout):
    """XLA scales the kernel gradients of convolutions by the size of an idle axis; ours must be right."""
    c = CONVS[kind]
    fan_in, out = c["features"]

    def step(w, x, y):
        def loss(w, x):
            h = lax.conv_general_dilated(
                x, w, (c["stride"],) * 2, c["padding"], dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=c["groups"],
            )  # fmt: skip
            return jnp.mean((jnp.tanh(h).sum((1, 2)) - y) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(w, x)

    args = normal(3, 3, fan_in // c["groups"], out), normal(8, 8, 8, fan_in), normal(8, out)
    dims = {"w": "_ _ _ features", "x": "batch height width _", "y": "batch features"}
    assert_same(step, args, "data=2, model=2, idle=2", layout, dims)


def test_an_explicit_spec_overrides_the_claims():
    def fn(x):
        y = jax.lax.with_sharding_constraint(x * 2, jax.sharding.PartitionSpec(None, "data"))
        return y

    step = mp.jit(fn, mesh="data=8", layout="a: data", dims={"x": "a b"}, lowering="jit")
    x = normal(8, 16)
    out = step(x)
    assert out.sharding.spec == jax.sharding.PartitionSpec(None, "data")
    np.testing.assert_array_equal(out, x * 2)
    moved = [c for c in step.plan(x).collectives if c.op == "all-to-all"]
    assert len(moved) == 1
    assert moved[0].axes == ("data",)


def test_state_is_born_sharded():
    """No device holds more than its shard: the peak of live bytes of `mp.init` stays below the whole state."""
    sizes = {"w": (64, 512, 64), "v": (64, 64, 512)}

    def create(key):
        keys = jax.random.split(key, 2)
        return {"params": {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, sizes.items(), strict=True)}}

    dims = {"params/w": "layers mlp embed", "params/v": "layers embed mlp"}
    init = mp.init(create, mesh="data=8", layout="mlp: data", dims=dims)
    whole = sum(4 * int(np.prod(s)) for s in sizes.values())
    memory = init.lower(jax.random.key(0)).compile().memory_analysis()
    assert whole // 8 <= memory.output_size_in_bytes < whole // 8 + 4096
    # the generator's scratch: bits and counters of a device's shard of one stack at a time, never of the whole array
    assert memory.temp_size_in_bytes <= 3 * whole // 8
    alone = jax.jit(create).lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= alone.temp_size_in_bytes // 7
    state = init(jax.random.key(0))
    for x in jax.tree.leaves(state):
        assert {s.data.nbytes for s in x.addressable_shards} == {x.nbytes // 8}
    np.testing.assert_allclose(state["params"]["w"], create(jax.random.key(0))["params"]["w"], rtol=1e-6)


# -- what XLA's partitioner gets wrong, found by tests/fuzz; each of these fails without the pins


@pytest.mark.parametrize("start", [-3, 9])
def test_starts_out_of_bounds(start):
    """Of a slice of a slice (here: a part of the result) XLA clamps the first start with the size of the second."""
    x = np.arange(8, dtype=np.float32)

    def step(x, i):
        piece = lax.dynamic_slice(x, (i,), (4,))
        return mp.named(piece, "a") * 2, lax.dynamic_update_slice(x, x[:3] * 2, (i,))

    for lowering in ("jit", "shard_map"):
        run = mp.jit(step, mesh="x=4, y=2", layout="a: y", dims={"x": "a"}, lowering=lowering)
        for got, want in zip(run(x, np.int32(start)), step(x, np.int32(start)), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_convolution_that_the_plan_leaves_unsharded():
    """As its neighbours are split, XLA would split it as well; on one of these it crashed."""
    x, w = normal(2, 6, 4, 4), normal(3, 1, 2, 8)

    def step(x, w):
        def loss(x, w):
            y = lax.conv_general_dilated(
                x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
            )
            return jnp.tanh(y).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    layout, dims = "f?: x; e?: x+y", {"x": "e _ _ f", "w": "_ _ e _"}
    traced = mp.jit(step, mesh="x=4, y=2", layout=layout, dims=dims, lowering="jit").trace(x, w).jaxpr.jaxpr
    names = [e.primitive.name for e in traced.eqns[0].params["jaxpr"].jaxpr.eqns]
    assert names.count("shard_map") == 3  # the convolution and its two gradients
    assert_same(step, (x, w), "x=4, y=2", layout, dims)


def test_the_tangent_of_a_pooling_whose_operand_another_op_has_split_along_the_window():
    """XLA's partitioner would split the windows as well, and abort."""
    image, kernel = normal(6, 8, 8), normal(3, 1, 16)

    def step(image, kernel):
        x = image.reshape(8, 6, 8)
        numbers = ("NWC", "WIO", "NWC")
        y = lax.conv_general_dilated(
            x, kernel, (1,), [(1, 2)], lhs_dilation=(2,), dimension_numbers=numbers, feature_group_count=8
        )
        return y, lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME")

    def pushed(image, kernel):
        return jax.jvp(step, (image, kernel), (2 * image, 3 * kernel))

    dims = {"image": "rows width channels", "kernel": "taps _ features"}
    assert_same(pushed, (image, kernel), "idle=4, model=2", "width: model; features: model", dims)


def test_what_is_gathered_is_what_the_plan_gathers_and_not_what_it_is_made_of():
    """A norm in float32 whose result is rounded: XLA's partitioner would gather it before it is rounded."""

    def fn(x, w):
        y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        return y.astype(jnp.int8) @ w

    args = 9 * normal(4, 8, 16), jnp.ones((16, 32), jnp.int8)
    dims = {"x": "batch seq embed", "w": "embed mlp"}
    layout = "batch: data; mlp: model; seq: model"
    assert_same(fn, args, "data=2, model=4", layout, dims)
    step = mp.jit(fn, mesh="data=2, model=4", layout=layout, dims=dims, lowering="jit")
    (planned,) = [c for c in step.plan(*args).collectives if c.op == "all-gather"]
    assert (planned.dtype, planned.shape) == ("int8", (4, 8, 16))
    gathered = re.findall(r"(\w+)\[2,8,16\]\S* all-gather\(", step.lower(*args).compile().as_text())
    assert gathered == ["s8"]


"""Functions whose result is partial if dim 0 is sharded."""
"""Ops of which some, but not all, are run under a ``shard_map`` where their operand is stored sharded."""
