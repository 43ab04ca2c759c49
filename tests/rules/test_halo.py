"""Ops that read elements of other shards: results equal the unsharded run, and the compiled program has the planned exchanges."""

import functools

import arrays
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_of import planned_and_compiled
from jax import lax
from same_results import assert_as_unsharded, assert_close

import meshpar as mp

RNG = np.random.default_rng(0)
MESHES = {"data=4, model=2": "rows: data; columns: model", "data=2, model=2, idle=2": "rows: data+model"}


normal = functools.partial(arrays.normal, RNG)


def conv(taps, stride=1, padding="SAME", **kw):
    """A convolution of rows (24) whose kernel is a constant; ``kernel`` differentiates with respect to it as well."""
    groups, batches = kw.get("feature_group_count", 1), kw.get("batch_group_count", 1)
    w = normal(taps, 2 // groups, 3 if groups * batches == 1 else 4)

    def apply(x):
        return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=("NHC", "HIO", "NHC"), **kw)

    def kernel(x):
        def of(w):
            return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=("NHC", "HIO", "NHC"), **kw)

        ct = jax.eval_shape(of, w)
        weights = jnp.cos(jnp.arange(ct.size, dtype=np.float32)).reshape(ct.shape)
        return jax.linear_transpose(of, w)(weights)[0]

    return apply, kernel


def pool(kind, taps, stride, padding, **dilation):
    init, op = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "sum": (0.0, lax.add)}[kind]
    full = {k: (1, n, 1) for k, n in dilation.items()}
    pads = padding if isinstance(padding, str) else ((0, 0), padding, (0, 0))
    return lambda x: lax.reduce_window(x, init, op, (1, taps, 1), (1, stride, 1), pads, **full)


def product(x):
    """A user's own reduction, whose windows need replication."""
    return lax.reduce_window(x, np.float32(1), lax.mul, (1, 3, 1), (1, 1, 1), "SAME")


CONVOLUTIONS = {
    "same": conv(3),
    "even window": conv(4),
    "stride": conv(3, 2),
    "stride 3, padded on one side": conv(5, 3, ((2, 0),)),
    "blocks drift": conv(3, 1, ((0, 6),)),
    "fewer results than the stride makes blocks of": conv(3, 3, ((6, 7),)),
    "halo larger than a block": conv(15),
    "window larger than the array": conv(29),
    "atrous": conv(3, rhs_dilation=(4,)),
    "transposed": conv(3, 1, ((1, 2),), lhs_dilation=(2,)),
    "transposed, places differ by device": conv(4, 2, ((2, 2),), lhs_dilation=(3,)),
    "cut off": conv(3, 1, ((-3, 5),)),
    "stride over single elements": conv(1, 2),
    "grouped": conv(3, feature_group_count=2),
    "grouped by batch": conv(3, 2, batch_group_count=2),
    "does not divide": conv(3, 1, "VALID"),
}
POOLS = {
    "max": pool("max", 2, 2, "VALID"),
    "max, overlapping": pool("max", 3, 2, (1, 0)),
    "max with gaps": pool("max", 2, 3, (0, 0)),
    "min": pool("min", 3, 1, "SAME"),
    "mean": pool("sum", 5, 1, "SAME"),
    "sum, wide": pool("sum", 9, 1, (8, 0)),
    "sum, dilated": pool("sum", 3, 1, (2, 2), window_dilation=2),
    "sum, spread out": pool("sum", 3, 2, (1, 1), base_dilation=2),
    "does not divide": pool("max", 3, 2, "VALID"),
}
MOVES = {
    "first half": lambda x: x[:, :12],
    "last third": lambda x: x[:, 16:],
    "every other": lambda x: x[:, 1::2],
    "every third": lambda x: x[:, 2:24:3],
    "shifted": lambda x: lax.pad(x, 0.5, ((0, 0, 0), (3, -3, 0), (0, 0, 0))),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 7), (0, 0)), constant_values=2.0),
    "spread out": lambda x: lax.pad(x, -1.5, ((0, 0, 0), (0, 1, 1), (0, 0, 0))),
    "flipped": lambda x: x[:, ::-1],
    "joined": lambda x: jnp.concatenate([x, 2 * x, x[:, :8]], 1),
    "parted": lambda x: jnp.concatenate(jnp.split(x, [8, 12], 1)[::-1], 1),
    "the last": lambda x: x[:, -1],
    "one in the middle": lambda x: x[:, 8:9, 1:],
    "one of booleans": lambda x: (x > 0)[:, 3] * x[:, 20],
    "padding alone": lambda x: jnp.pad(x[:, :0], ((0, 0), (5, 19), (0, 0)), constant_values=2.0),
    "cut to one": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-5, -18, 0), (0, 0, 0))),
    "does not divide": lambda x: x[:, 1:],
}


