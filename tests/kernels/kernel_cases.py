"""Inputs that several tests of the kernels share, and ways to run and to lower functions of devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from interpreters import race_detection
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

from meshpar_kernels import RoutePlan, expert_combine, expert_dispatch, grouped_matmul, route

RNG = np.random.default_rng(0)

BIAS = RNG.normal(size=16)
ROUTERS = {
    "mixtral": {"k": 2},
    "top1": {"k": 1, "renormalize": False},
    "deepseek-v2": {"k": 3, "groups": 4, "top_groups": 2, "group_top": 1, "renormalize": False, "scale": 4.0},
    "deepseek-v3": {"k": 4, "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "bias": BIAS},
    "capacity": {"k": 2, "capacity": 5},
    "all": {"k": 16, "score": "sigmoid"},
}


def odd_logits(tokens=40, experts=16):
    """Ordinary rows, and every kind of odd one."""
    logits = RNG.normal(size=(tokens, experts)).astype(np.float32)
    logits[3, 2] = np.nan
    logits[5] = -np.inf
    logits[7, 1:] = -np.inf
    logits[9] = 0.0
    logits[11, 4] = np.inf
    logits[13] = 1e30
    logits[15] = np.arange(experts) * 100.0
    logits[17, ::2] = logits[17, 1::2]
    return logits


def make(logits, k, bias=None, **options) -> RoutePlan:
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    return route(jnp.asarray(logits), k, bias=bias, **options)


def quantized(dtype, *shape):
    """Random weights of all sizes that int8 or float8_e4m3fn has."""
    return jnp.asarray(RNG.integers(-127, 128, shape) if dtype == jnp.int8 else 30 * RNG.normal(size=shape), dtype)


def stated_error(x, dtype, block):
    """The largest error of each element of x, quantized to codes of a dtype in blocks of this shape (of the last dims)."""
    x = np.abs(np.asarray(x, np.float64))
    sizes = [s for size, b in zip(x.shape[-len(block) :], block, strict=True) for s in (size // b, b)]
    blocks = x.reshape(*x.shape[: -len(block)], *sizes)
    dims = tuple(range(blocks.ndim - 2 * len(block) + 1, blocks.ndim, 2))
    most = np.broadcast_to(blocks.max(dims, keepdims=True), blocks.shape)
    error = most / 254 if dtype == "int8" else np.maximum(blocks / 16, most / 458752)
    return error.reshape(x.shape) + 1e-6 * x


SIZES = {
    "uneven": [9, 0, 11, 14],
    "full": [10, 10, 10, 10],
    "one group": [0, 40, 0, 0],
    "none": [0, 0, 0, 0],
    "negative": [5, -7, 20, 3],
    "too many": [30, 30, 2**31 - 1, 4],
}
"""Group sizes for 40 rows of four groups."""


def mesh_of(*sizes: int) -> Mesh:
    """The first devices, with the axes a, b and c."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def on_devices(function, mesh, *arrays, order=None, check_vma=True):
    """`function` of array[rank] of each array, on every device: results by rank, which is row-major in the axes `order`."""
    spec = PartitionSpec(order or mesh.axis_names)

    def one(*shards):
        return jax.tree.map(lambda y: y[None], function(*(x[0] for x in shards)))

    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.tree.map(np.asarray, jax.block_until_ready(jax.jit(mapped)(*map(jnp.asarray, arrays))))


def simulated(function, sizes, *arrays, mode="on_wait", seed=0):
    """As `on_devices`, on a mesh of these sizes in the TPU interpreter; raises if two accesses race."""
    with race_detection(dma_execution_mode=mode, random_seed=seed):
        return on_devices(function, mesh_of(*sizes), *arrays, check_vma=False)


def lowered(function, *arguments, platform="cuda") -> str:
    """The program of a function for a platform; newer versions of JAX ask for the kind of GPU."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu") if platform == "cuda" else None
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def near(got, want, tolerance):
    """Equal within a share of the largest element."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * (np.abs(want).max() or 1.0))


def expert_layer(
    x, expert, weight, matrices, *, experts, rows=None, rounds=1, carried=True, implementation=None, **how
):
    """A matmul by each token's experts, over the mesh axes a and b: (results, rows that are left after each round, most rows).

    Args:
      carried: weights are sent with the rows, and not applied afterwards.
      how: of `expert_dispatch`.
    """
    total, left, most = 0.0, [], jnp.zeros(1, jnp.int32)
    how |= {"axis_name": ("a", "b"), "rows": rows, "weight": weight if carried else None}
    for r in range(rounds):
        first = r * (rows or 0)
        buffer, d = expert_dispatch(x, expert, experts=experts, first=first, implementation=implementation, **how)
        y = grouped_matmul(buffer, matrices, d.group_sizes, row_scale=d.row_scale, implementation="xla")
        total = total + expert_combine(y, d, weight=None if carried else weight, implementation=implementation)
        left.append(d.dropped)
        most = d.most[None]
    return total, jnp.stack(left)[None], most


def by_experts(x, expert, weight, matrices):
    """Σ_j weight · x · matrices[expert] of each token, in float64."""
    y = np.zeros(x.shape)
    for t, j in np.argwhere((expert >= 0) & (expert < len(matrices))):
        y[t] += float(weight[t, j]) * (x[t].astype(float) @ matrices[expert[t, j]].astype(float))
    return y
