"""Dense all-to-all and collective-permute in the TPU interpreter, with race detection."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import simulated
from test_collectives_tpu import draw, names_of
from test_exchange import exchanged, permuted

from meshpar_kernels import all_to_all, collective_permute


@pytest.mark.parametrize(("shape", "mode"), [((4,), "on_wait"), ((2, 2), "eager")])
def test_all_to_all(shape, mode):
    """Blocks of 3 × 128, and blocks that are flattened and padded to rows of 128."""
    devices = int(np.prod(shape))
    for block, split, concat in (((3 * devices, 128), 0, 0), ((5, 3 * devices), 1, 0)):
        x = draw(shape, *block)
        how = {"axis_name": names_of(shape), "split_axis": split, "concat_axis": concat, "implementation": "pallas"}
        got = simulated(functools.partial(all_to_all, **how), shape, x, mode=mode)
        np.testing.assert_array_equal(got, exchanged(x, split, concat))


def test_collective_permutes_follow_each_other():
    """Three of one kernel and group, each of the array that the one before received: a ring, to some devices, and to themselves."""
    steps = [[(0, 1), (1, 2), (2, 3), (3, 0)], [(1, 2), (2, 1), (0, 0), (3, 3)], [(0, 2), (1, 1), (2, 3)]]
    x = draw((4,), 7, 9, dtype=jnp.bfloat16)
    want = functools.reduce(permuted, steps, x)

    def chain(v):
        for pairs in steps:
            v = collective_permute(v, "a", pairs, implementation="pallas")
        return v

    np.testing.assert_array_equal(simulated(chain, (4,), x), want)
