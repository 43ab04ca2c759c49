"""Drawings of shardings and of pipeline schedules: SVG files in docs/static, computed from real shardings and schedules.

python docs/drawings.py            # write them
python docs/drawings.py --check    # exit status 1 if a file differs from what this command would write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax.sharding import NamedSharding

import meshpar as mp
from meshpar._src.program.pipeline import Schedule

FOLDER = Path(__file__).parent / "static"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#8f8f00"]
"""Fill color of each of the eight devices."""
MESH = {"data": 4, "model": 2}
CELL = 46
"""Side of a device's square in pixels."""


def svg(width: float, height: float, body: Sequence[str], title: str) -> str:
    """The text of an SVG file with a white background, so that it is legible in light and dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">',
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def label(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    """A line of text; ``y`` is its baseline."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222222"{style}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, text: str) -> list[str]:
    """A filled rectangle with centered white text."""
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#ffffff" stroke-width="1.5"/>',
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" text-anchor="middle" fill="#ffffff">{escape(text)}</text>',
    ]


def mesh_drawing() -> str:
    """The devices of the mesh ``data=4, model=2``, with their numbers, one row for each index along ``data``."""
    body = [label(150, 24, "model", style=' font-weight="600"')]
    for j in range(MESH["model"]):
        body.append(label(104 + CELL * (j + 0.5), 42, str(j)))
    body.append(label(28, 50 + CELL * 2 + 4, "data", style=' font-weight="600"'))
    for i in range(MESH["data"]):
        body.append(label(88, 50 + CELL * (i + 0.5) + 4, str(i)))
        for j in range(MESH["model"]):
            device = i * MESH["model"] + j
            body += box(104 + CELL * j, 50 + CELL * i, CELL, CELL, COLORS[device], str(device))
    return svg(220, 50 + CELL * 4 + 14, body, "a mesh of 4 by 2 devices with the axes data and model")


def tensor(dims: str, shape: tuple[int, int], layout: mp.Layout, x: float, y: float, scale: float) -> list[str]:
    """A two-dimensional array with one rectangle for each distinct shard, and the numbers of the devices that store it.

    Args:
      dims: names of the two dims, ``"embed mlp"``.
      layout: the layout that shards it over the mesh ``data=4, model=2``.
      x, y: the upper left corner; scale: pixels per element.
    """
    mesh = mp.mesh("data=4, model=2")
    sharding = NamedSharding(mesh, layout.spec(dims, mesh, shape))
    blocks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))
        blocks.setdefault(bounds, []).append(device.id)
    body = []
    for ((top, bottom), (left, right)), devices in sorted(blocks.items()):
        fill = COLORS[devices[0]] if len(devices) == 1 else "#7f7f7f" if len(devices) == 8 else COLORS[min(devices)]
        text = "all" if len(devices) == 8 else " ".join(map(str, sorted(devices)))
        body += box(x + left * scale, y + top * scale, (right - left) * scale, (bottom - top) * scale, fill, text)
    rows, columns = dims.split()
    body.append(label(x + shape[1] * scale / 2, y - 8, f"{columns} {shape[1]}"))
    body.append(label(x - 8, y + shape[0] * scale / 2 + 4, f"{rows} {shape[0]}", "end"))
    return body


def shards_drawing() -> str:
    """The weight ``embed mlp`` under three layouts: the shard that each device stores."""
    cases = [
        ("mlp: model", "each shard is stored by 4 devices"),
        ("embed: data", "each shard is stored by 2 devices"),
        ("embed: data; mlp: model", "each shard is stored by 1 device"),
    ]
    body = []
    for k, (rules, note) in enumerate(cases):
        x = 84 + k * 270
        body.append(label(x + 80, 24, rules, style=' font-weight="600"'))
        body += tensor("embed mlp", (16, 32), mp.Layout(rules), x, 62, 5)
        body.append(label(x + 80, 164, note))
    return svg(84 + 3 * 270 - 20, 178, body, "a weight of embed by mlp under three layouts")


