"""Resharding on devices: the result of ``jax.device_put``, and collectives as planned."""

import functools
import itertools
import math
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_specs import specs_of
from jax.sharding import NamedSharding
from same_results import assert_close

import meshpar as mp
from meshpar._src.hardware.collective_algorithms import ALGORITHMS
from meshpar._src.hardware.topology import Stage
from meshpar._src.layout import to_partition_spec
from meshpar._src.lower.collectives import combined, follow, reduce_scatter
from meshpar._src.plan.resharding import reshard, reshard_bytes
from meshpar._src.rules.mesh_in_shard_map import Grid
from meshpar._src.verify.hlo import collectives


def assert_reshards(mesh, pairs, shape, dtype=np.int32):
    """Every pair in one program: every shard arrives, and the compiled text sends the bytes of the moves."""
    mesh = mp.mesh(mesh)
    sizes = dict(mesh.shape)
    arrays = [np.arange(math.prod(shape), dtype=dtype).reshape(shape) + k for k in range(len(pairs))]
    paths = [reshard(*pair, shape, sizes) for pair in pairs]
    grid = Grid(sizes, {}, cpu=True)

    def local(*shards):
        return [follow(x, path, grid) for x, path in zip(shards, paths, strict=True)]

    ins, outs = ([to_partition_spec(spec) for spec in specs] for specs in zip(*pairs, strict=True))
    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(ins), out_specs=outs, check_vma=False)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, ins, strict=True)]
    compiled = jax.jit(run).lower(*placed).compile()
    for pair, x, y, spec in zip(pairs, arrays, compiled(*placed), outs, strict=True):
        expected = jax.device_put(x, NamedSharding(mesh, spec))
        for a, b in zip(y.addressable_shards, expected.addressable_shards, strict=True):
            assert a.device == b.device
            assert np.array_equal(a.data, b.data), pair
    size = np.dtype(dtype).itemsize
    sent = [(m.op, m.bytes(shape, size, sizes)) for path in paths for m in path for _ in range(m.times)]
    planned = Counter(x for x in sent if x[0] != "slice")
    assert Counter((c.op, c.bytes) for c in collectives(compiled.as_text())) == planned
    return planned


def one_of_each(pairs, seed):
    """Of the pairs that are one another's with axes of equal size renamed, one."""
    classes = {}
    for pair in pairs:
        names = list(dict.fromkeys(a for spec in pair for entry in spec for a in entry))
        like = tuple(tuple(tuple(names.index(a) for a in entry) for entry in spec) for spec in pair)
        classes.setdefault(like, []).append(pair)
    return [random.Random(seed).choice(some) for some in classes.values()]


def all_pairs(rank, axes):
    return list(itertools.product(specs_of(rank, axes), repeat=2))


def test_every_resharding_of_a_matrix_on_2x2():
    planned = assert_reshards("a=2, b=2", all_pairs(2, "ab"), (8, 16))
    assert {op for op, _ in planned} == {"all-gather", "all-to-all", "collective-permute"}


def test_every_resharding_of_a_matrix_with_an_idle_axis_and_with_axes_of_two_sizes():
    assert_reshards("a=2, idle=2, b=2", all_pairs(2, "ab")[::8], (8, 16))
    assert_reshards("b=2, a=4", all_pairs(2, "ab")[::2], (8, 16))


def test_bytes_are_at_most_those_of_xla():
    """Of drawn pairs of specs on axes of two sizes, each compiled by itself; rounded: XLA's all-gathers are as ours."""
    mesh = mp.mesh("a=4, b=2")
    sizes, shape = dict(mesh.shape), (16, 32)
    swap = (("a",), ("b",)), (("b",), ("a",))
    leave = (("a", "b"), ()), (("b",), ("a",))
    for have, need in [swap, leave, *random.Random(0).sample(all_pairs(2, "ab"), 12)]:
        ins, outs = (NamedSharding(mesh, to_partition_spec(spec)) for spec in (have, need))
        x = jax.ShapeDtypeStruct(shape, np.float32, sharding=ins)
        text = jax.jit(lambda x: x, out_shardings=outs).lower(x).compile().as_text()
        theirs = sum(c.bytes * c.count for c in collectives(text))
        assert reshard_bytes(have, need, shape, 4, sizes) <= theirs, (have, need)


def test_every_kind_of_resharding_of_a_matrix_on_2x2x2():
    assert_reshards("a=2, b=2, c=2", one_of_each(all_pairs(2, "abc"), 0)[::4], (8, 16))


def test_reshardings_of_three_dims():
    assert_reshards("a=2, b=2, c=2", random.Random(2).sample(all_pairs(3, "abc"), 15), (8, 8, 8))


