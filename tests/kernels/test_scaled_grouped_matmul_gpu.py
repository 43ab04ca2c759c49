"""The grouped matmul of 8-bit operands on Hopper GPUs: what the CUDA compiler makes of it, values and protocol on the model of
the machine, and what is refused."""

import covering
import gpu_runs
import jax
import jax.numpy as jnp
import pytest
from kernel_machine import SCHEDULES
from test_gpu_aot import needs_cuda, run_program

from meshpar_kernels import scaled_grouped_matmul
from meshpar_kernels.grouped_matmul import hopper_scaled
from meshpar_kernels.grouped_matmul.hopper_scaled import unsupported

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from meshpar_kernels import quantized_grouped_matmul, scaled_grouped_matmul
from meshpar_kernels.shapes import MATMULS

config, name, dtype, what = open(sys.argv[1]).read(), *sys.argv[2:5]
device = topologies.get_topology_desc("", platform="cuda", target_config=config, topology="1x1x1").devices[0]
s, f32 = MATMULS[name], jnp.float32

def codes(x, x_scale, w, w_scale, sizes):
    return scaled_grouped_matmul(x, x_scale, w, w_scale, sizes, implementation="pallas")

def gradients(x, w, g, sizes):
    matmul = lambda x, w: quantized_grouped_matmul(
        x, w, sizes, dtype=dtype, transpose_rhs=True, implementation="pallas")
    return jax.vjp(matmul, x, w)[1](g)

def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

scales = struct(s.m, s.k // 128, dtype=f32), struct(s.groups, s.n // 128, s.k // 128, dtype=f32)
sizes = struct(s.groups, dtype=jnp.int32)
x, w = struct(s.m, s.k, dtype=dtype), struct(s.groups, s.n, s.k, dtype=dtype)
function, structs = {
    "codes": (codes, [x, scales[0], w, scales[1], sizes]),
    "gradients": (gradients, [struct(s.m, s.k), struct(s.groups, s.n, s.k), struct(s.m, s.n), sizes]),
}[what]
with jax.default_device(device):
    compiled = jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",)).compile()
print("RESULT", compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count("mosaic_gpu"))
"""


@needs_cuda
@pytest.mark.parametrize(
    ("shape", "dtype", "what"),
    [
        ("deepseek-v3-up", "float8_e4m3fn", "codes"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("deepseek-v3-down", "float8_e4m3fn", "codes"),
                ("deepseek-v3-up", "int8", "codes"),
                ("deepseek-v3-up", "float8_e4m3fn", "gradients"),
            ]
        ),
    ],
)
def test_it_compiles_for_hopper_and_spills_nothing(shape, dtype, what):
    """The codes' matmul takes as memory the transposed scales of lhs alone."""
    from meshpar_kernels.shapes import MATMULS

    printed, facts = run_program(PROGRAM, "sm_90a", shape, dtype, what)
    temp, calls = map(int, printed.split())
    assert calls >= 1
    assert facts["spills"] == 0, facts
    assert not facts.get("serialized"), facts
    assert facts.get("spare registers", 0) >= 0, facts
    if what == "codes":
        s = MATMULS[shape]
        assert temp < s.m * s.k // 128 * 4 + (1 << 20)
        assert facts["grid"] == 132, facts
        assert facts["resident"] == 1, facts


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    covering.each([[128, 9, 0, 100], [70, 0, 60, 77], [0, 256, 0, 0], [3, 5, 2, 300]], ["float8_e4m3fn", "int8"]),
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