def values_and_gradients(cases, x):
    out = {}
    for name, fn in cases.items():
        fns = fn if isinstance(fn, tuple) else (fn,)
        y, back = jax.vjp(fns[0], x)
        weights = jnp.sin(jnp.arange(y.size, dtype=np.float32)).reshape(y.shape)
        out[name] = y, back(weights), *(f(x) for f in fns[1:])
    return out


@pytest.mark.parametrize(
    ("family", "mesh", "lowering"),
    covering.each([CONVOLUTIONS, POOLS, MOVES] * 2, [*MESHES, *reversed(MESHES)], ["shard_map", "jit"])[:4],
)
def test_values_and_gradients(family, mesh, lowering):
    x = normal(2, 24, 2)

    def step(x):
        return values_and_gradients(family, x)

    layout = MESHES[mesh].replace("; columns: model", "")
    assert_as_unsharded(step, x, lowerings=[lowering], mesh=mesh, layout=layout, dims={"x": "batch rows in"})


def test_axes_named_in_another_order_than_the_mesh():
    x = normal(2, 24, 2)
    step = functools.partial(values_and_gradients, {k: MOVES[k] for k in ("joined", "flipped", "padded", "shifted")})
    options = {"mesh": "model=2, data=2, idle=2", "layout": "rows: data+model", "dims": {"x": "batch rows in"}}
    assert_as_unsharded(step, x, lowerings=["shard_map"], **options)