@pytest.mark.parametrize("axes", ["a=2, b=2", "a=4, b=2"])  # shards change places, and parts of shards
def test_keys_empty_arrays_and_arrays_in_host_memory(axes):
    mesh = mp.mesh(axes)
    grid = Grid(mesh.shape, {}, cpu=True)
    have, need = (("a",), ("b",)), (("b",), ("a",))
    keys = jax.random.split(jax.random.key(3), (4, 8))
    before, after = map(to_partition_spec, (have, need))
    hosted = jax.device_put(np.arange(32.0).reshape(4, 8), NamedSharding(mesh, before, memory_kind="pinned_host"))

    def local(x):
        return follow(x, reshard(have, need, (4, 8), grid), grid)

    run = jax.shard_map(local, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    for x in (keys, np.zeros((4, 0), np.float32), hosted):
        y = jax.jit(run)(x)
        assert y.shape == x.shape
        if x is keys:
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.array_equal(x, y)


@pytest.mark.parametrize("factored", [False, True])
def test_a_mesh_that_is_factored_over_the_torus(factored):
    """Axes that have other names, and are several, inside the ``shard_map``; gathered into other memory first, or not."""
    mesh = mp.mesh("a=4, b=2")
    grid = Grid(mesh.shape, {"a": (Stage(2, "x"), Stage(2, "y")), "b": (Stage(2, "z"),)})
    pairs = all_pairs(2, "ab")[::5]
    x = np.arange(8 * 16).reshape(8, 16).astype(np.float32)

    def local(*shards):
        return [
            follow(x, reshard(*pair, x.shape, dict(mesh.shape)), grid, factored)
            for x, pair in zip(shards, pairs, strict=True)
        ]

    ins, outs = ([to_partition_spec(grid.spec(spec)) for spec in specs] for specs in zip(*pairs, strict=True))
    run = jax.shard_map(local, mesh=grid.mesh(mesh), in_specs=tuple(ins), out_specs=outs, check_vma=False)
    for pair, y in zip(pairs, jax.jit(run)(*[x] * len(pairs)), strict=True):
        assert np.array_equal(x, y), pair


@pytest.mark.parametrize(
    ("kind", "dtype", "together"),
    [
        ("sum", np.float32, np.add), ("max", np.float32, np.maximum), ("min", np.int32, np.minimum),
        ("prod", np.float32, np.multiply), ("and", np.bool_, np.logical_and), ("or", np.bool_, np.logical_or),
        ("and", np.int32, np.bitwise_and), ("or", np.uint8, np.bitwise_or),
    ],
)  # fmt: skip
def test_terms_are_combined(kind, dtype, together):
    """Reductions without a collective (products, bits) are gathered first."""
    mesh = mp.mesh("a=2, b=2, c=2")
    lowest, end = (0, 2) if dtype == np.bool_ else (1, 6)
    terms = np.random.default_rng(0).integers(lowest, end, (4, 6)).astype(dtype)

    def local(x):
        return combined(x[0], ((),), [], ("a", "c"), kind, Grid(mesh.shape, {}))

    run = jax.shard_map(local, mesh=mesh, in_specs=jax.P(("a", "c")), out_specs=jax.P(), check_vma=False)
    found = jax.jit(run)(terms)
    assert found.dtype == dtype
    expected = functools.reduce(together, terms)
    assert all(np.array_equal(s.data, expected) for s in found.addressable_shards)


def test_a_slice_before_an_all_to_all():
    """XLA's CPU compiler splits an all-to-all into slices, and merged one with a slice of the program in another layout."""
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8, 6), (2, 8, 8)))

    def f(x, y):
        z, u = jnp.einsum("abc,kab->kca", x, y), jnp.einsum("abc,kcb->back", y, y)
        last, every = jax.lax.scan(lambda v, w: (v + w.mean(), v @ jnp.ones((8, 5))), y, u)
        return z[1:2], z.reshape(2, 6, 4, 2), last, every

    layout = mp.Layout("f, d, a, b?: x", resolve="cost")
    fn = mp.jit(f, mesh="x=2, y=2, idle=2", layout=layout, dims={"x": "_ _ b", "y": "a f d"}, lowering="shard_map")
    assert_close(fn(x, y), f(x, y), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("name", "groups", "dim"),
    [("native", [8], 0), ("staged", [2, 2, 2], 1), ("hierarchical", [2, 2, 2], 0), ("ring", [2, 2, 2], 1)],
)
def test_every_algorithm_emits_the_blocks_of_one_psum_scatter(name, groups, dim):
    mesh = mp.mesh("a=2, b=2, c=2")
    x = jax.random.randint(jax.random.key(0), (8, 16, 24), -9, 9).astype(jnp.float32)

    axes = ("a", "b", "c")

    def scatter(x):
        return reduce_scatter(x[0], axes, dim, ALGORITHMS[name], ("a",))

    spec = jax.P(*[axes if i == dim else None for i in range(2)])
    run = jax.shard_map(scatter, mesh=mesh, in_specs=jax.P(axes), out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(run(x), np.asarray(x).sum(0))
    sent = [e for e in jaxpr_of(run, x) if e.primitive.name == "reduce_scatter"]
    axes = [e.params["axis_name"] for e in sent]
    sizes = [math.prod(mesh.shape[n] for n in ((a,) if isinstance(a, str) else a)) for a in axes]
    assert sizes == groups
    if name == "hierarchical":
        assert "a" in str(axes[-1])


def jaxpr_of(fn, *args):
    """The equations of the body of a shard_map."""
    (outer,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    inner = outer.params["jaxpr"]
    return getattr(inner, "jaxpr", inner).eqns
