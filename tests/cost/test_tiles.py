"""Images in a TPU's memory: by hand, what tiles add to a few channels or images, and where they add nothing."""

import json

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.cost.device_computation import computation_of
from meshpar._src.cost.tiles import tiled
from meshpar._src.report.document import plain
from meshpar._src.report.plan_html_page import cards, memory_curve
from meshpar._src.units import format_memory


def fn(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.tanh(y), (x * 2).reshape(-1)


def plan_of(batch, inner, channels, topology):
    dims = {"x": "batch height width inner", "w": "_ _ inner features"}
    images, weights = bf16(batch, 16, 16, inner), bf16(3, 3, inner, channels)
    return mp.plan(fn, images, weights, mesh="data=16", topology=topology, layout="batch: data", dims=dims)


def bytes_of(batch, channels, topology="v5e:4x4"):
    plan = plan_of(batch, 128, channels, topology)
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


def padded_plan(topology):
    """Images of 3 channels: 2 × 16 images a device, whose tiles of 128 channels and 16 images have 128/3 of their elements."""
    return plan_of(16 * 32, 3, 256, topology)


def test_padding_is_a_part_of_the_memory():
    memory = padded_plan("v5e:4x4").memory
    elements = 32 * 16 * 16 * 3
    stored = 2 * 16 * 16 * tiled(3, 32)  # the channels in rows of 128 images
    assert memory.by_kind["other inputs"] - 2 * 3 * 3 * 3 * 256 == stored
    assert memory.padding["other inputs"] == pytest.approx(stored - 2 * elements)
    assert sum(memory.padding.values()) < memory.peak == pytest.approx(sum(memory.by_kind.values()))
    (padding,) = (p for name, _, _, p in memory.largest if name == "x bfloat16[batch height width inner]")
    assert padding == pytest.approx(stored - 2 * elements)


def test_reports_name_the_padding():
    plan = padded_plan("v5e:4x4")
    amount = format_memory(sum(plan.memory.padding.values()))
    assert f"{amount} of the peak are padding" in plain(plan, 400)
    assert f"{amount} of it are padding to tiles" in cards(plan)
    assert f"{amount} of the peak are padding" in memory_curve(plan)
    assert json.loads(plan.to_json())["memory"]["padding"] == plan.memory.padding


@pytest.mark.parametrize("topology", ["2x h100:8", None])
def test_elsewhere_there_is_no_padding(topology):
    plan = padded_plan(topology)
    assert plan.memory.padding == {}
    assert not any("padding" in text for text in (str(plan), cards(plan), memory_curve(plan)))