def test_both_dims_of_an_image():
    """The second exchange includes the halo of the first, and thus the corners."""
    image, w = normal(2, 8, 12, 2), normal(3, 5, 2, 4)

    def step(image, w):
        def loss(image, w):
            y = lax.conv_general_dilated(image, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = lax.reduce_window(jnp.tanh(y), -jnp.inf, lax.max, (1, 2, 3, 1), (1, 1, 1, 1), "SAME")
            return (y**2).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(image, w)

    def tangents(image):
        pooled = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")  # noqa: E731
        return jax.jvp(pooled, (image,), (jnp.cos(image),))

    def both(image, w):
        return step(image, w), tangents(image), product(image[:, 0])

    dims = {"image": "batch rows columns in", "w": "_ _ in out"}
    want = jax.jit(both)(image, w)
    for (mesh, layout), lowering in zip(MESHES.items(), ["shard_map", "jit"], strict=True):
        run = mp.jit(both, mesh=mesh, layout=layout, dims=dims, lowering=lowering)
        assert_close(run(image, w), want, 2e-5, 2e-5)


def test_integers_and_booleans():
    """All elements are below (above) 0: a wrong fill value at the edge of the array or of a shard would be selected."""
    x = RNG.integers(-9, 9, (2, 24, 2)).astype(np.int8)

    def windows(x, init, op, taps=3, padding="SAME"):
        return lax.reduce_window(x, init, op, (1, taps, 1), (1, 1, 1), padding)

    def step(x):
        below, above, u = -2 - jnp.abs(x), 2 + jnp.abs(x), (jnp.abs(x) + 2).astype(jnp.uint8)
        wide = ((0, 0), (2, 2), (0, 0))
        return {
            "max": windows(below, np.int8(-128), lax.max),
            "min": windows(above, np.int8(127), lax.min),
            "max of unsigned": windows(u, np.uint8(0), lax.max, 5),
            "min of unsigned": windows(u, np.uint8(255), lax.min, 5),
            "sum": windows(x, np.int8(0), lax.add),
            "beyond": windows(below, np.int8(-128), lax.max, 5, wide),
            "from another start": windows(below, np.int8(-3), lax.max),
            "any": windows(x > 0, False, lax.bitwise_or),
            "all": windows(x > -9, True, lax.bitwise_and),
            "prod": windows(above, np.int8(1), lax.mul, 2),
            "joined": jnp.concatenate([x > 0, x < 0], 1),
            "flipped": (x > 0)[:, ::-1],
            "padded": jnp.pad(below, ((0, 0), (3, 1), (0, 0)), constant_values=-1),
            "spread": lax.pad(above, np.int8(5), ((0, 0, 0), (1, 0, 1), (0, 0, 0))),
            "true": jnp.pad(x > 0, ((0, 0), (1, 7), (0, 0)), constant_values=True),
            "shifted": lax.pad(above, np.int8(9), ((0, 0, 0), (3, -3, 0), (0, 0, 0))),
        }

    options = {"mesh": "data=4, model=2", "layout": "rows: data", "dims": {"x": "batch rows in"}}
    assert_as_unsharded(step, x, rtol=0, atol=0, **options)


def sent(fn, x, layout="rows: data"):
    return planned_and_compiled(fn, x, layout=layout, dims={"x": "batch rows in"})


ROW = 2 * 2 * 4  # bytes of a row of float32[2, 24, 2]
BLOCK = 6 * ROW


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (conv(3)[0], {("collective-permute", ROW): 2}),
        (conv(4)[0], {("collective-permute", ROW): 1, ("collective-permute", 2 * ROW): 1}),
        (conv(3, 2)[0], {("collective-permute", ROW): 1}),  # SAME pads at the end only
        (conv(15)[0], {("collective-permute", ROW): 1, ("collective-permute", BLOCK): 2}),  # both ends at once
        (conv(29)[0], {("all-gather", 3 * BLOCK): 1}),  # halos would be as much
        (conv(1, 2)[0], {}),
        (
            conv(3)[1],
            {("collective-permute", ROW): 2, ("all-reduce", 2 * 3 * 2 * 3 * 4 * 3 / 4): 1},
        ),  # a kernel's gradient
        (conv(3, 1, ((1, 2),), lhs_dilation=(2,))[0], {("collective-permute", ROW): 1}),
        (POOLS["max"], {}),
        (POOLS["max, overlapping"], {("collective-permute", ROW): 1}),
        (MOVES["flipped"], {("collective-permute", BLOCK): 1}),
        (MOVES["first half"], {("collective-permute", BLOCK / 2): 2}),
        (MOVES["every other"], {}),
        (MOVES["shifted"], {("collective-permute", 3 * ROW): 1}),
        (MOVES["the last"], {("all-reduce", 2 * ROW * 3 / 4): 1}),
        (lambda x: jnp.pad(x.sum(1, keepdims=True), ((0, 0), (5, 18), (0, 0))), {("all-reduce", 2 * ROW * 3 / 4): 1}),
        (MOVES["does not divide"], {("all-gather", 3 * BLOCK): 1}),
        (CONVOLUTIONS["does not divide"][0], {("all-gather", 3 * BLOCK): 1}),
    ],
)
def test_sends_the_halos_and_nothing_else(fn, expected):
    _, planned, found = sent(fn, normal(2, 24, 2))
    assert planned == found == expected


def test_half_shards_are_sent_once_for_any_number_of_devices():
    """Slices of shards at many distances are sent in two permutes, since no device has more than two partners."""
    _, planned, found = sent(lambda x: jnp.split(x, 2, 1), normal(2, 32, 2), "rows: data+model")
    assert planned == found == {("collective-permute", 2 * ROW): 4}


def test_a_window_along_a_dim_that_only_the_op_splits():
    """XLA's partitioner gets the gradient of a maximum wrong there (found by the fuzzer)."""
    weights = normal(12, 24, 3)

    def loss(x):
        x = lax.reduce_window(x.reshape(12, 24, 3), -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME")
        return (x * weights).sum()

    options = {"mesh": "rows=4, idle=2", "layout": "height?: rows", "dims": {"x": "_ height _ _"}}
    assert_as_unsharded(jax.grad(loss), normal(12, 6, 4, 3), lowerings=["jit"], rtol=1e-6, atol=0, **options)
