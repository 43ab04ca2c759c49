"""Reduce-scatters: in which shape they are made, and that it changes no number."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.compat.quirks import reduce_scatter_shape
from meshpar._src.lower.collectives import combined
from meshpar._src.plan.steps import Scatter
from meshpar._src.rules.mesh_in_shard_map import Grid

BF16, F32 = 2, 4


@pytest.mark.parametrize(
    ("shape", "dim", "itemsize", "as_", "at"),
    [
        ((2048, 1792), 0, BF16, (2048, 1792), 0),
        ((2048, 8, 128), 0, BF16, (2048, 8, 128), 0),
        ((2048, 4, 128), 0, BF16, (2048, 512), 0),  # 4 would be padded to 8
        ((2048, 1, 128), 0, F32, (2048, 128), 0),
        ((3, 2048, 2, 2, 128), 1, BF16, (3, 2048, 512), 1),
        ((1792, 2048), 1, BF16, (1792, 16, 128), 1),  # 128 lanes are kept
        ((1792, 6144), 1, BF16, (1792, 16, 384), 1),
        ((1792, 4096), 1, BF16, (1792, 4096), 1),
        ((1792, 1024), 1, BF16, (1792, 1024), 1),
        ((1792, 2048), 1, F32, (1792, 2048), 1),
        ((4, 128, 2048), 2, BF16, (512, 16, 128), 1),
        ((2048,), 0, BF16, (2048,), 0),
    ],
)
def test_in_which_shape_an_array_is_scattered_over_16_devices(shape, dim, itemsize, as_, at):
    assert reduce_scatter_shape(shape, dim, 16, itemsize) == (as_, at)


SCATTERED = [((8, 2, 3), 0), ((2, 8, 1, 4), 1), ((3, 256), 1), ((2, 3, 768), 2), ((1, 8, 3, 2), 1), ((8, 8, 2), 0)]
ALGORITHMS = ["staged", "native", "hierarchical", "all_reduce"]


@pytest.mark.parametrize(
    ("shape", "dim", "algorithm"), [(*case, ALGORITHMS[k % 4]) for i, case in enumerate(SCATTERED) for k in (i, i + 1)]
)
def test_it_changes_no_number(shape, dim, algorithm):
    mesh = mp.mesh("a=2, b=2, c=2")
    grid = Grid(dict(mesh.shape), {})
    # small whole numbers, so that their sums are exact in bfloat16
    x = np.random.default_rng(0).integers(-8, 9, (8, *shape)).astype(jnp.bfloat16)

    def local(x):
        return combined(x[0], ((),) * len(shape), [Scatter(dim, ("a", "b"), algorithm)], (), "sum", grid)

    spec = P(*[("a", "b") if i == dim else None for i in range(len(shape))])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(("a", "b", "c")), out_specs=spec, check_vma=False))
    found = run(x)
    every = x.astype(np.float64).reshape(2, 2, 2, *shape).sum((0, 1))
    for shard, (_, _, c) in zip(found.addressable_shards, itertools.product(range(2), repeat=3), strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data, np.float64), every[c][shard.index])
