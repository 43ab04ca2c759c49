"""Drawings of shardings, schemes and pipeline schedules: SVG files in docs/static, from real shardings, plans and schedules.

python docs/drawings.py            # write them
python docs/drawings.py --check    # exit status 1 if a file differs from what this command would write
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import meshpar as mp
from meshpar._src.program.pipeline import Schedule
from meshpar._src.report.colours import AxisColours
from meshpar._src.report.document import front_end

FOLDER = Path(__file__).parent / "static"
MESH = {"data": 4, "model": 2}
COLOURS = AxisColours(MESH, ("context", "expert", "stage"))
CELL = 46
"""Side of a device's square in pixels."""


def variables() -> str:
    """The colours of plan pages as CSS variables, for light and dark colour schemes."""
    light, dark = re.findall(r"\.mp \{ (--ink:[^}]*?--lit: #\w+);", front_end()[0])
    root = "svg {{ {} }}".format
    return f"<style>{root(light)} @media (prefers-color-scheme: dark) {{ {root(dark)} }}</style>"


def colour(axes: Sequence[str]) -> str:
    """The colour of the first of some axes, or a neutral one."""
    return f"var(--{COLOURS.first(axes).replace('cn', 'none').replace('c', 'a')})"


def svg(width: float, height: float, body: Sequence[str], title: str) -> str:
    """The text of an SVG file, which paints its background in the colour scheme of the browser."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">',
            variables(),
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="var(--page)"/>',
            *body,
            "</svg>\n",
        ]
    )


def label(x: float, y: float, text: str, anchor: str = "middle", style: str = "", fill: str = "var(--ink)") -> str:
    """A line of text; ``y`` is its baseline."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{style}>{escape(text)}</text>'


def rules_label(x: float, y: float, rules: str, anchor: str = "middle", style: str = ' font-weight="600"') -> str:
    """The text of a layout, its axes in their colours."""
    words = (
        f'<tspan fill="{colour([word])}">{word}</tspan>' if word in COLOURS.of else escape(word)
        for word in re.split(r"(\w+)(?=[;+]|$)", rules)
    )
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="var(--ink)"{style}>{"".join(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, text: str, ink: str = "var(--page)") -> list[str]:
    """A filled rectangle with centered text."""
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="var(--page)" stroke-width="1.5"/>',
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" text-anchor="middle" fill="{ink}">{escape(text)}</text>',
    ]


def mesh_drawing() -> str:
    """The devices of the mesh ``data=4, model=2``, with their numbers, one row for each index along ``data``."""
    bold = ' font-weight="600"'
    body = [
        label(14, 22, "mesh data=4, model=2", "start", bold),
        label(150, 50, "model", style=bold, fill=colour(["model"])),
    ]
    for j in range(MESH["model"]):
        body.append(label(104 + CELL * (j + 0.5), 68, str(j)))
    body.append(label(28, 76 + CELL * 2 + 4, "data", style=bold, fill=colour(["data"])))
    for i in range(MESH["data"]):
        body.append(label(88, 76 + CELL * (i + 0.5) + 4, str(i)))
        for j in range(MESH["model"]):
            device = i * MESH["model"] + j
            body += box(104 + CELL * j, 76 + CELL * i, CELL, CELL, "var(--soft)", str(device), "var(--ink)")
    for i in range(1, MESH["data"]):
        body.append(cut(104, 76 + CELL * i, CELL * MESH["model"], 0, ["data"]))
    body += [cut(104 + CELL * j, 76, 0, CELL * MESH["data"], ["model"]) for j in range(1, MESH["model"])]
    body.append(label(14, 76 + CELL * 4 + 24, "in the cells: devices 0 to 7", "start", fill="var(--dim)"))
    return svg(220, 76 + CELL * 4 + 36, body, "a mesh of 4 by 2 devices with the axes data and model")


def cut(x: float, y: float, dx: float, dy: float, axes: Sequence[str]) -> str:
    """A line between shards, in the colour of the axes that cut there."""
    return f'<path d="M{x:g} {y:g}l{dx:g} {dy:g}" stroke="{colour(axes)}" stroke-width="2.5"/>'


