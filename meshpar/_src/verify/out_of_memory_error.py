"""The error for a program that does not fit: its largest arrays, and rules that would reduce its memory."""

from __future__ import annotations

import re
from dataclasses import replace

from ...errors import MeshparError, OutOfMemoryError
from ..cost.memory import memory_of
from ..hardware.chips import GIB
from ..hardware.topology import parse_topology
from ..layout import Layout
from ..passes import replan
from ..plan.plan import Plan
from ..report.facts import argument_dims, dims_text, padding_text, shape_text
from ..report.hints import rule_gains
from ..units import format_memory

MAX_ARGUMENTS, MAX_INTERMEDIATES, MAX_TRIED_RULES, MAX_RULES = 6, 4, 8, 4
"""Arguments and intermediate values that the error lists; rules that are planned, and that it suggests."""
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": GIB, "T": 2.0**40}
_SIZES = (
    r"required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
)


def capacity_of(topology: str) -> float | None:
    """Bytes of memory that a program may use on a device of a topology; None for CPUs."""
    if topology.startswith("cpu:"):
        return None
    return parse_topology(topology).chip.per_device().hbm


def out_of_memory(
    message: str, topology: str, plan: Plan | None, capacity: float | None, needed: float | None = None
) -> OutOfMemoryError:
    """The error for a program that does not fit: needed bytes and capacity, the largest arrays, rules that would reduce them.

    Args:
      message: the compiler's error text; its numbers override the arguments.
      needed: bytes that the program needs; None: only the message has them.
    """
    for pattern in _SIZES:
        m = re.search(pattern, message)
        if m:
            needed, capacity = float(m[1]) * _UNITS[m[2]], float(m[3]) * _UNITS[m[4]]
            break
    subject = "the program's temporaries alone need" if "temporaries" in message else "the program needs"
    need = f"{subject} {format_memory(needed)}" if needed else "the program does not fit"
    has = f", but a device has {format_memory(capacity)}" if capacity else ""
    lines = [f"DOES NOT FIT: out of memory on {topology}: {need}{has}"]
    fixes: list[str] = []
    if plan is not None:
        lines += _table(plan)
        fixes += _suggestions(plan, capacity)
        if plan.argument_bytes() < 0.4 * memory_of(plan).peak:
            fixes.append(
                "most of it are intermediate values: use jax.checkpoint on the layers, or smaller microbatches"
            )
    elif message:
        lines += [f"  | {line}" for line in message.strip().splitlines()[:12]]
    error = OutOfMemoryError("\n".join(lines), fixes=fixes)
    error.needed, error.capacity, error.log = needed, capacity, message
    return error


def _table(plan: Plan) -> list[str]:
    """Lines: the planned peak of a device by kind, its largest arguments with their axes, its largest intermediate values."""
    memory = memory_of(plan)
    kinds = sorted(memory.by_kind.items(), key=lambda k: -k[1])
    at = f" ({memory.peak_source})" if memory.peak_source else ""
    by_kind = ", ".join(f"{kind} {format_memory(n)}" for kind, n in kinds)
    lines = [f"  by meshpar's estimate a device needs {format_memory(memory.peak)} at the peak{at}: {by_kind}"]
    if padding := padding_text(plan):
        lines.append(f"    {padding}")
    arguments = sorted(plan.inputs, key=lambda h: -h.bytes)[:MAX_ARGUMENTS]
    rows = [
        (format_memory(h.bytes), h.path, shape_text(h.dtype, h.shape), dims_text(argument_dims(h))) for h in arguments
    ]
    paths = {h.path for h in plan.inputs}
    others = [(name, n, kind) for name, n, kind, _ in memory.largest if name.split(" ")[0] not in paths]
    rows += [(format_memory(n), "", name, kind) for name, n, kind in others[:MAX_INTERMEDIATES]]
    wide = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    return lines + [f"    {a:>{wide[0]}}  {b:<{wide[1]}}  {c:<{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]


def _candidates(plan: Plan) -> list[str]:
    """Rules that could shard large arrays further, those that could save most memory first."""
    gains = rule_gains(plan)
    for name, size, *_ in memory_of(plan).largest:
        dims = re.search(r"\[([^\]]*)\]\Z", name)
        for dim in filter(str.isidentifier, dims[1].split() if dims else ()):
            for axis, n in plan.sizes.items():
                if n > 1:
                    gains[f"{dim}: {axis}"] += size * (1 - 1 / n)
    return sorted(gains, key=lambda rule: -gains[rule])[:MAX_TRIED_RULES]


def _suggestions(plan: Plan, capacity: float | None) -> list[str]:
    """Rules that reduce the planned peak when they are added at the end of the layout, best first."""
    before = memory_of(plan).peak
    plans: list[tuple[float, float, str]] = []
    for rule in _candidates(plan):
        layout = Layout(rule.replace(":", "?:")).with_first(plan.requested_layout.rules)
        try:
            after = replan(plan, replace(plan.request, layout=layout))
        except MeshparError:  # this rule cannot be planned; others may
            continue
        if memory_of(after).peak < 0.99 * before:
            plans.append((memory_of(after).peak, after.argument_bytes(), rule))
    plans.sort()
    lines = []
    for peak, arguments, rule in plans[:MAX_RULES]:
        fits = capacity is not None and peak <= capacity
        note = ", which fits" if fits else f" ({format_memory(arguments)} of it arguments)"
        saved = f"{format_memory(peak)} instead of {format_memory(before)} by the same estimate"
        lines.append(f"add `{rule}`: {saved}{note}")
    return lines
