"""Reductions over the axis of a ``vmap``: equal to the unsharded run, and only the results are sent."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from lowered import same
from same_results import assert_as_unsharded

import meshpar as mp

X = np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float32)
LAYOUT = "replica: data; features: model"
DIMS = {"x": "replica rows features"}
BOTH = ("jit", "shard_map")
MESHES = ["data=2, model=2, idle=2"]


def centred(x):
    return x - lax.pmean(x, "i")


def several(x):
    a, b = lax.psum((x / 16, {"b": jnp.square(x).mean(0) / 16}), "i")
    return x * a, b["b"]


def extrema(x):
    return (x - lax.pmax(x, "i")) / (1 + lax.pmax(x, "i") - lax.pmin(x, "i"))


def test_a_reduction_over_a_vmapped_axis_and_its_gradient_are_the_unsharded_ones():
    def loss(x):
        made = [jax.vmap(fn, axis_name="i")(x) for fn in (centred, several)]
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(made))

    def step(x):
        return jax.grad(loss)(x), [jax.vmap(fn, axis_name="i")(x) for fn in (centred, several, extrema)]

    same(step, X, layout=LAYOUT, dims=DIMS, lowerings=BOTH, meshes=MESHES)
    inside = mp.jit(loss, mesh="data=4, model=2", layout=LAYOUT, dims=DIMS, lowering="shard_map")
    np.testing.assert_allclose(jax.jit(jax.grad(inside))(X), jax.jit(jax.grad(loss))(X), rtol=1e-5, atol=1e-6)


def test_integers_booleans_and_narrow_floats():
    """Over one split dim and over both; no element is the identity of its reduction, and no two shards are equal."""
    rng = np.random.default_rng(3)
    n = rng.integers(2, 60, (16, 8)).astype(np.int8)
    flags = np.arange(128).reshape(16, 8) % 11 != 3
    halves = jnp.asarray(rng.integers(1, 9, (16, 8)) / 4, jnp.bfloat16)

    def step(n, flags, halves):
        u = n.astype(jnp.uint8)
        made = {}
        for axes in ((0,), (1,), (0, 1)):
            made |= {
                ("max", axes): (-n).max(axes),
                ("min", axes): n.min(axes),
                ("sum", axes): n.sum(axes),
                ("narrow sum", axes): n.sum(axes, dtype=n.dtype),
                ("prod", axes): jnp.prod(u | 1, axes, dtype=u.dtype),
                ("and", axes): lax.reduce_and(u | 9, axes),
                ("or", axes): lax.reduce_or(u & 6, axes),
                ("xor", axes): lax.reduce_xor(n, axes),
                ("unsigned min", axes): u.min(axes),
                ("unsigned max", axes): u.max(axes),
                ("all", axes): flags.all(axes),
                ("any", axes): (~flags).any(axes),
                ("none", axes): (flags & ~flags).any(axes),
                ("odd", axes): lax.reduce_xor(flags, axes),
                ("count", axes): flags.sum(axes),
                ("half max", axes): (-halves).max(axes),
                ("half min", axes): halves.min(axes),
                ("half prod", axes): jnp.prod(jnp.sign(halves - 1.1), axes),
            }
        for a in (0, 1):
            made |= {("argmax", a): jnp.argmax(-n, a), ("argmin", a): jnp.argmin(halves, a)}
        return {str(k): v for k, v in made.items()}

    options = {"mesh": "data=4, model=2", "layout": "rows: data; columns: model", "dims": {"*": "rows columns"}}
    assert_as_unsharded(step, n, flags, halves, rtol=0, atol=0, **options)
