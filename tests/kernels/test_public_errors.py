"""What the public functions raise outside of `shard_map`, and on a platform without the requested kernel: the fix is named."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshpar_kernels as mk

BF16 = jnp.bfloat16


def matrix(*shape):
    return jnp.ones(shape, BF16)


def plan():
    return mk.route(jnp.ones((64, 8)), 2)


def runs():
    return [jnp.zeros(8, jnp.int32)] * 4


OVER_DEVICES = {
    "all_gather": lambda **o: mk.all_gather(matrix(64, 128), "x", **o),
    "reduce_scatter": lambda **o: mk.reduce_scatter(matrix(64, 128), "x", **o),
    "all_reduce": lambda **o: mk.all_reduce(matrix(64, 128), "x", **o),
    "all_reduce_small": lambda **o: mk.all_reduce_small(matrix(64, 128), "x", **o),
    "all_to_all": lambda **o: mk.all_to_all(matrix(8, 64, 128), "x", **o),
    "collective_permute": lambda **o: mk.collective_permute(matrix(64, 128), "x", pairs=[(0, 1)], **o),
    "all_gather_matmul": lambda **o: mk.all_gather_matmul(matrix(64, 128), matrix(128, 128), "x", **o),
    "matmul_reduce_scatter": lambda **o: mk.matmul_reduce_scatter(matrix(128, 128), matrix(128, 128), "x", **o),
    "ring_attention": lambda **o: mk.ring_attention(*[matrix(1, 128, 4, 64)] * 3, "x", **o),
    "ragged_all_to_all": lambda **o: mk.ragged_all_to_all(
        matrix(64, 128), matrix(64, 128), *runs(), axis_name="x", **o
    ),
    "expert_dispatch": lambda **o: mk.expert_dispatch(matrix(64, 128), plan(), axis_name="x", **o),
}
ON_ONE_DEVICE = {
    "grouped_matmul": lambda **o: mk.grouped_matmul(matrix(64, 128), matrix(2, 128, 128), jnp.array([32, 32]), **o),
    "grouped_matmul_transpose": lambda **o: mk.grouped_matmul_transpose(
        matrix(64, 128), matrix(64, 128), jnp.array([32, 32]), **o
    ),
    "route": lambda **o: mk.route(jnp.ones((64, 8)), 2, **o),
    "permute": lambda **o: mk.permute(matrix(64, 128), plan(), **o),
    "combine": lambda **o: mk.combine(matrix(128, 128), plan(), **o),
    "ring_attention": lambda **o: mk.ring_attention(*[matrix(1, 128, 4, 64)] * 3, None, **o),
}


@pytest.mark.parametrize("op", OVER_DEVICES)
def test_outside_of_shard_map_the_shard_map_to_write_is_said(op):
    with pytest.raises(ValueError, match=rf"{op}: no mesh axis 'x' is bound(.|\n)*jax.shard_map\(lambda .*: {op}\("):
        OVER_DEVICES[op]()


MISSING = r"implementation='{}' runs on .*, and the program is lowered for cpu\. Leave it out"


@pytest.mark.parametrize("op", ON_ONE_DEVICE)
def test_a_kernel_of_another_platform_names_the_fix(op):
    for name in ("pallas", *(("pallas_tpu", "splash", "cudnn") if op == "ring_attention" else ())):
        with pytest.raises(NotImplementedError, match=f"{op}: {MISSING.format(name)}"):
            jax.block_until_ready(ON_ONE_DEVICE[op](implementation=name))


@pytest.mark.parametrize("op", OVER_DEVICES)
def test_a_kernel_of_another_platform_names_the_fix_in_shard_map(op):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    option = "exchange" if op == "expert_dispatch" else "implementation"
    call = functools.partial(OVER_DEVICES[op], **{option: "pallas"})
    mapped = jax.shard_map(
        lambda: jax.tree.leaves(call())[0][None], mesh=mesh, in_specs=(), out_specs=P("x"), check_vma=False
    )
    with pytest.raises(NotImplementedError, match=f"{op}: {MISSING.format('pallas')}"):
        jax.jit(mapped)()
