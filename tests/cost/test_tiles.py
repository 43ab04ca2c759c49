"""Images in a TPU's memory: by hand, what tiles add to a few channels or images, and where they add nothing."""

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar.cost.kernels import computation_of
from meshpar.cost.tiles import tiled


def fn(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.tanh(y), (x * 2).reshape(-1)


def bytes_of(batch, channels, topology="v5e:4x4", layout="batch: data"):
    plan = mp.plan(
        fn, bf16(batch, 16, 16, 128), bf16(3, 3, 128, channels), mesh="data=16", topology=topology, layout=layout,
        dims={"x": "batch height width inner", "w": "_ _ inner features"},
    )  # fmt: skip
    return computation_of(plan).outputs[0].bytes / (2 * 16 * 16)  # elements of one place of the images on a device


@pytest.mark.parametrize(
    ("rows", "columns", "elements"),
    [(64, 64, 64 * 128), (64, 128, 64 * 128), (3, 128, 4 * 128), (1, 10, 128), (9, 130, 16 * 256)],
)
def test_tiles_by_hand(rows, columns, elements):
    assert tiled(rows, columns) == elements


@pytest.mark.parametrize(
    ("batch", "channels", "elements"),
    [
        (64 * 16, 64, 64 * 128),  # channels fill half of the lanes, and so would images
        (128 * 16, 64, 128 * 64),  # images fill them
        (64 * 16, 256, 64 * 256),
        (2 * 16, 256, 2 * 256),  # low tiles
    ],
)
def test_an_image_is_laid_out_with_channels_or_images_innermost(batch, channels, elements):
    assert bytes_of(batch, channels) == elements


def test_a_gpu_has_no_tiles():
    assert bytes_of(64 * 16, 64, topology="2x h100:8") == 64 * 64


def test_a_program_without_convolutions_has_the_bytes_of_its_elements():
    plan = mp.plan(lambda x: jnp.tanh(x), bf16(64, 7, 7, 3), mesh="data=16", topology="v5e:4x4", layout="batch: data",
                   dims={"x": "batch _ _ channels"})  # fmt: skip
    assert computation_of(plan).outputs[0].bytes == 2 * 4 * 7 * 7 * 3
