"""Quantized collectives by TPU kernels in the interpreter, with race detection: bit for bit as with XLA's collectives."""

import jax
import numpy as np
import pytest
from test_collectives_tpu import draw, names_of, simulated
from test_exchange import mesh_of, on_devices

from meshpar_kernels import quantized_all_gather, quantized_reduce_scatter


@pytest.mark.parametrize("op", [quantized_all_gather, quantized_reduce_scatter])
def test_codes_are_sent_by_kernels(op):
    x = draw((4,), 32, 128)
    got = simulated(lambda v: op(v, names_of((4,)), implementation="pallas"), (4,), x)
    with jax.default_device(jax.devices()[0]):
        want = on_devices(lambda v: op(v, "a"), mesh_of(4), x)
    np.testing.assert_array_equal(got, want)
