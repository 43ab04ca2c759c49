"""Relayouts and reshapes on devices: the same array as the unsharded one, and on the wire what the steps and the plan say."""

import itertools
import math
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_specs import specs_of

import meshpar as mp
from meshpar.hardware.topology import Stage
from meshpar.layout import to_partition_spec
from meshpar.lower.moves import bring, permutation
from meshpar.plan.resharding import relayout
from meshpar.rules.spmd import Grid
from meshpar.verify.hlo import collectives


def assert_brings(mesh, pairs, shape, dtype=np.int32):
    """Every pair in one program: each array arrives whole, and the compiled text sends the bytes of the steps."""
    mesh = mp.mesh(mesh)
    sizes = dict(mesh.shape)
    arrays = [np.arange(math.prod(shape), dtype=dtype).reshape(shape) + k for k in range(len(pairs))]
    steps = [s for have, need in pairs for s in relayout(have, need, shape, sizes)]

    def local(*shards):
        return [bring(x, *pair, sizes) for x, pair in zip(shards, pairs, strict=True)]

    ins, outs = ([to_partition_spec(spec) for spec in specs] for specs in zip(*pairs, strict=True))
    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(ins), out_specs=outs, check_vma=False)
    compiled = jax.jit(run).lower(*arrays).compile()
    placed = [jax.device_put(x, s) for x, s in zip(arrays, compiled.input_shardings[0], strict=True)]
    for pair, x, y in zip(pairs, arrays, compiled(*placed), strict=True):
        assert np.array_equal(x, y), pair
    planned = Counter((s.op, s.bytes(shape, np.dtype(dtype).itemsize, sizes)) for s in steps if s.op != "slice")
    assert Counter((c.op, c.bytes) for c in collectives(compiled.as_text())) == planned
    return planned


def one_of_each(pairs, axes, seed):
    """Of the pairs that are one another's with axes of equal size renamed, one."""
    classes = {}
    for pair in pairs:
        names = list(dict.fromkeys(a for spec in pair for entry in spec for a in entry))
        like = tuple(tuple(tuple(names.index(a) for a in entry) for entry in spec) for spec in pair)
        classes.setdefault(like, []).append(pair)
    return [random.Random(seed).choice(some) for some in classes.values()]


def all_pairs(rank, axes):
    return list(itertools.product(specs_of(rank, axes), repeat=2))


def test_every_relayout_of_a_matrix_on_2x2():
    planned = assert_brings("a=2, b=2", all_pairs(2, "ab"), (8, 16))
    assert {op for op, _ in planned} == {"all-gather", "all-to-all", "collective-permute"}


def test_every_relayout_of_a_matrix_with_an_idle_axis_and_with_parts_of_axes():
    assert_brings("a=2, idle=2, b=2", all_pairs(2, "ab")[::2], (8, 16))
    assert_brings("b=2, a=4", all_pairs(2, "ab"), (8, 16))


def test_every_kind_of_relayout_of_a_matrix_on_2x2x2():
    assert_brings("a=2, b=2, c=2", one_of_each(all_pairs(2, "abc"), "abc", 0), (8, 16))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_relayout_of_a_matrix_on_2x2x2(part):
    assert_brings("a=2, b=2, c=2", all_pairs(2, "abc")[part::8], (8, 16))


@pytest.mark.slow
def test_relayouts_of_three_dims():
    assert_brings("a=2, b=2", random.Random(1).sample(all_pairs(3, "ab"), 60), (4, 8, 4))
    assert_brings("a=2, b=2, c=2", random.Random(2).sample(all_pairs(3, "abc"), 60), (8, 8, 8))


def test_a_dim_that_goes_from_one_axis_to_another_keeps_its_order():
    """Mesh-TensorFlow returns ``[0, 2, 1, 3]``."""
    assert_brings("rows=2, columns=2", [((("rows",),), (("columns",),))], (4,))


