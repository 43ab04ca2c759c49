"""Parts of pages that a build makes from the library: tables of chips, options of commands, plans of the examples' models.

Each public function returns Markdown for the marker of its name in a page (see :mod:`blocks`).
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import meshpar as mp
from meshpar._src.entry.cli import GROUPS, command_parser
from meshpar._src.entry.cli_target import load_target
from meshpar._src.hardware.chips import CHIPS, Chip
from meshpar._src.plan_api import Plan
from meshpar._src.report.colours import ROLE_STYLES
from meshpar._src.units import format_bytes, format_memory, format_seconds

ROOT = Path(__file__).resolve().parent.parent


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in lines)


# -- chips


def chips() -> str:
    """Peak rates, memory and links of every chip."""
    heads = [
        "chip",
        "bf16",
        "8 bit",
        "memory",
        "memory traffic",
        "links",
        "between slices or nodes",
        "link to the host",
        "JAX devices",
    ]
    rows = [
        [
            f"`{c.name}`", f"{c.flops / 1e12:.0f} TFLOP/s", "–" if c.flops_8bit is None else f"{c.flops_8bit / 1e12:.0f} TFLOP/s",
            format_memory(c.hbm), f"{c.hbm_bandwidth / 1e12:.2f} TB/s", _links(c), f"{c.dcn / 1e9:.3g} GB/s",
            f"{c.host_link / 1e9:.3g} GB/s", str(c.devices),
        ]
        for c in CHIPS.values()
    ]  # fmt: skip
    return table(heads, rows)


def _links(chip: Chip) -> str:
    """The links of a chip in one direction, as text."""
    if chip.switch:
        return f"NVLink, {chip.link / 1e9:.0f} GB/s; {chip.switch} GPUs a node"
    return f"{chip.links} × {chip.link / 1e9:.0f} GB/s, {len(chip.torus)}D torus"


def topologies() -> str:
    """Texts of ``topology=`` for the slices and nodes of every chip."""
    rows = []
    for chip in CHIPS.values():
        if chip.switch:
            text = f"`{chip.name}:1` to `{chip.name}:{chip.switch}`, then multiples of a node: `4x {chip.name}:{chip.switch}`"
        else:
            shapes = [f"{chip.name}:{'x'.join(map(str, shape))}" for shape in chip.shapes()]
            some = shapes if len(shapes) <= 9 else [*shapes[:8], "…", shapes[-1]]
            text = ", ".join(s if s == "…" else f"`{s}`" for s in some) + f" ({len(shapes)} shapes)"
        kinds = ", ".join(f"`{kind}`" for kind in chip.kinds)
        prefixes = ", ".join(f"`{a}-N`" for a in chip.accelerators) or "–"
        rows.append([f"`{chip.name}`", text, kinds, prefixes])
    return table(["chip", "topologies", "`device_kind` in JAX", "cloud names"], rows)


def efficiencies() -> str:
    """The fractions of the peak rates that plans use, with the compiler's table and the command that they were fitted to."""
    rows = []
    for chip in CHIPS.values():
        model = chip.compiler
        rates = [f"{x:.0%}" for x in (model.matmul_efficiency, model.hbm_efficiency, model.link_efficiency)]
        rows.append([f"`{chip.name}`", *rates, model.compiler, chip.source])
    heads = [
        "chip",
        "matmuls, as the compiler assumes",
        "memory traffic",
        "links",
        "table",
        "source of the chip's rates (~: less certain)",
    ]
    return table(heads, rows)


# -- commands


def commands() -> str:
    """The commands in groups, with links to their pages."""
    parser = command_parser()
    parts = []
    for group, names in GROUPS.items():
        rows = [[f"[`meshpar {name}`](cli-{name}.md)", parser.about(name)] for name in names]
        parts.append(f"**{group}**\n\n{table(['command', ''], rows)}")
    return "\n\n".join(parts)


def command(name: str) -> str:
    """The description, the usage and the options of a command, from its parser."""
    parser = command_parser().commands[name]
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    parts = [_paragraph(parser.description or ""), f"```text\n{_wrapped_usage(usage)}\n```"]
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for text, sub in action.choices.items():
                rows.append([f"`{text}`", _cell(sub.description or _help_of(action, text))])
        elif action.help != argparse.SUPPRESS and action.dest != "help":
            rows.append([_names(action), _cell(_help(parser, action))])
    return "\n\n".join([*parts, table(["argument", ""], rows)])


