"""The fused matmuls for GPUs without one: the matmul of a single device in JAX's GPU interpreter with race detection, what is
refused, and which kernels gradients use. Several devices are in `test_gpu_copies` and `test_protocols`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import gpu_race_detection, has_gpu_interpreter
from jax.sharding import PartitionSpec as P
from kernel_cases import mesh_of, near

from meshpar_kernels import _compat, all_gather_matmul, matmul_reduce_scatter
from meshpar_kernels.collective_matmul import gpu, gpu_blackwell, gpu_hopper, gpu_kernels

RNG = np.random.default_rng(5)
BF16 = jnp.dtype(jnp.bfloat16)

interpreted = pytest.mark.skipif(
    not has_gpu_interpreter(), reason="the interpreter for Mosaic GPU kernels needs jax 0.11"
)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), BF16)


both_kernels = pytest.mark.parametrize("kernels", [gpu_hopper, gpu_blackwell], ids=["hopper", "blackwell"])


@interpreted
@both_kernels
def test_the_matmul_of_a_single_device(kernels):
    """With transposed weights, and tiles that the rows do not fill."""
    m, k, n = 200, 128, 192
    x, w = normal(m, k), normal(n, k)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    gather = gpu.gather_order(m, k, n, 1, 2)
    dtypes = {"out_dtype": jnp.dtype(jnp.float32), "comm_dtype": jnp.dtype(jnp.float32)}
    scatter = gpu.scatter_order(m, k, n, 1, 2, **dtypes)
    options = {"transposed": True, "num_sms": 2}
    with gpu_race_detection():
        rounded = gpu_kernels.all_gather_matmul(kernels, x, w, gather, "a", out_dtype=BF16, **options)
        exact = gpu_kernels.matmul_reduce_scatter(kernels, x[None], w, scatter, "a", **dtypes, **options)
        jax.block_until_ready((rounded, exact))
    assert (rounded.shape, rounded.dtype) == ((1, m, n), BF16)
    near(rounded[0], want, 1e-2)
    near(exact, want, 1e-5)


def traced(op, x, w, mesh=None, axis="a", **options):
    """The program of a function of one device's x and w, for the GPU kernel."""
    mesh = mesh_of(4) if mesh is None else mesh
    f = functools.partial(op, axis_name=axis, implementation="pallas_gpu", **options)

    def loss(x, w):
        return f(x, w).astype(jnp.float32).sum()

    mapped = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return str(jax.make_jaxpr(mapped)(x, w))


@pytest.mark.parametrize(
    ("op", "x", "w", "options", "says"),
    [
        (all_gather_matmul, jnp.zeros((8, 64)), jnp.zeros((64, 64)), {}, "operands are float32 and float32; the tensor cores"),
        (all_gather_matmul, normal(8, 64), jnp.zeros((64, 64), jnp.float16), {}, "bfloat16 and float16; .* both alike"),
        (all_gather_matmul, normal(8, 60), normal(60, 64), {}, "K=60: rows of 120 bytes are no multiple of 16"),
        (all_gather_matmul, normal(8, 64), normal(64, 30), {}, "columns=30: rows of 60 bytes are no multiple of 16"),
        (all_gather_matmul, normal(8, 64), normal(64, 64), {"axis": ("a", "b"), "mesh": (2, 2)}, "over one mesh axis"),
        (all_gather_matmul, normal(0, 64), normal(64, 64), {}, "an operand is empty"),
        (matmul_reduce_scatter, normal(8, 64), normal(64, 64), {"comm_dtype": jnp.int8}, "comm_dtype is int8; the kernel takes"),
        (matmul_reduce_scatter, normal(8, 64), normal(64, 64), {"preferred_element_type": jnp.float64}, "out_dtype is float64"),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused(op, x, w, options, says):
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = mesh_of(*options["mesh"])
    with pytest.raises(NotImplementedError, match=says):
        traced(op, x, w, **options)


def test_machines_without_nvlink_are_refused(monkeypatch):
    x, w = normal(8, 64), normal(64, 64)

    def reasons(devices=8):
        return " ".join(gpu.unsupported(x, w, "a", gpu.gather_order(8, 64, 64, devices, 2)))

    assert not reasons()
    assert "9 devices: NVLink joins at most 8 in one machine" in reasons(9)
    for kind in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        monkeypatch.setattr(_compat, "device_kind", lambda kind=kind: kind)
        assert f"{kind} has no NVLink switch" in reasons()
    monkeypatch.setattr(_compat, "device_kind", lambda: "NVIDIA H20")
    monkeypatch.setattr(_compat, "multiprocessors", lambda: 78)
    assert "NVIDIA H20 has 78 multiprocessors, and 100 blocks wait for each other" in reasons()
    assert not gpu.unsupported(x, w, "a", gpu.gather_order(8, 64, 64, 8, 2), num_sms=46)
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (8, 0))
    assert "the GPU is sm_80; there is a kernel for sm_90a and sm_100a" in reasons()


def test_the_gradient_of_each_collective_matmul_is_the_other():
    """The kernel's gradient of x is the other kernel; that of w stays with the ring."""
    x, w = normal(8, 64), normal(64, 64)
    gather, scatter = traced(all_gather_matmul, x, w), traced(matmul_reduce_scatter, x, w)
    for program in (gather, scatter):
        assert "meshpar_all_gather_matmul" in program
        assert "meshpar_matmul_reduce_scatter" in program
        assert "ppermute" in program
