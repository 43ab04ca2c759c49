"""Comparison of a step under layouts with a reference."""

import itertools

import jax
import numpy as np

import meshpar as mp

TOLERANCE = 3e-7


def largest_difference(got, expected):
    """The largest difference of two trees of arrays, relative to the largest element of each array (at least 1)."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    assert pairs
    for a, b in pairs:
        assert np.shape(a) == np.shape(b)
    return max(
        float(np.max(np.abs(np.float64(a) - np.float64(b)))) / max(1.0, float(np.max(np.abs(b)))) for a, b in pairs
    )


def assert_same_under(layouts, fn, *args, expected, tolerance=TOLERANCE, dims=None):
    """``fn`` has the expected results under each (mesh, layout), the lowerings by turns, and on one device.

    Rounding errors depend on the order of sums, which differs between CPUs: the difference of one device is allowed to be ten times
    the tolerance, and that of a layout twice that of one device.
    """
    on_one = largest_difference(jax.jit(fn)(*args), expected)
    assert on_one <= 10 * tolerance, on_one
    for (mesh, layout), lowering in zip(layouts, itertools.cycle(["shard_map", "jit"]), strict=False):
        got = mp.jit(fn, mesh=mesh, layout=layout, lowering=lowering, dims=dims)(*args)
        difference = largest_difference(got, expected)
        assert difference <= max(tolerance, 2 * on_one), (mesh, layout, lowering, difference, on_one)


def assert_close(got, want, rtol=1e-7, atol=0.0):
    """Two trees have the same number of leaves, which are close as in ``assert_allclose``."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_as_unsharded(fn, *args, lowerings=("shard_map", "jit"), rtol=2e-5, atol=2e-5, **options):
    """``fn`` has the dtypes and results of one device under each lowering; ``options``: of ``mp.jit``."""
    want = jax.jit(fn)(*args)
    for lowering in lowerings:
        got = mp.jit(fn, lowering=lowering, **options)(*args)
        assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
        assert_close(got, want, rtol, atol)