def test_keys_and_empty_arrays():
    mesh = mp.mesh("a=2, b=2")
    sizes = dict(mesh.shape)
    have, need = (("a",), ("b",)), (("b",), ("a",))
    keys = jax.random.split(jax.random.key(3), (4, 8))
    for x in (keys, np.zeros((4, 0), np.float32)):
        run = jax.shard_map(
            lambda s: bring(s, have, need, sizes), mesh=mesh, in_specs=to_partition_spec(have),
            out_specs=to_partition_spec(need), check_vma=False,
        )  # fmt: skip
        y = jax.jit(run)(x)
        assert y.shape == x.shape
        if x is keys:
            assert np.array_equal(jax.random.key_data(x), jax.random.key_data(y))


def test_a_mesh_that_is_factored_over_the_torus():
    """Axes that have other names, and are several, inside the ``shard_map``."""
    mesh = mp.mesh("a=4, b=2")
    grid = Grid(mesh.shape, {"a": (Stage(2, "x"), Stage(2, "y")), "b": (Stage(2, "z"),)})
    pairs = all_pairs(2, "ab")[::3]
    x = np.arange(8 * 16).reshape(8, 16)

    def local(*shards):
        return [bring(x, *pair, grid) for x, pair in zip(shards, pairs, strict=True)]

    ins, outs = ([to_partition_spec(grid.spec(spec)) for spec in specs] for specs in zip(*pairs, strict=True))
    run = jax.shard_map(local, mesh=grid.mesh(mesh), in_specs=tuple(ins), out_specs=outs, check_vma=False)
    for pair, y in zip(pairs, jax.jit(run)(*[x] * len(pairs)), strict=True):
        assert np.array_equal(x, y), pair


def test_permutations_are_bijections_in_which_shards_at_home_stay():
    sizes = {"a": 2, "b": 2, "c": 2}
    seen = 0
    for have, need in all_pairs(2, "abc")[::5]:
        for step in relayout(have, need, (8, 16), sizes):
            if step.op == "collective-permute":
                sources, targets = zip(*permutation(step, sizes), strict=True)
                assert sorted(sources) == sorted(targets) == list(range(step.group))
                assert any(s != t for s, t in zip(sources, targets, strict=True))
                seen += 1
    assert seen
    (step,) = relayout((("a",), ("b",)), (("b",), ("a",)), (8, 16), sizes)[-1:]
    (swap,) = relayout((("a",), ("b",)), (("b",), ("a",)), (8, 16), {"a": 2, "b": 2})
    assert permutation(swap, {"a": 2, "b": 2}) == [(0, 0), (1, 2), (2, 1), (3, 3)]


# -- reshapes, from the language to the devices


def assert_reshapes(mesh, shape, to, pairs):
    """One program with a reshape for every pair of specs, each with dims of its own: equal to the unsharded reshapes."""
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    arrays = {f"x{k}": x + k for k in range(len(pairs))}
    dims, to_dims, rules = {}, {}, []
    for k, (name, specs) in enumerate(zip(arrays, pairs, strict=True)):
        named = [[f"{side}{i}_{k}" for i in range(len(spec))] for side, spec in zip("pq", specs, strict=True)]
        dims[f"arrays/{name}"], to_dims[name] = map(" ".join, named)
        rules += [
            f"{d}: {'+'.join(axes)}"
            for ds, spec in zip(named, specs, strict=True)
            for d, axes in zip(ds, spec, strict=True)
            if axes
        ]

    def program(arrays):
        return {name: mp.named(x.reshape(to), to_dims[name]) for name, x in arrays.items()}

    run = mp.jit(program, mesh=mp.mesh(mesh), layout="; ".join(rules), dims=dims, lowering="shard_map")
    plan = run.plan(arrays)
    assert [h.spec for h in plan.inputs] == [to_partition_spec(plan.specs[id(v)]) for v in plan.program.inputs]
    assert Counter(plan.out_specs) == Counter(need for _, need in pairs)
    compiled = run.lower(arrays).compile()
    for name, y in compiled(*jax.device_put((arrays,), compiled.input_shardings[0])).items():
        assert np.array_equal(y, arrays[name].reshape(to)), pairs[int(name[1:])]
    planned = Counter((c.op, c.bytes) for c in plan.collectives)
    assert Counter((c.op, c.bytes) for c in collectives(compiled.as_text())) == planned
    return plan


