"""Images in a TPU's memory: by hand, what tiles add to a few channels or images, and where they add nothing."""

import json

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.cost.kernel_time import kernel_times
from meshpar._src.cost.kernels import computation_of
from meshpar._src.cost.tiles import tiled
from meshpar._src.report.document import plain
from meshpar._src.report.html import cards, memory_curve
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


def test_a_gpu_has_no_tiles():
    assert bytes_of(64 * 16, 64, topology="2x h100:8") == 64 * 64


def test_a_program_without_convolutions_has_the_bytes_of_its_elements():
    plan = mp.plan(lambda x: jnp.tanh(x), bf16(64, 7, 7, 3), mesh="data=16", topology="v5e:4x4", layout="batch: data",
                   dims={"x": "batch _ _ channels"})  # fmt: skip
    assert computation_of(plan).outputs[0].bytes == 2 * 4 * 7 * 7 * 3


def test_a_large_array_has_the_two_dims_innermost_that_need_the_least_padding():
    """Scores of 16 heads and 197 tokens, for 32 images: 256 lanes for the keys, and the images in sublanes."""
    plan = mp.plan(lambda x: jnp.tanh(x), bf16(512, 16, 197, 197), mesh="data=16", topology="v5e:4x4", layout="batch: data",
                   dims={"x": "batch heads _ _"})  # fmt: skip
    assert computation_of(plan).outputs[0].bytes == pytest.approx(2 * 32 * 16 * 197 * 256)


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


def normalized(x, w):
    """The images of a convolution, less the mean of each quarter of their channels."""
    y, _ = fn(x, w)
    groups = y.reshape(*y.shape[:-1], 4, -1)
    return (groups - groups.mean((1, 2, 4), keepdims=True)).reshape(y.shape) * y


def cut_into_patches(x, w):
    x = x.reshape(-1, 4, 56, 4, 56, 3).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, 16, 56 * 56 * 3) @ w


def queries_and_keys(x, w):
    qk = jnp.einsum("bsd,dchf->cbshf", x, w)
    return jnp.einsum("bqhf,bkhf->bhqk", qk[0], qk[1])


def looked_up(table, ids):
    return jax.grad(lambda t: jnp.tanh(t[ids]).astype(jnp.float32).sum())(table)


def kernels(step, *args, topology="v5p:2x2x4", layout="batch: data", **dims):
    """(name, bytes that it reads and writes) of each kernel of a plan for 16 devices, in order."""
    plan = mp.plan(step, *args, mesh="data=16", topology=topology, layout=layout, dims=dims, lowering="shard_map")
    return [(node.name, time.bytes) for node, time in kernel_times(plan).items()], plan


IMAGES = bf16(16 * 8, 64, 64, 128), bf16(3, 3, 128, 160)
PATCHES = bf16(16 * 8, 224, 224, 3), bf16(56 * 56 * 3, 256)


@pytest.mark.parametrize(("topology", "copies"), [("v5p:2x2x4", 2), ("2x h100:8", 0)])
def test_the_channels_of_an_image_are_copied_into_groups_and_back(topology, copies):
    """The groups of 40 channels are stored with the positions innermost, 64 by 128."""
    found, _ = kernels(normalized, *IMAGES, topology=topology, x="batch _ _ _", w="_ _ _ channels")
    size = 2 * 8 * 64 * 64 * 160
    moved = [read for name, read in found if name == "transpose"]
    assert moved == pytest.approx([size * 256 / 160 + 2 * size] * copies, rel=1e-3)


def test_images_of_three_channels_are_copied_for_each_reshape_and_transposition():
    found, _ = kernels(cut_into_patches, *PATCHES, x="batch _ _ _", w="_ embed")
    assert [name for name, _ in found] == ["transpose"] * 3 + ["dot_general"]


def test_slices_of_a_matmul_are_stored_for_a_batched_matmul():
    found, _ = kernels(queries_and_keys, bf16(256, 128, 512), bf16(512, 2, 4, 128), x="batch _ _", w="_ _ heads _")
    half = 2 * 16 * 128 * 4 * 128
    assert [name for name, _ in found] == ["dot_general", "slice", "slice", "dot_general"]
    assert [read for name, read in found if name != "dot_general"] == [2 * half] * 2


@pytest.mark.parametrize(("heads", "features", "factor"), [(16, 64, 2), (12, 64, 8 / 3), (8, 128, 1)])
def test_heads_that_do_not_fill_the_lanes_pad_a_matmul(heads, features, factor):
    """Heads of an array with queries, keys and values are padded; alone they are only if they are contracted."""
    for arrays, padded in ((3, factor), (1, 1.0)):
        c, equation = (3,) * (arrays > 1), "bsd,dchf->bschf" if arrays > 1 else "bsd,dhf->bshf"
        w = bf16(512, *c, heads, features)
        names = " ".join("_" for _ in w.shape)
        _, plan = kernels(lambda x, w, e=equation: jnp.einsum(e, x, w), bf16(256, 128, 512), w, x="batch _ _", w=names)
        (op,) = plan.time.ops
        assert op.flops == pytest.approx(2 * 16 * 128 * 512 * heads * features * arrays * padded)
    _, plan = kernels(lambda x, w: jnp.einsum("bshf,hfd->bsd", x, w), bf16(256, 128, heads, features),
                      bf16(heads, features, 512), x="batch _ _ _", w="_ _ _")  # fmt: skip
    assert plan.time.ops[0].flops == pytest.approx(2 * 16 * 128 * 512 * heads * features * factor)


@pytest.mark.parametrize(("layout", "copies"), [("embed: data", 2), ("vocab: data", 0)])
def test_a_table_is_copied_where_its_columns_are_sent(layout, copies):
    """It is gathered for a lookup, and its gradient is scattered, along the columns."""
    found, _ = kernels(looked_up, bf16(4096, 1024), jax.ShapeDtypeStruct((512,), jnp.int32), layout=f"batch: data; {layout}",
                       table="vocab embed", ids="batch")  # fmt: skip
    assert [read for name, read in found if name == "transpose"] == [2 * 2 * 4096 * 1024] * copies


@pytest.mark.parametrize("topology", ["2x h100:8", None])
def test_elsewhere_there_is_no_padding(topology):
    plan = padded_plan(topology)
    assert plan.memory.padding == {}
    assert not any("padding" in text for text in (str(plan), cards(plan), memory_curve(plan)))
