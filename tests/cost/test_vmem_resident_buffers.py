"""Arrays in VMEM, which a matmul then need not read and write, by hand."""

import jax
import jax.numpy as jnp
import pytest
from arrays import BF16, bf16

import meshpar as mp
from meshpar._src.cost.kernel_time import kernel_times

SIDE, FEATURES = 16, 128
ELEMENTS = SIDE * SIDE * FEATURES  # of one image
WEIGHTS = BF16 * FEATURES * FEATURES


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def computation_of(fn, images, topology="v5e:2x4", weights=2):
    """(primitive, bytes to and from HBM) of each kernel, with so many images a device."""
    args = [bf16(8 * images, SIDE, SIDE, FEATURES), *[bf16(1, 1, FEATURES, FEATURES)] * weights]
    dims = {"x": "batch height width _"}
    plan = mp.plan(fn, *args, mesh="data=8", topology=topology, layout="batch: data", dims=dims)
    return [(node.name, k.bytes) for node, k in kernel_times(plan).items()]


def two(x, v, w):
    return jnp.tanh(conv(conv(x, v), w))


@pytest.mark.parametrize(
    ("topology", "images", "between"),
    [
        ("v5e:2x4", 512, 0),  # 32 MiB, of 128
        ("v5e:2x4", 2048, 1),  # as large as all of it
        ("v6e:2x4", 512, 0),
        ("tpu7x:2x2x1", 256, 0),  # 16 MiB, of 32 less those in which kernels work
        ("tpu7x:2x2x1", 264, 1),
        ("v5p:2x2x2", 128, 1),  # two cores
        ("h100:8", 512, 1),  # has caches
    ],
)
def test_what_the_next_product_reads_stays_where_there_is_room(topology, images, between):
    size = BF16 * images * ELEMENTS
    (_, first), (_, second) = computation_of(two, images, topology)
    assert first == (1 + between) * size + WEIGHTS
    assert second == (1 + between) * size + WEIGHTS


def test_results_and_what_is_sent_are_in_hbm():
    size = BF16 * 512 * ELEMENTS
    assert computation_of(lambda x, w: conv(x, w), 512, weights=1) == [("conv_general_dilated", 2 * size + WEIGHTS)]


def test_arrays_that_are_no_images_stay_between_kernels_and_are_not_prefetched():
    x = bf16(8 * 1024, 128)
    plan = mp.plan(lambda x, v, w: x @ v @ w, x, bf16(128, 128), bf16(128, 128), mesh="data=8", topology="v5e:2x4",
                   layout="batch: data", dims={"x": "batch _"})  # fmt: skip
    assert [k.bytes for k in kernel_times(plan).values()] == [BF16 * 1024 * 128 + WEIGHTS] * 2
