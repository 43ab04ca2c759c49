"""Dense all-to-all and collective-permute in the TPU interpreter, with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_collectives_tpu import draw, names_of, simulated
from test_exchange import exchanged

from meshpar_kernels import all_to_all, collective_permute


@pytest.mark.parametrize(("shape", "mode"), [((4,), "on_wait"), ((2, 2), "eager")])
def test_all_to_all(shape, mode):
    """Blocks of 3 × 128, and blocks that are flattened and padded to rows of 128."""
    devices = int(np.prod(shape))
    for block, split, concat in (((3 * devices, 128), 0, 0), ((5, 3 * devices), 1, 0)):
        x = draw(shape, *block)
        got = simulated(
            lambda v, s=split, c=concat: all_to_all(
                v, names_of(shape), split_axis=s, concat_axis=c, implementation="pallas"
            ),
            shape, x, mode,
        )  # fmt: skip
        np.testing.assert_array_equal(got, exchanged(x, split, concat))


@pytest.mark.parametrize(
    ("pairs", "mode"),
    [([(0, 1), (1, 2), (2, 3), (3, 0)], "on_wait"), ([(0, 2), (1, 1)], "eager")],
    ids=["ring", "some"],
)
def test_collective_permute(pairs, mode):
    x = draw((4,), 7, 9, dtype=jnp.bfloat16)
    want = np.zeros_like(x)
    for s, t in pairs:
        want[t] = x[s]
    got = simulated(lambda v: collective_permute(v, "a", pairs, implementation="pallas"), (4,), x, mode)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_calls_with_other_pairs_follow_each_other():
    """Three permutes of one kernel and group, each of the array that the one before received."""
    steps = [[(0, 1), (1, 0)], [(1, 2), (2, 1), (0, 0), (3, 3)], [(2, 3), (3, 2)]]
    x = draw((4,), 8, 128)
    want = x
    for pairs in steps:
        sent = np.zeros_like(want)
        for s, t in pairs:
            sent[t] = want[s]
        want = sent

    def chain(v):
        for pairs in steps:
            v = collective_permute(v, "a", pairs, implementation="pallas")
        return v

    np.testing.assert_array_equal(simulated(chain, (4,), x), want)
