"""A program that does not fit: what it holds, and which rules would make it hold less."""

from __future__ import annotations

import re

from ..cost.memory import memory_of
from ..errors import MeshparError, OutOfMemoryError
from ..hardware.chips import GIB
from ..hardware.topology import parse_topology
from ..layout import Layout
from ..passes import replan
from ..plan.plan import Plan, ShardedArray
from ..units import format_memory

ARGUMENTS, MADE, TRIES, SHOWN = 6, 4, 8, 4
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": GIB, "T": 2.0**40}
_FIGURES = (
    r"required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
)


def capacity_of(topology: str) -> float | None:
    """Bytes that a program may use on one device of a topology; None where nobody says (CPUs)."""
    if topology.startswith("cpu:"):
        return None
    return parse_topology(topology).chip.per_device().hbm


def out_of_memory(
    message: str, topology: str, plan: Plan | None, capacity: float | None, needed: float | None = None
) -> OutOfMemoryError:
    """The error for a program that does not fit: the compiler's figures, the largest tensors held, rules that would hold less.

    Args:
      message: the compiler's own text.
      needed: bytes, if known otherwise.
    """
    for pattern in _FIGURES:
        m = re.search(pattern, message)
        if m:
            needed, capacity = float(m[1]) * _UNITS[m[2]], float(m[3]) * _UNITS[m[4]]
            break
    what = "the program's temporaries alone need" if "temporaries" in message else "the program needs"
    figure = f"{what} {format_memory(needed)}" if needed else "the program does not fit"
    lines = [
        f"DOES NOT FIT: out of memory on {topology}: {figure}{f', but a device has {format_memory(capacity)}' if capacity else ''}"
    ]
    fixes: list[str] = []
    if plan is not None:
        lines += _table(plan)
        fixes += _suggestions(plan, capacity)
        if plan.argument_bytes() < 0.4 * memory_of(plan).peak:
            fixes.append("what the step makes is most of it: jax.checkpoint the layers, or take smaller microbatches")
    elif message:
        lines += [f"  | {line}" for line in message.strip().splitlines()[:12]]
    error = OutOfMemoryError("\n".join(lines), fixes=fixes)
    error.needed, error.capacity, error.log = needed, capacity, message
    return error


def _table(plan: Plan) -> list[str]:
    """What each device holds at the peak, by kind; the largest arguments with their axes, and what the step makes."""
    memory = memory_of(plan)
    kinds = sorted(memory.by_kind.items(), key=lambda k: -k[1])
    lines = [
        f"  by meshpar's estimate a device holds {format_memory(memory.peak)} at the peak{_at(memory.peak_source)}: "
        + ", ".join(f"{kind} {format_memory(n)}" for kind, n in kinds)
    ]
    arguments = sorted(plan.inputs, key=lambda h: -h.bytes)[:ARGUMENTS]
    rows = [
        (format_memory(h.bytes), h.path, f"{h.dtype}[{', '.join(map(str, h.shape))}]", _split(h)) for h in arguments
    ]
    paths = {h.path for h in plan.inputs}
    made = [(name, n, kind) for name, n, kind in memory.largest if name.split(" ")[0] not in paths]
    rows += [(format_memory(n), "", name, kind) for name, n, kind in made[:MADE]]
    wide = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    return lines + [f"    {a:>{wide[0]}}  {b:<{wide[1]}}  {c:<{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]


def _at(source: str) -> str:
    return f" ({source})" if source else ""


def _split(held: ShardedArray) -> str:
    """``embed:data mlp``: the dims, each with its axes."""
    return " ".join((dim or "_") + (f":{'+'.join(axes)}" if axes else "") for dim, axes in held.split)


def _candidates(plan: Plan) -> list[tuple[str, str]]:
    """(dim, axis) that large arrays have and do not use together, those that could save most first."""
    gains: dict[tuple[str, str], float] = {}

    def count(dims: list[str], used: set[str], size: float) -> None:
        for dim in dims:
            for axis, n in plan.sizes.items():
                if n > 1 and axis not in used and re.fullmatch(r"[A-Za-z]\w*", dim):
                    gains[dim, axis] = gains.get((dim, axis), 0.0) + size * (1 - 1 / n)

    for h in plan.inputs:
        count([d for d, axes in h.split if d and not axes], {a for _, axes in h.split for a in axes}, h.bytes)
    for name, size, _ in memory_of(plan).largest:
        m = re.search(r"\[([^\]]*)\]\Z", name)
        count(m[1].split() if m else [], set(), size)
    return sorted(gains, key=lambda k: -gains[k])


def _suggestions(plan: Plan, capacity: float | None) -> list[str]:
    """Rules that, added at the end of the layout, leave each device less to hold; best first. Each is planned anew."""
    before = memory_of(plan).peak
    found: list[tuple[float, float, str]] = []
    for dim, axis in _candidates(plan)[:TRIES]:
        rule = Layout(f"{dim}?: {axis}").with_first(plan.requested_layout.rules)
        try:
            after = replan(plan, layout=rule)
        except MeshparError:  # this rule clashes with the program; others may not
            continue
        if memory_of(after).peak < 0.99 * before:
            found.append((memory_of(after).peak, after.argument_bytes(), f"{dim}: {axis}"))
    found.sort()
    lines = []
    for peak, held, rule in found[:SHOWN]:
        fits = (
            ", which fits" if capacity is not None and peak <= capacity else f" ({format_memory(held)} of it arguments)"
        )
        lines.append(
            f"add `{rule}`: {format_memory(peak)} instead of {format_memory(before)} by the same estimate{fits}"
        )
    return lines