def matmul_drawing() -> str:
    """One matmul under FSDP: the shards of its operands and of its result, and the all-gather of the weight."""
    layout = mp.Layout("batch: data; embed: data")
    body = [label(20, 26, "layout:  batch: data; embed: data", "start", ' font-weight="600"')]
    body += tensor("batch embed", (16, 16), layout, 80, 74, 5)
    body.append(label(178, 118, "@", style=' font-size="18"'))
    body += tensor("embed mlp", (16, 24), layout, 276, 74, 5)
    body += [label(444, 108, "all-gather"), label(444, 124, "over data"), label(444, 144, "→", style=' font-size="20"')]
    body += tensor("embed mlp", (16, 24), mp.Layout("batch: data"), 576, 74, 5)
    body.append(label(716, 118, "=", style=' font-size="18"'))
    body += tensor("batch mlp", (16, 24), layout, 806, 74, 5)
    body.append(
        label(
            20,
            182,
            "The matmul has the dims batch, embed and mlp. batch has the first rule, so it takes the axis data.",
            "start",
        )
    )
    body.append(
        label(
            20,
            200,
            "embed gets no axis here, so the weight, which is stored sharded on embed, is all-gathered.",
            "start",
        )
    )
    return svg(950, 214, body, "x of batch by embed times w of embed by mlp under FSDP")


def schedule_drawing(name: str) -> str:
    """The slots of four stages for six microbatches: a row per stage with a line per loop, a column per tick."""
    schedule, side, height = Schedule(name, 4, 6, order="FBW" if name == "zb" else "FB"), 26, 20
    tall = schedule.loops * height
    left, top = 78, 34
    body = [label(left, 22, "tick", "end", ' font-weight="600"')]
    body += [label(left + 8 + side * (t + 0.5), 22, str(t)) for t in range(schedule.ticks)]
    for stage in range(schedule.stages):
        y = top + stage * (tall + 6)
        body.append(label(left, y + tall // 2 + 5, f"stage {stage}", "end"))
        for loop, color in enumerate(COLORS[: schedule.loops]):
            for tick in range(schedule.starts[loop], schedule.starts[loop] + schedule.slots(loop)):
                x, row = left + 8 + side * tick, y + height * loop
                slot = schedule.slot(loop, stage, tick)
                fill, text = ("#eeeeee", "") if slot is None else (color, str(slot[0]))
                body += box(x, row, side, height, fill, text)
    width, bottom = left + 16 + side * schedule.ticks, top + schedule.stages * (tall + 6) + 26
    names = ("forward", "backward", "weight gradients")[: schedule.loops]
    x = left + 8
    for color, text in (*zip(COLORS, names, strict=False), ("#eeeeee", "idle")):
        body.append(f'<rect x="{x}" y="{bottom - 22}" width="12" height="12" fill="{color}"/>')
        body.append(label(x + 18, bottom - 12, text, "start"))
        x += 100 if len(text) < 10 else 150
    return svg(width, bottom, body, f"schedule {name}: four stages, six microbatches, {schedule.ticks} ticks")


DRAWINGS: dict[str, Callable[[], str]] = {
    "mesh.svg": mesh_drawing, "shards.svg": shards_drawing, "matmul.svg": matmul_drawing,
    "schedule-1f1b.svg": partial(schedule_drawing, "1f1b"), "schedule-gpipe.svg": partial(schedule_drawing, "gpipe"),
    "schedule-zb.svg": partial(schedule_drawing, "zb"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    args = parser.parse_args()
    mp.virtual_devices(8)
    stale = []
    for name, draw in DRAWINGS.items():
        path, text = FOLDER / name, draw()
        if args.check:
            stale += [name] * (not path.exists() or path.read_text() != text)
        else:
            path.write_text(text)
    if stale:
        print(f"not what docs/drawings.py draws today: {', '.join(stale)}", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
