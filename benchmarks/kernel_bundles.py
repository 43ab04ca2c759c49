"""Readers of the schedules that the TPU compiler dumps: utilization of the matrix unit in a loop, and the order of events.

The dump comes from `LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true"`. A line is a bundle of instructions
that are issued together.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["innermost_loops", "matrix_unit_share", "order_of"]


def innermost_loops(text: str) -> list[list[str]]:
    """Runs of bundles at the same, deepest `>` nesting."""
    runs: list[list[str]] = []
    depth_before = -1
    for line in text.splitlines():
        match = re.match(r"\s*0x[0-9a-f]+\s*\S*\s*:\s*(>*)", line)
        if not match:
            continue
        depth = len(match.group(1))
        if depth != depth_before:
            runs.append([])
        runs[-1].append(line)
        depth_before = depth
    return runs


def matrix_unit_share(folder: Path, chip: str) -> list[dict]:
    """For each kernel of a compiler dump: matmuls, bundles and matrix unit share of its loop with the most matmuls.

    An instruction multiplies a register of 16 bfloat16 rows. That takes 16 cycles on each of the four 128×128 units of v5e and
    v5p, and 8 on each of the two 256×256 units of v6e: with these numbers units and clock give the chips' peak. For tpu7x they do
    not fit the observed schedules, so that the share is None.
    """
    cycles = {"v5e": 16 / 4, "v5p": 16 / 4, "v6e": 8 / 2}.get(chip)
    loops = []
    for path in sorted(folder.glob("*meshpar*-final_bundles.txt")):
        if "schedule" in path.name:
            continue
        best = None
        for loop in innermost_loops(path.read_text()):
            matmuls = sum(line.count("vmatmul") for line in loop)
            if matmuls and (best is None or matmuls > best[0]):
                best = (matmuls, len(loop))
        if best:
            share = None if cycles is None else best[0] * cycles / best[1]
            loops.append({"matmuls": best[0], "bundles": best[1], "share": share})
    return loops


def order_of(folder: Path) -> list[str]:
    """Events of the scheduled bundles of a communicating kernel, in order: "send", "matmul", "wait"; repetitions are merged."""
    marks = {"dma.general": "send", "vmatmul": "matmul", "dma.done.wait": "wait"}
    events: list[str] = []
    for path in sorted(folder.glob("*meshpar*-final_bundles.txt")):
        if "schedule" in path.name:
            continue
        for line in path.read_text().splitlines():
            for mark, event in marks.items():
                if mark in line and "shalt.err" not in line and events[-1:] != [event]:
                    events.append(event)
    return events