@pytest.mark.parametrize(
    ("shape", "to"), [((8, 16), (128,)), ((128,), (8, 16)), ((16, 8), (8, 16)), ((2, 64), (128,)), ((8, 2, 4), (64,))]
)
def test_reshapes_that_split_and_merge_dims_on_2x2(shape, to):
    assert_reshapes("a=2, b=2", shape, to, reshape_pairs(shape, to, "ab", 60))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "to"), [((8, 16), (128,)), ((128,), (8, 16)), ((16, 8), (8, 16))])
def test_reshapes_that_split_and_merge_dims_on_2x2x2(shape, to):
    assert_reshapes("a=2, b=2, c=2", shape, to, reshape_pairs(shape, to, "abc", 40))


def reshape_pairs(shape, to, axes, most):
    """(spec of the operand, spec of the result), where they divide."""
    ends = []
    for dims in (shape, to):
        specs = specs_of(len(dims), axes)
        ends.append([spec for spec in specs if all(n % 2 ** len(e) == 0 for n, e in zip(dims, spec, strict=True))])
    pairs = list(itertools.product(*ends))
    return pairs if len(pairs) <= most else random.Random(4).sample(pairs, most)


def test_a_slice_of_what_is_exchanged_as_well():
    """XLA's CPU compiler cuts what is exchanged into slices; one of them was taken for the program's own, which lay otherwise."""
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8, 6), (2, 8, 8)))

    def f(x, y):
        z, u = jnp.einsum("abc,kab->kca", x, y), jnp.einsum("abc,kcb->back", y, y)
        last, every = jax.lax.scan(lambda v, w: (v + w.mean(), v @ jnp.ones((8, 5))), y, u)
        return z[1:2], z.reshape(2, 6, 4, 2), last, every

    layout = mp.Layout("f, d, a, b?: x", resolve="cost")
    fn = mp.jit(
        f, mesh=mp.mesh("x=2, y=2, idle=2"), layout=layout, dims={"x": "_ _ b", "y": "a f d"}, lowering="shard_map"
    )
    for found, expected in zip(fn(x, y), f(x, y), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resolve", ["order", "cost"])
def test_a_reshape_that_splits_a_dim_between_its_neighbours(resolve):
    """Of [4, 4, 4] as [8, 8] the middle dim lies in both; what contracts the second one wants its axis."""
    rng = np.random.default_rng(3)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 4, 4), (8, 4)))
    layout = mp.Layout("e: x+y; d: x", resolve=resolve)
    fn = mp.jit(lambda x, w: x.reshape(8, 8) @ w, mesh=mp.mesh("x=2, y=2, idle=2"), layout=layout,
                dims={"x": "_ e _", "w": "d _"}, lowering="shard_map")  # fmt: skip
    np.testing.assert_allclose(fn(x, w), x.reshape(8, 8) @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "to", "have", "need", "sent"),
    [
        # the minor of two merged dims is split, and so is the result: each device sends half of what it has, not all
        ((8, 16), (128,), "- a", "a", [("all-to-all", 128)]),
        ((8, 16), (128,), "a b", "ab", [("all-to-all", 64)]),
        ((8, 16), (128,), "a -", "a", []),
        ((8, 16), (128,), "- a", "-", [("all-gather", 256)]),
        ((128,), (8, 16), "a", "- a", [("all-to-all", 128)]),
        ((128,), (8, 16), "ab", "a b", [("all-to-all", 64)]),
        # neither end can be reshaped in blocks over these axes: both go to the major dim, which can
        ((16, 8), (8, 16), "- ab", "- ab", [("all-to-all", 96), ("all-to-all", 96)]),
    ],
)
def test_what_reshapes_send(shape, to, have, need, sent):
    pair = tuple(tuple(tuple(e.strip("-")) for e in spec.split()) for spec in (have, need))
    plan = assert_reshapes("a=2, b=2", shape, to, [pair])
    assert [(c.op, c.bytes) for c in plan.collectives] == sent
