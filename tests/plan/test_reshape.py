"""Reshapes that split and merge dims, from the layout to the devices: the same arrays, and on the wire what the plan says."""

import itertools
import math
import random
from collections import Counter

import jax
import numpy as np
import pytest
from all_specs import specs_of

import meshpar as mp
from meshpar._src.layout import to_partition_spec
from meshpar._src.verify.hlo import collectives


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
    assert Counter(h.spec for h in plan.outputs) == Counter(to_partition_spec(need) for _, need in pairs)
    compiled = run.lower(arrays).compile()
    for name, y in compiled(*jax.device_put((arrays,), compiled.input_shardings[0])).items():
        assert np.array_equal(y, arrays[name].reshape(to)), pairs[int(name[1:])]
    planned = Counter((c.op, c.bytes) for c in plan.collectives for _ in range(c.runs))
    assert Counter((c.op, c.bytes) for c in collectives(compiled.as_text())) == planned
    return plan


@pytest.mark.parametrize(
    ("shape", "to"), [((8, 16), (128,)), ((128,), (8, 16)), ((16, 8), (8, 16)), ((2, 64), (128,)), ((8, 2, 4), (64,))]
)
def test_reshapes_that_split_and_merge_dims_on_2x2(shape, to):
    assert_reshapes("a=2, b=2", shape, to, reshape_pairs(shape, to, "ab", 20))


def test_reshapes_that_split_and_merge_dims_on_2x2x2():
    assert_reshapes("a=2, b=2, c=2", (16, 8), (8, 16), reshape_pairs((16, 8), (8, 16), "abc", 20))


def reshape_pairs(shape, to, axes, most):
    """(spec of the operand, spec of the result), where they divide."""
    ends = []
    for dims in (shape, to):
        specs = specs_of(len(dims), axes)
        ends.append([spec for spec in specs if all(n % 2 ** len(e) == 0 for n, e in zip(dims, spec, strict=True))])
    pairs = list(itertools.product(*ends))
    return pairs if len(pairs) <= most else random.Random(4).sample(pairs, most)


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