def array(
    dims: Sequence[tuple[str, Sequence[str]]], sizes: Mapping[str, int], x: float, y: float, width: float, height: float
) -> list[str]:
    """A two-dimensional array, with lines between its shards and the names of its dims, both in the colours of the axes.

    Args:
      dims: (text, axes that shard it) of rows and columns.
      sizes: axis → size.
      x, y: the upper left corner.
    """
    axes = [a for _, over in dims for a in over]
    fill = f"color-mix(in srgb, {colour(axes)} 22%, var(--page))" if axes else "var(--soft)"
    body = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="var(--none)"/>']
    for (_, over), dx, dy in zip(dims, (0, width), (height, 0), strict=True):
        count = 1
        for axis in over:
            count *= sizes[axis]
        for k in range(1, count):
            along, inner, first = (0, height) if dx else (width, 0), count, 0
            while k % (inner := inner // sizes[over[first]]):  # the first axis cuts into the largest blocks
                first += 1
            body.append(cut(x + dx * k / count, y + dy * k / count, *along, over[first:]))
    (rows, row_axes), (columns, column_axes) = dims
    inks = [colour(over) if over else "var(--dim)" for over in (row_axes, column_axes)]
    at = f' transform="rotate(-90 {x - 6:g} {y + height / 2:g})"'
    body.append(label(x - 6, y + height / 2, rows, style=at, fill=inks[0]))
    body.append(label(x + width / 2, y - 6, columns, fill=inks[1]))
    return body


def tensor(dims: str, shape: tuple[int, int], layout: mp.Layout, x: float, y: float, scale: float) -> list[str]:
    """A two-dimensional array with its shards, each with the numbers of the devices that store it.

    Args:
      dims: names of the two dims, ``"embed mlp"``.
      layout: the layout that shards it over the mesh ``data=4, model=2``.
      x, y: the upper left corner; scale: pixels per element.
    """
    mesh = mp.mesh("data=4, model=2")
    spec = layout.spec(dims, mesh, shape)
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in (*spec, None, None)][:2]
    names = [(f"{name} {n}", over) for name, n, over in zip(dims.split(), shape, axes, strict=True)]
    body = array(names, MESH, x, y, shape[1] * scale, shape[0] * scale)
    blocks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        bounds = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))
        blocks.setdefault(bounds, []).append(device.id)
    for ((top, bottom), (left, right)), devices in sorted(blocks.items()):
        text = "all devices" if len(devices) == 8 else " ".join(map(str, sorted(devices)))
        body.append(label(x + (left + right) / 2 * scale, y + (top + bottom) / 2 * scale + 4.5, text))
    return body


def shards_drawing() -> str:
    """The weight ``embed mlp`` under three layouts: the shard that each device stores."""
    cases = [
        ("mlp: model", "each shard is stored by 4 devices"),
        ("embed: data", "each shard is stored by 2 devices"),
        ("embed: data; mlp: model", "each shard is stored by 1 device"),
    ]
    body = [
        label(
            44, 192, "numbers: the devices of the mesh data=4, model=2 that store the shard", "start", fill="var(--dim)"
        )
    ]
    for k, (rules, note) in enumerate(cases):
        x = 44 + k * 240
        body.append(rules_label(x + 80, 24, rules))
        body += tensor("embed mlp", (16, 32), mp.Layout(rules), x, 62, 5)
        body.append(label(x + 80, 164, note))
    return svg(44 + 3 * 240 - 40, 206, body, "a weight of embed by mlp under three layouts")


def matmul_drawing() -> str:
    """One matmul under FSDP: the shards of its operands and of its result, and the all-gather of the weight."""
    layout = mp.Layout("batch: data; embed: data")
    body = [rules_label(20, 26, "batch: data; embed: data", "start")]
    body += tensor("batch embed", (16, 16), layout, 44, 74, 5)
    body.append(label(142, 118, "@", style=' font-size="18"'))
    body += tensor("embed mlp", (16, 24), layout, 184, 74, 5)
    gather = colour(["data"])
    body += [label(360, 108, "all-gather", fill=gather), label(360, 124, "over data", fill=gather)]
    body.append(label(360, 144, "→", style=' font-size="20"', fill=gather))
    body += tensor("embed mlp", (16, 24), mp.Layout("batch: data"), 434, 74, 5)
    body.append(label(574, 118, "=", style=' font-size="18"'))
    body += tensor("batch mlp", (16, 24), layout, 616, 74, 5)
    about = (
        "The matmul has the dims batch, embed and mlp. batch has the first rule, so it takes the axis data.",
        "embed gets no axis here, so the weight, which is stored sharded on embed, is all-gathered.",
        "Numbers: the devices of the mesh data=4, model=2 that have the shard.",
    )
    body += [label(20, 182 + 18 * k, text, "start") for k, text in enumerate(about)]
    return svg(756, 232, body, "x of batch by embed times w of embed by mlp under FSDP")


