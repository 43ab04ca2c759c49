"""The sections of a plan that are lines of text, the same in the terminal and in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.text import Text

from ..cost.flops import redundant_matmuls
from ..dims import format_dims
from ..hardware.compiler_options import flags_text
from ..iterables import grouped_by
from ..plan.plan import Overlap, Plan
from ..program.ir import Op, Program, Value
from ..units import format_seconds
from .colours import AxisColours
from .facts import arrivals_text, fits
from .hints import hints
from .tables import prose

OPTIONS = "Compiler options"
"""The section of which a terminal shows only the first line, and what is left out, unless it is asked for all."""
MAX_OVERLAP_ROWS = 8
MIN_REPORTED_SHARE = 0.05
"""Fraction of the matmuls' FLOPs from which on redundant matmuls are reported."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a section.

    Attributes:
      kind: its first words, such as ``note``, which pages show as a label; "": none.
      text: the other words.
      style: of the line in the terminal.
      below: further lines.
    """

    kind: str
    text: str | Text
    style: str = ""
    below: Sequence[str] = ()

    def terminal(self) -> Text:
        """The line for rich."""
        below = (f"\n      {line}" for line in self.below)
        return Text.assemble((self.kind or "  ", "bold"), "  ", self.text, *below, style=self.style)

    def html(self) -> str:
        """The line as an item of a list, with a list of the lines below it."""
        kind = f'<b class="kind">{escape(self.kind.strip())}</b> ' if self.kind else ""
        below = "".join(f"<li>{prose(line)}</li>" for line in self.below)
        return f"<li>{kind}{prose(str(self.text).strip())}{below and f'<ul>{below}</ul>'}</li>"


@dataclass(frozen=True, slots=True)
class Section:
    """Some lines with a heading.

    Attributes:
      title: the heading in pages.
      head: the first line, in bold; "": none.
    """

    title: str
    head: str = ""
    lines: Sequence[Line] = ()

    def terminal(self) -> list[Text]:
        """The lines for rich."""
        return [Text(self.head, "bold")] * bool(self.head) + [line.terminal() for line in self.lines]

    def html(self) -> str:
        """The section without its title."""
        head = f"<p>{prose(self.head)}</p>" if self.head else ""
        lines = "".join(line.html() for line in self.lines)
        return head + (f"<ul>{lines}</ul>" if lines else "")


def sections(plan: Plan) -> list[Section]:
    """The sections of a plan that have lines, in the order of reports; those after :func:`remedies`."""
    every = (redundant(plan), arrivals(plan), overlaps(plan), options(plan), notes(plan))
    return [section for section in every if section.head or section.lines]


def remedies(plan: Plan) -> Section:
    """The hints, the largest gain first; where the plan does not fit, the edits that save memory are before the others."""
    kind = "fix" if fits(plan) is False else "hint"
    return Section("Hints", lines=[Line(kind, hint, "green") for hint in hints(plan)])


def redundant(plan: Plan) -> Section:
    """Matmuls that several devices compute redundantly, and rules that would shard them; empty if they are few."""
    found, title = redundant_matmuls(plan), "Redundant matmuls"
    share = sum(r.share for r in found)
    if share < MIN_REPORTED_SHARE:
        return Section(title)
    head = f"{100 * share:.0f} % of the matmul FLOPs are redundant: several devices compute the same"
    return Section(title, head, [Line("", str(r), "dim") for r in found[:3]])


def arrivals(plan: Plan) -> Section:
    """The arguments that each call reshards before the step."""
    lines = [Line("before the step", arrivals_text(plan.arrivals))] if plan.arrivals else []
    return Section("Before the step", lines=lines)


def overlaps(plan: Plan) -> Section:
    """How all-gathers before matmuls and reduce-scatters after them are lowered, and why.

    It is empty if no pair is a ring or a fused kernel, unless the user requested them.
    """
    title, colours = "Collective matmuls", AxisColours(plan.sizes)
    names = {"ring": "rings", "pallas": "fused kernels"}
    counts = Counter(names[o.choice] for o in plan.overlaps if o.choice in names)
    chosen = counts.total()
    if not plan.overlaps or (not chosen and plan.overlap == "auto"):
        return Section(title)
    as_what = ", ".join(f"{n} {name}" for name, n in counts.items()) if len(counts) > 1 else next(iter(counts), "rings")
    head = f"{chosen} of {len(plan.overlaps)} matmul–collective pairs are lowered as {as_what} (overlap={plan.overlap})"
    gains = [o.gain for o in plan.overlaps if o.gain is not None]
    if chosen and gains:
        head += f", which saves {format_seconds(sum(gains))}"

    def gain_of(group: list[Overlap]) -> float:
        return sum(o.gain or 0.0 for o in group)

    lines = []
    groups = grouped_by(plan.overlaps, lambda o: (o.kind, o.axes, o.choice, o.reason))
    for group in sorted(groups, key=gain_of, reverse=True)[:MAX_OVERLAP_ROWS]:
        o, runs = group[0], [o.count for o in group]
        calls = "?" if None in runs else sum(filter(None, runs))
        pair = "all-gather → matmuls" if o.kind == "gather" else "matmuls → reduce-scatter"
        saved = f"  saves {format_seconds(gain_of(group))}" if gain_of(group) and o.choice != "xla" else ""
        text = Text.assemble(colours.axes(o.axes).terminal, f"  {calls} × {pair}{saved}: {o.reason}")
        lines.append(Line(f"{o.choice:<6}", text))
    return Section(title, head, lines)


def options(plan: Plan) -> Section:
    """The compiler options of the plan, each group with its reason; may be empty."""
    of = plan.options
    if not of.values and not of.left_out:
        return Section(OPTIONS)
    own = ", and the user's own" if of.given else ""
    lines = [
        *(Line("left out", f"{group.name}: {reason}", "yellow") for group, reason in of.left_out),
        *(
            Line(group.name, group.why, below=[flags_text({k: of.values[k] for k in group.values})])
            for group in of.groups
        ),
        *(Line("given", f"{k}={v}") for k, v in of.given),
    ]
    count = f"{len(of.values)} compiler option{'' if len(of.values) == 1 else 's'}"
    head = f"{count} (options={of.mode}{own}): `meshpar plan -v` and plan.options show them"
    return Section(OPTIONS, head, lines)


def _unnamed_places(program: Program, missing: Iterable[tuple[Op, Value, int]]) -> Iterator[str]:
    """For each unnamed dim of an op's result, the argument that has this dim, parameters before optimizer state; else the op."""
    find, argument_of = program.unifier.find, dict[int, Value]()
    for value in sorted(program.inputs, key=lambda v: v.kind == "opt"):
        for node in value.nodes:
            if node >= 0:
                argument_of.setdefault(find(node), value)
    for op, result, i in missing:
        value = argument_of.get(find(result.nodes[i]))
        at = f" at {op.location_of_layers}" if op.location_of_layers and value is None else ""
        shown = result if value is None else value
        yield f"{op.name if value is None else value.path} {list(shown.shape)} ({format_dims(program.dims(shown))}){at}"


def notes(plan: Plan) -> Section:
    """Dims that could not be sharded, joined names, rules and axes without effect, unnamed dims."""
    lines = [
        *(Line("note", note) for note in plan.notes),
        *(Line("join", str(join), "yellow") for join in plan.joins),
    ]
    named, total, missing = plan.program.coverage()
    if total:
        unnamed = Counter(_unnamed_places(plan.program, missing))
        unsharded = "; a dim without a name is not sharded" * (named < total)
        text = f"{named} of {total} named ({100 * named / total:.1f} %){unsharded}"
        below = [f"{n} × unnamed in {line}" for line, n in unnamed.most_common(4)]
        lines.append(Line("dims", text, "dim", below))
    return Section("Notes", lines=lines)
