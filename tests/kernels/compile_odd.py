"""Odd shapes for the TPU compiler, as a process of its own: for each, what `unsupported` says and what the compiler does.

    python tests/kernels/compile_odd.py v4:2x2x1

prints a line of JSON: a list of [name, reasons, what the compiler says or null].
"""

import json
import sys
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar_kernels import (
    all_gather_matmul,
    all_reduce_small,
    all_to_all,
    collective_permute,
    grouped_matmul,
    grouped_matmul_transpose,
    reduce_scatter,
    route,
)
from meshpar_kernels.routing import tpu_gather

BF16, F32 = jnp.bfloat16, jnp.float32


def cases(struct):
    """(name, function, arguments)."""
    for m, k, n, groups, dtype in [
        (1, 128, 128, 1, BF16),
        (100, 72, 40, 3, F32),
        (7, 8, 1, 2, BF16),
        (64, 130, 257, 5, BF16),
        (512, 2048, 1408, 2, BF16),
        (512, 2048, 1408, 2, F32),
        (512, 2880, 2880, 2, BF16),
    ]:
        sizes = struct((groups,), jnp.int32)
        for transposed in (False, True):
            rhs = struct((groups, n, k) if transposed else (groups, k, n), dtype)

            def matmul(lhs, rhs, sizes, transposed=transposed):
                return grouped_matmul(lhs, rhs, sizes, transpose_rhs=transposed, implementation="pallas_tpu")

            operands = struct((m, k), dtype), rhs, sizes
            yield f"grouped_matmul {m, k, n, groups} {dtype.__name__} {transposed}", matmul, operands

        def sums(lhs, rhs, sizes):
            return grouped_matmul_transpose(lhs, rhs, sizes, implementation="pallas_tpu")

        operands = struct((m, k), dtype), struct((m, n), dtype), sizes
        yield f"grouped_matmul_transpose {m, k, n, groups} {dtype.__name__}", sums, operands
    for m, k, n, blocks, dtype, transposed in [
        (100, 72, 40, None, jnp.int8, True),
        (7, 256, 130, 2, jnp.float8_e4m3fn, False),
        (64, 192, 136, 3, jnp.int8, False),
        (128, 328, 300, None, jnp.float8_e4m3fn, False),
        (128, 768, 256, 2, jnp.int8, True),
    ]:

        def quantized(lhs, rhs, scale, sizes, transposed=transposed):
            options = {"rhs_scale": scale, "transpose_rhs": transposed, "implementation": "pallas_tpu"}
            return grouped_matmul(lhs, rhs, sizes, **options)

        def pulled(lhs, rhs, scale, sizes, grad, matmul=quantized):
            return jax.vjp(lambda lhs: matmul(lhs, rhs, scale, sizes), lhs)[1](grad)

        rhs = struct((3, n, k) if transposed else (3, k, n), dtype)
        scale = struct((3, n) if blocks is None else (3, blocks, n), F32)
        operands = struct((m, k), BF16), rhs, scale, struct((3,), jnp.int32)
        yield f"quantized {m, k, n, blocks} {rhs.dtype}", quantized, operands
        yield f"quantized {m, k, n, blocks} {rhs.dtype} backward", pulled, (*operands, struct((m, n), BF16))
    for width, k in [(64, 2), (100, 2), (128, 2), (192, 2), (384, 2), (2880, 2), (16384, 32), (32768, 1)]:
        for dtype in (BF16, F32):
            x, index = struct((301, width), dtype), struct((100, k), jnp.int32)

            def gather(x, index):
                refused = tpu_gather.gather_sum_unsupported(x, index)
                if refused:
                    raise NotImplementedError(str(refused))
                return tpu_gather.gather_sum(x, index, None)

            yield f"gather_sum {width} {dtype.__name__}", gather, (x, index)
    for tokens, experts, k in [(1, 8, 2), (40, 60, 6), (13, 7, 7), (512, 2048, 8), (512, 4096, 8)]:
        call = lambda x, k=k: route(x, k, implementation="pallas_tpu")  # noqa: E731
        yield f"route {tokens, experts, k}", call, (struct((tokens, experts), F32),)


def collectives(mesh):
    """(name, function, arguments) of kernels that communicate, over all devices of a mesh."""
    replicated, devices = NamedSharding(mesh, P()), len(mesh.devices)
    shift = [(i, i + 1) for i in range(devices - 1)]

    def case(name, function, shape, dtype, kernel="pallas"):
        mapped = jax.shard_map(
            lambda x: function(x, "a", implementation=kernel),
            mesh=mesh,
            in_specs=P(),
            out_specs=P("a"),
            check_vma=False,
        )
        return f"{name} {shape} {jnp.dtype(dtype)}", mapped, (jax.ShapeDtypeStruct(shape, dtype, sharding=replicated),)

    for mib in (1, 2, 4):
        yield case("all_reduce_small", all_reduce_small, (mib << 8, 1024), F32, "pallas_tpu")
    for dtype in (BF16, F32):
        yield case("reduce_scatter", reduce_scatter, (8192, 8192), dtype)
    for shape in [(devices, 3), (4 * devices, 5, 256), (8 * devices, 1)]:
        for dtype in (F32, BF16, jnp.int8, jnp.uint32, jnp.float8_e4m3fn):
            yield case("all_to_all", all_to_all, shape, dtype)
            yield case("collective_permute", partial(collective_permute, pairs=shift), shape, dtype)
    square = lambda x, axis, **how: all_gather_matmul(x, x.T, axis, **how)  # noqa: E731
    yield case("all_gather_matmul", square, (1024, 1024), BF16, "pallas_tpu")


def main(topology: str) -> None:
    config = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}  # as a v4 runs
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **config).devices
    device, mesh = devices[0], jax.sharding.Mesh(np.array(devices), ("a",))
    sharding = jax.sharding.SingleDeviceSharding(device)
    found = []
    rows = cases(lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    for name, function, arguments in [*rows, *collectives(mesh)]:
        reasons, problem = None, None
        alone = jax.default_device(device) if not isinstance(arguments[0].sharding, NamedSharding) else nullcontext()
        try:
            with alone:
                traced = jax.jit(function).trace(*arguments)
                traced.lower(lowering_platforms=("tpu",)).compile()
        except NotImplementedError as error:
            reasons = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:300]
        found.append([name, reasons, problem])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