def schedule_drawing(name: str) -> str:
    """The slots of four stages for six microbatches: a row per stage with a line per loop, a column per tick."""
    schedule, side, height = Schedule(name, 4, 6, order="FBW" if name == "zb" else "FB"), 26, 20
    green = f"color-mix(in srgb, {colour(['stage'])} {{}}%, var(--{{}}))".format
    fills = (green(35, "page"), "var(--ink)"), (green(100, "page"), "var(--page)"), (green(45, "ink"), "var(--page)")
    tall = schedule.loops * height
    left, top = 78, 60
    slots = " + ".join(str(schedule.slots(loop)) for loop in range(schedule.loops))
    idle = f"{schedule.bubble * schedule.all_slots} of the {slots} slots of a stage are idle: bubble {float(schedule.bubble):.0%}"
    body = [label(14, 22, f"{name}: {schedule.ticks} ticks; {idle}", "start", ' font-weight="600"')]
    body.append(label(left, 48, "tick", "end", ' font-weight="600"'))
    body += [label(left + 8 + side * (t + 0.5), 48, str(t)) for t in range(schedule.ticks)]
    for stage in range(schedule.stages):
        y = top + stage * (tall + 6)
        body.append(label(left, y + tall // 2 + 5, f"stage {stage}", "end"))
        for loop, (fill, ink) in enumerate(fills[: schedule.loops]):
            for tick in range(schedule.starts[loop], schedule.starts[loop] + schedule.slots(loop)):
                x, row = left + 8 + side * tick, y + height * loop
                slot = schedule.slot(loop, stage, tick)
                body += box(x, row, side, height, *(("var(--line)", "") if slot is None else (fill, str(slot[0]), ink)))
    bottom = top + schedule.stages * (tall + 6) + 26
    backward = ("gradients of inputs", "gradients of weights") if schedule.loops > 2 else ("backward",)
    x = left + 8.0
    shown = zip(fills, ("forward", *backward), strict=False)
    for fill, text in (*((fill, text) for (fill, _), text in shown), ("var(--line)", "idle")):
        body.append(f'<rect x="{x:g}" y="{bottom - 22}" width="12" height="12" fill="{fill}"/>')
        body.append(label(x + 18, bottom - 12, text, "start"))
        x += 38 + 6.6 * len(text)
    body.append(label(x, bottom - 12, "numbers: microbatches", "start", fill="var(--dim)"))
    width = max(left + 16 + side * schedule.ticks, x + 165, 520)
    return svg(width, bottom, body, f"schedule {name}: four stages, six microbatches, {schedule.ticks} ticks")


# -- schemes


@functools.cache
def block_plan() -> mp.Plan:
    """A train step of one block of attention and MLP with Adam's first moment, of which each scheme is a replan."""

    def train_step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            q, k, v = (jnp.einsum("bse,ehd->bshd", x, params[name]) for name in ("query", "key", "value"))
            h = x + jnp.einsum("bshd,hde->bse", mp.layers.attention(q, k, v, causal=True), params["out"])
            return jnp.mean((h + jnp.tanh(h @ params["up"]) @ params["down"]) ** 2)

        gradients = jax.grad(loss)(state["params"])
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"], gradients)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moment), "opt": moment}

    heads = dict.fromkeys(("query", "key", "value"), ("embed heads head_dim", (64, 8, 8)))
    weights = {
        **heads,
        "out": ("heads head_dim embed", (8, 8, 64)),
        "up": ("embed mlp", (64, 256)),
        "down": ("mlp embed", (256, 64)),
    }
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (_, shape) in weights.items()}
    dims = {f"state/*/{name}": text for name, (text, _) in weights.items()} | {"x": "batch seq embed"}
    state = {"params": shapes, "opt": shapes}
    x = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    return mp.plan(train_step, state, x, dims=dims, mesh="data=4", layout="batch: data", donate_argnames="state")


def expert_plan(layout: str, mesh: str) -> mp.Plan:
    """The plan of a small Mixtral."""
    import mixtral

    step, args, dims = mixtral.tiny()
    return mp.plan(step, *args, dims=dims, mesh=mesh, layout=layout, donate_argnames="state")


def pipeline_plan(layout: str, mesh: str) -> mp.Plan:
    """The plan of a scan over stacked layers, in four microbatches."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None), x, w)[0] ** 2)

        gradients = mp.train.accumulate_gradients(jax.grad(loss), 4)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)

    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64, 128), (8, 128, 64), (32, 16, 64)))
    dims = {"w/up": "layers embed mlp", "w/down": "layers mlp embed", "x": "batch seq embed"}
    return mp.plan(step, {"up": up, "down": down}, x, dims=dims, mesh=mesh, layout=layout)


WEIGHT = ("weight", "embed mlp", "params", 0, 1), ("its moment", "embed mlp", "opt", 0, 1)
BLOCK = (("activations", "batch seq embed", "", 0, 1), ("in the MLP", "batch seq mlp", "", 0, 2), *WEIGHT)
SEQUENCE = (BLOCK[0], ("in the MLP", "batch seq mlp", "", 1, 2), *WEIGHT)
EXPERTS = (
    ("tokens", "batch seq embed", "", 0, 1),
    ("by expert", "expert capacity embed", "", 0, 1),
    ("weight", "expert embed mlp", "params", 0, 1),
    ("its moment", "expert embed mlp", "opt", 0, 1),
)
LAYERS = (BLOCK[0], ("weights", "layers embed", "params", 0, 1), ("their moments", "layers embed", "opt", 0, 1))
SCHEMES = {
    "data": ("data parallel", "data=4", "batch: data", BLOCK),
    "zero1": ("ZeRO-1", "data=4", "batch: data; opt.embed: data", BLOCK),
    "fsdp": ("FSDP", "data=4", "batch: data; embed: data", BLOCK),
    "megatron": ("Megatron (tensor)", "data=2, model=4", "batch: data; heads, mlp: model", BLOCK),
    "sequence": ("Megatron with sequence", "data=2, model=4", "batch: data; heads, mlp, seq: model", BLOCK),
    "context": ("context parallel", "data=2, context=4", "batch: data; seq: context", SEQUENCE),
    "expert": ("expert parallel", "data=2, expert=4", "expert: expert; batch: data+expert", EXPERTS),
    "pipeline": ("pipeline", "stage=4, data=2", "batch: data; layers: stage", LAYERS),
}
"""Scheme → (title, mesh, layout, (name, dims, scope, the two dims that are drawn) of its arrays)."""


def content(c: Any) -> str:
    """The kind of array that a collective sends: activations have a batch; reductions of other arrays are of gradients."""
    if any(name in c.dims.split() for name in ("batch", "seq", "capacity", "tokens")):
        return "activations"
    return "gradients" if c.op in ("reduce-scatter", "all-reduce") else "weights"


def scheme_drawing(name: str) -> str:
    """One scheme: how it shards activations, a weight and its optimizer state, and the collectives of the plan of a small step."""
    title, mesh, rules, arrays = SCHEMES[name]
    layout, sizes = mp.Layout(rules), {a: int(n) for a, n in (part.split("=") for part in mesh.split(", "))}
    body = [
        label(14, 24, title, "start", ' font-weight="650" font-size="15"'),
        label(346, 24, mesh, "end", fill="var(--dim)"),
    ]
    body.append(rules_label(14, 44, rules, "start", ' font-weight="600" font-family="monospace" font-size="12"'))
    for k, (title_of, dims, scope, row, column) in enumerate(arrays):
        spec = (*layout.spec(dims, scope=scope or None), *[None] * 3)
        over = [(e,) if isinstance(e, str) else e or () for e in (spec[row], spec[column])]
        names = dims.split()
        x = 30 + k * 84
        drawn = array([(names[row], over[0]), (names[column], over[1])], sizes, x, 76, 54, 54)
        body += [part.replace("<text ", '<text font-size="11" ') for part in drawn]
        body.append(label(x + 27, 146, title_of, fill="var(--dim)", style=' font-size="11.5"'))
    plans = {"expert": expert_plan, "pipeline": pipeline_plan}
    plan = plans[name](rules, mesh) if name in plans else block_plan().replan(layout=rules, mesh=mesh)
    sent: dict[tuple[str, str], dict[tuple[str, ...], float]] = {}
    for c in plan.collectives:
        over = sent.setdefault((c.op, content(c)), {})
        over[c.axes] = over.get(c.axes, 0.0) + c.total_bytes
    largest = sorted(sent, key=lambda key: -sum(sent[key].values()))[:4]
    for k, (op, what) in enumerate(largest):
        x, y, axes = 14 + 168 * (k % 2), 158 + 25 * (k // 2), max(sent[op, what], key=sent[op, what].__getitem__)
        stops = "".join(f'<stop offset=".5" stop-color="{colour([axis])}"/>' for axis in (axes[0], axes[-1]))
        body.append(f'<linearGradient id="pill{k}">{stops}</linearGradient>')
        body.append(f'<rect x="{x}" y="{y}" width="162" height="20" rx="10" fill="url(#pill{k})"/>')
        size = f' font-size="{11.5 if len(op + what) < 28 else 10}"'
        body.append(label(x + 81, y + 14, f"{op} {what}", fill="var(--page)", style=size))
    y = 194 + 25 * (len(largest) > 2)
    body.append(
        label(
            14,
            y,
            "lines cut arrays into shards; pills: collectives of a step",
            "start",
            ' font-size="11"',
            "var(--dim)",
        )
    )
    return svg(360, y + 12, body, f"{title}: {rules}")


DRAWINGS: dict[str, Callable[[], str]] = {
    "mesh.svg": mesh_drawing, "shards.svg": shards_drawing, "matmul.svg": matmul_drawing,
    "schedule-1f1b.svg": partial(schedule_drawing, "1f1b"), "schedule-gpipe.svg": partial(schedule_drawing, "gpipe"),
    "schedule-zb.svg": partial(schedule_drawing, "zb"),
    **{f"scheme-{name}.svg": partial(scheme_drawing, name) for name in SCHEMES},
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
