"""Bytes that the kernels copy, counted on the models of the machines, against what they say and what their walk needs: a tile that
is loaded twice gives the right values, and shows here."""

import itertools
import math

import covering
import gpu_runs
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_runs

from meshpar_kernels.grouped_matmul import tpu, tpu_transpose
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem

LOADS = [np.random.default_rng(2).multinomial(470, [1 / 6] * 6).tolist(), [128, 0, 256, 0, 0, 90]]
loads = pytest.mark.parametrize("sizes", LOADS, ids=str)
ROWS, K, N, G = 512, 256, 384, 6


def pipelined(monkeypatch, function, *args, **options):
    """(bytes that a TPU kernel's blocks bring and take, by operand; what it says of itself). A block is copied when its
    place changes."""
    calls = []

    def pallas_call(kernel, *, grid_spec, out_shape, cost_estimate, **_):
        def call(*operands):
            calls.append((grid_spec, operands, out_shape, cost_estimate))
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return call

    monkeypatch.setattr(tpu.pl, "pallas_call", pallas_call)
    function(*args, **options)
    ((spec, operands, out, estimate),) = calls
    scalars = [np.asarray(x) for x in operands[: spec.num_scalar_prefetch]]
    arrays = [*operands[spec.num_scalar_prefetch :], out]
    copied, before = [0] * len(arrays), [None] * len(arrays)
    for at in itertools.product(*(range(int(n)) for n in spec.grid)):
        for i, (array, block) in enumerate(zip(arrays, [*spec.in_specs, spec.out_specs], strict=True)):
            place = tuple(int(p) for p in block.index_map(*at, *scalars))
            if place != before[i]:
                sides = zip(place, block.block_shape, array.shape, strict=True)
                copied[i] += math.prod(min(n, size - p * n) for p, n, size in sides) * array.dtype.itemsize
                before[i] = place
    return copied, estimate


@pytest.mark.parametrize(("sizes", "transposed", "blocks"), covering.pairs(LOADS, [False, True], [0, 2]), ids=str)
def test_the_tpu_kernel_brings_weights_once_and_rows_once_for_each_stretch(sizes, transposed, blocks, monkeypatch):
    lhs = jnp.zeros((ROWS, K), jnp.bfloat16)
    shape = (G, N, K) if transposed else (G, K, N)
    rhs = jnp.zeros(shape, jnp.int8 if blocks else jnp.bfloat16)
    scale = (jnp.zeros((G, blocks, N), jnp.float32),) if blocks else ()
    options = {"rhs_scale": scale, "transpose_rhs": transposed, "out_dtype": jnp.dtype(jnp.float32)}
    problem = MatmulProblem(lhs, (rhs,), jnp.asarray(sizes), **options)
    copied, estimate = pipelined(monkeypatch, tpu.grouped_matmul, problem, tile=tpu.Tile(128, K, 128))
    absent = sizes.count(0) * (K * N * rhs.dtype.itemsize + blocks * N * 4)  # weights of empty groups are not copied
    assert sum(copied) == estimate.bytes_accessed - absent
    assert copied[0] == lhs.nbytes * N // 128
    assert copied[-1] == ROWS * N * 4


@loads
def test_the_tpu_transpose_writes_each_sum_once(sizes, monkeypatch):
    lhs, rhs = jnp.zeros((ROWS, K), jnp.bfloat16), jnp.zeros((ROWS, N), jnp.bfloat16)
    problem = TransposeProblem(lhs, rhs, jnp.asarray(sizes), groups=G, out_dtype=jnp.dtype(jnp.float32))
    function = tpu_transpose.grouped_matmul_transpose
    copied, estimate = pipelined(monkeypatch, function, problem, tile=tpu.Tile(128, 128, 128))
    absent = ROWS - -(-sum(sizes) // 128) * 128  # tiles without a row of a group stay where they are
    assert sum(copied) == estimate.bytes_accessed - absent * 2 * (K * N // 128) * 2
    assert copied[-1] == G * K * N * 4


REMOTE = {
    "all_gather": lambda: tpu_runs.ring("all_gather", sizes=(2, 3)),
    "reduce_scatter": lambda: tpu_runs.ring("reduce_scatter", sizes=(4,)),
    "all_reduce_small": lambda: tpu_runs.all_reduce(sizes=(3,)),
    "all_to_all": lambda: tpu_runs.all_to_all(sizes=(2, 3)),
    "collective_permute": lambda: tpu_runs.permute(pairs=[(0, 1), (1, 2), (2, 0)]),
    "all_gather_matmul": lambda: tpu_runs.gather(sizes=(4,)),
    "matmul_reduce_scatter": lambda: tpu_runs.scatter(sizes=(4,)),
}


@pytest.mark.parametrize("run", REMOTE.values(), ids=REMOTE)
def test_tpu_kernels_send_what_they_say(run):
    machine = run()
    assert machine.copied["remote"] == sum(e.remote_bytes_transferred for e in machine.estimates) > 0


def test_gpu_kernels_send_each_row_to_each_peer_once():
    devices, rows, k, n = 3, 72, 128, 64
    for module in gpu_runs.FUSED.values():
        machine = gpu_runs.gather(module, devices=devices, rows=rows, k=k, n=n)
        assert machine.copied["remote"] == devices * (devices - 1) * rows * k * 2
        machine = gpu_runs.scatter(module, devices=devices, rows=rows, k=k, n=n)
        assert machine.copied["remote"] == devices * (devices - 1) * rows * n * 2