def _help_of(action: argparse.Action, name: str) -> str:
    """The help of one choice of a parser of subcommands."""
    return next((str(c.help) for c in action._choices_actions if c.dest == name), "")  # type: ignore[attr-defined]


def _names(action: argparse.Action) -> str:
    """The flags of an argument with the name of its value: ``--mesh MESH``."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or (action.dest.upper() if action.choices is None else '')}"
    choices = "" if action.choices is None else ": " + ", ".join(f"`{c}`" for c in action.choices)
    return ", ".join(f"`{flag}{value.rstrip()}`" for flag in action.option_strings) + choices


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an argument with its default."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return text


def _cell(text: str) -> str:
    """One line, with flags as code, and the characters of Markdown that occur in help texts escaped."""
    parts = " ".join(text.split()).split("`")
    for k in range(0, len(parts), 2):  # the parts that are no code
        parts[k] = re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", re.sub(r"([*<>])", r"\\\1", parts[k]))
    return "`".join(parts)


def _paragraph(text: str) -> str:
    """Prose of a description; lines that begin with spaces become a block."""
    lines = text.strip().splitlines()
    out: list[str] = []
    for line in lines:
        out.append(line if line.startswith("  ") else re.sub(r"([*<>])", r"\\\1", line))
    return re.sub(
        r"((?:^  .*\n?)+)", lambda m: f"\n```text\n{m[1].rstrip()}\n```\n", "\n".join(out), flags=re.MULTILINE
    )


def _wrapped_usage(text: str) -> str:
    """A usage line in lines of at most 96 columns, cut between arguments."""
    words = re.findall(r"\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]|\S+", text)
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) > 95:
            lines.append(line)
            line = "   "
        line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


# -- files of the repository


def file(path: str) -> str:
    """A Markdown file of the repository; links to pages of the docs work, other links to files become code."""
    folder = (ROOT / path).parent

    def link(match: re.Match[str]) -> str:
        text, where = match[1], match[2]
        if re.match(r"https?:", where):
            return match[0]
        target = (folder / where).resolve()
        if target.parent == ROOT / "docs":
            return f"[{text}]({target.name})"
        return f"{text} (`{target.relative_to(ROOT)}`)" if text != target.name else f"`{target.relative_to(ROOT)}`"

    return re.sub(r"\[([^\]]+)\]\(([^)#\s]+)\)", link, (ROOT / path).read_text())


# -- the gallery


class Entry(NamedTuple):
    """A model of the gallery: its target, and the slice, mesh and layout of its plan."""

    target: str
    topology: str
    mesh: str
    layout: str


GALLERY = (
    Entry("llama:llama2_7b", "v5e:16x16", "data=256", "fsdp"),
    Entry("llama:llama3_8b", "v5p:4x4x8", "data=128", "fsdp"),
    Entry("llama:llama3_70b", "v5p:8x8x8", "data=64, model=8", "sequence_parallel"),
    Entry("llama:llama31_405b", "v5p:8x8x16", "data=128, model=8", "sequence_parallel"),
    Entry("mixtral:mixtral_8x7b", "v5p:4x4x8", "data=16, model=8", "fsdp+expert"),
    Entry("deepseek:deepseek_16b", "v5p:4x4x8", "data=16, model=8", "fsdp+expert"),
    Entry("deepseek:deepseek_671b", "tpu7x:4x8x8", "data=64, model=8", "fsdp+expert"),
    Entry("gpt3_bert_vit:gpt3_175b", "v5p:8x8x16", "data=512, model=2", "sequence_parallel"),
    Entry("gpt3_bert_vit:bert_base", "v5e:4x4", "data=16", "fsdp"),
    Entry("gpt3_bert_vit:bert_large", "v5e:4x4", "data=16", "fsdp"),
    Entry("gpt3_bert_vit:vit_22b", "v5p:8x8x16", "data=512, model=2", "sequence_parallel"),
    Entry("resnet:resnet50", "v5e:4x4", "data=16", "fsdp"),
    Entry("simclr:simclr", "v5e:8x8", "data=64", "data"),
    Entry("convnets:efficientnet_b7", "v5e:8x8", "data=64", "data"),
    Entry("convnets:amoebanet_d", "v5e:8x8", "model=8, data=8", "data+features"),
    Entry("segmentation:cityscapes", "v5e:8x8", "data=16, model=4", "data+height"),
    Entry("dlrm:dlrm", "v5e:4x4", "data=16", "features"),
)
"""Every target of the examples, but the small ones for tests."""


def gallery() -> str:
    """A table of all models, then a section for each: a line about it, the numbers of its plan, a bar of its memory, and links.

    The pages of the plans are written into the working directory of the page's blocks.
    """
    planned = [(entry, *_planned(entry)) for entry in GALLERY]
    overview = [_overview(entry, plan) for entry, _, plan in planned]
    sections = [_section(entry, layout, plan) for entry, layout, plan in planned]
    return "\n\n".join([table(["model", "chips", "layout", "step", "MFU", "sent", "peak memory"], overview), *sections])


def _overview(entry: Entry, plan: Plan) -> list[str]:
    """The row of one model."""
    assert plan.time is not None
    function = entry.target.partition(":")[2]
    numbers = [format_seconds(plan.time.seconds), f"{plan.time.mfu:.0%}", format_bytes(plan.bytes_sent)]
    where = [f"[{function}](#{function})", f"`{entry.topology}`", f"`{entry.layout}`"]
    return [*where, *numbers, format_memory(plan.memory.peak)]


def _planned(entry: Entry) -> tuple[str, Plan]:
    """The layout and the plan of one model."""
    target = load_target(f"examples/{entry.target.replace(':', '.py:')}")
    layout = target.layouts[entry.layout]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.JoinWarning)  # the models have two names for some dims
        return layout, mp.plan(
            target.step, *target.args, dims=target.dims, mesh=entry.mesh, topology=entry.topology, layout=layout,
            donate_argnames="state",
        )  # fmt: skip


def _section(entry: Entry, layout: str, plan: Plan) -> str:
    """The section of one model; saves the page of its plan."""
    module, function = entry.target.split(":")
    text = f"examples/{module}.py:{function}"
    plan.save(f"gallery_{function}.html")
    time = plan.time
    assert time is not None
    assert plan.chip is not None
    capacity = plan.chip.per_device().hbm
    rows = [
        ["mesh", f"`{entry.mesh}` on `{entry.topology}`"],
        ["layout", f"`{layout}`"],
        ["step", f"{format_seconds(time.seconds)}, {time.mfu:.0%} of the peak FLOP/s (MFU)"],
        ["sends", f"{format_bytes(plan.bytes_sent)} per device and step, in {len(plan.collectives)} collectives"],
        ["peak memory", f"{format_memory(plan.memory.peak)} of {format_memory(capacity)}"],
    ]
    about = " ".join((_function_of(text).__doc__ or "").split("\n\n")[0].split())
    command = f'meshpar plan {text} \\\n    --topology {entry.topology} --mesh "{entry.mesh}" --layout "{layout}"'
    return "\n\n".join([
        f"## {function}", about, memory_bar(plan, capacity), table(["", ""], rows),
        f'<a href="gallery_{function}.html">The page of this plan</a>, or:', f"```bash\n{command}\n```",
    ])  # fmt: skip


def _function_of(text: str) -> object:
    """The function of a target that :func:`entry.cli_target.load_target` has imported."""
    where, _, name = text.rpartition(":")
    return getattr(sys.modules[Path(where).stem], name)


def memory_bar(plan: Plan, capacity: float) -> str:
    """The peak memory of a plan as a bar, one part for each kind, on the width of the device's memory.

    Args:
      capacity: bytes of a device.
    """
    width, x, parts, keys = 640.0, 0.0, [], []
    shown = max(capacity, plan.memory.peak)
    for name, size in plan.memory.by_kind.items():
        w = size / shown * width
        parts.append(f'<rect x="{x:.1f}" y="0" width="{w:.1f}" height="22" fill="{ROLE_STYLES[name]}"/>')
        keys.append(f'<span><i style="background:{ROLE_STYLES[name]}"></i>{name} {format_memory(size)}</span>')
        x += w
    svg = (
        f'<svg viewBox="0 0 {width:g} 22" preserveAspectRatio="none" role="img" '
        f'aria-label="peak memory: {format_memory(plan.memory.peak)} of {format_memory(capacity)}">'
        f'<rect class="free" width="{width:g}" height="22"/>{"".join(parts)}</svg>'
    )
    return f'<div class="memory-bar">{svg}<div class="key">{"".join(keys)}</div></div>'
