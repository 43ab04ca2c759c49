"""The grouped matmul of 8-bit operands on Hopper GPUs: values and protocol on the model of the machine, and what is refused."""

import covering
import gpu_runs
import jax
import jax.numpy as jnp
import pytest
from kernel_machine import SCHEDULES

from meshpar_kernels import scaled_grouped_matmul
from meshpar_kernels.grouped_matmul import hopper_scaled
from meshpar_kernels.grouped_matmul.hopper_scaled import unsupported


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    covering.each([[70, 0, 60, 77], [3, 5, 2, 300]], ["float8_e4m3fn", "int8"]),
    ids=str,
)
def test_values(sizes, dtype):
    for order in SCHEDULES[::25]:
        gpu_runs.scaled(sizes, order, dtype=dtype)


def test_rows_that_are_no_multiple_of_8_and_few_rows():
    for rows in (250, 13):
        gpu_runs.scaled([5, 3, 0, 2], rows=rows)


def test_what_it_refuses(monkeypatch):
    pytest.importorskip("absl")
    x = jnp.zeros((8, 128), jnp.int8)
    monkeypatch.setattr(hopper_scaled._compat, "gpu_architecture", lambda: (9, 0))
    assert unsupported(x, jnp.bfloat16) == ()
    assert unsupported(x[:0], jnp.int8) == (
        "lhs has no rows",
        f"the result is {jnp.int8}; the kernel writes bfloat16, float16 and float32",
    )
    monkeypatch.setattr(hopper_scaled._compat, "gpu_architecture", lambda: (10, 0))
    one = jnp.ones((8, 1), jnp.float32), jnp.zeros((1, 128, 128), jnp.int8), jnp.ones((1, 1, 1), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"sm_100; there is a kernel for sm_90a\n.*These can: xla"):
        jax.eval_shape(lambda n: scaled_grouped_matmul(x, *one, n, implementation="pallas"), jnp.ones(1, jnp.int32))
