"""Shardings of arguments as pictures in the terminal."""

import io
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from rich.console import Console

import meshpar as mp
from meshpar._src.report.shards import shards_renderable
from meshpar.errors import PatternError

DIMS = {"w/up": "layers embed mlp", "w/down": "layers mlp embed", "w/norm": "embed", "w/scale": "", "x": "batch embed"}
SHAPES = {"up": (2, 16, 32), "down": (2, 32, 16), "norm": (16,), "scale": ()}
W = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def planned(mesh, layout):
    def step(w, x):
        return (x * w["norm"] * w["scale"]) @ w["up"][0] @ w["down"][1]

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return mp.plan(step, W, x, mesh=mesh, layout=layout, dims=DIMS)


def shown(plan, pattern, width=80, colour=False):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None).print(
        shards_renderable(plan, pattern)
    )
    return out.getvalue()


def grid(text):
    """The texts of the blocks of a picture, row by row."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "mlp: model",
        "embed: data",
        "mlp: data+model",
        "mlp: model; embed: data",
        "embed: model+data",
        "layers: model",
    ],
)
@pytest.mark.parametrize("path", ["w/up", "w/down", "w/norm", "w/scale", "x"])
def test_blocks_have_the_devices_that_store_them(path, layout):
    mesh = mp.mesh("data=4, model=2")
    plan = planned("data=4, model=2", layout)
    (h,) = [h for h in plan.inputs if h.path == path]
    blocks = {}
    for device, index in NamedSharding(mesh, h.spec).devices_indices_map(h.shape).items():
        starts = tuple(s.start or 0 for s in index)
        blocks.setdefault(starts, []).append(device.id)
    cells = [text for row in grid(shown(plan, path)) for text in row]
    want = ["all" if len(ids) == 8 else " ".join(map(str, ids)) for _, ids in sorted(blocks.items())]
    if layout == "layers: model" and len(h.shape) == 3:
        assert cells == ["0 2 4 6", "1 3 5 7"]  # layers are down, and embed or mlp across
    else:
        assert cells == want
    assert f"{len(blocks)} shard" in shown(plan, path)


def test_a_pattern_chooses_arguments_and_large_grids_are_shortened():
    plan = planned("data=16, model=8", "mlp: model; embed, batch: data")
    text = shown(plan, "w/*")
    assert re.findall(r"^(\w+/\w+) ", text, re.MULTILINE) == [f"w/{name}" for name in sorted(SHAPES)]
    up = shown(plan, "w/up")
    assert grid(up)[0] == [str(k) for k in range(8)]
    assert [row[0] for row in grid(up)] == ["0", "8", "16", "24", "32", "40", "…", "120"]
    assert "float32[2, 1, 4] on 1 device each" in up
    with pytest.raises(PatternError, match="matches no argument"):
        plan.show("w/upp")
