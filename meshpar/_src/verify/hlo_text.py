"""Parser of HLO text, as XLA prints it for CPU, GPU and TPU before, between and after its passes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ARRAY = re.compile(r"\b(pred|token|bf16|[suf]\d+|c64|c128|f8\w+|f4\w+)\[([0-9,<=]*)\]")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_END = re.compile(r"^\}(, execution_thread.*)?\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")
CALLS = ("call", "call-start")
"""Opcodes of calls; ``call-start`` runs on another thread, such as collectives on the SparseCores of a TPU."""


@dataclass(slots=True)
class Instruction:
    """One line of a computation: ``ROOT %name = shape opcode(operands), attributes``.

    ``literal`` is the text between the parentheses: the value of a constant, the number of a parameter.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def attribute(self, key: str) -> str | None:
        """The name in ``key=%name``, or a plain value; None if there is no such attribute."""
        m = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return m[1] if m else None

    @property
    def called(self) -> str | None:
        """The computation that a fusion, call or asynchronous start runs."""
        return self.attribute("calls") or (self.attribute("to_apply") if self.opcode in CALLS else None)

    @property
    def op_name(self) -> str:
        """JAX's name of the op: ``jit(step)/transpose(jvp())/while/body/dot_general``."""
        m = re.search(r'op_name="([^"]*)"', self.attributes)
        return m[1] if m else ""


@dataclass(slots=True)
class Computation:
    """A named list of instructions; ``root`` is the name of its result."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def get(self, name: str) -> Instruction | None:
        """An instruction by name; ``name#2`` (newer XLA versions) is element 2 of a tuple."""
        instruction = self.instructions.get(name)
        if instruction is None and "#" in name:
            base, _, index = name.rpartition("#")
            source = self.get(base)
            if source is not None:
                shape = elements(source.shape)[int(index)]
                return Instruction(name, shape, "get-tuple-element", (base,), base, f", index={index}")
        return instruction


@dataclass(slots=True)
class Module:
    """A parsed HLO module.

    Attributes:
      computations: by name.
      instructions: of all computations, by name.
      entry: name of the entry computation.
      devices: partitions × replicas.
      frames: stack frame id → ``file.py:12 (function)``.
    """

    computations: dict[str, Computation]
    instructions: dict[str, Instruction]
    entry: str
    devices: int
    frames: dict[int, str]

    def source(self, i: Instruction) -> str:
        """The user's source line of an instruction; "" if the text does not have it."""
        m = re.search(r"stack_frame_id=(\d+)", i.attributes)
        if m:
            return self.frames.get(int(m[1]), "")
        m = re.search(r'source_file="([^"]*)" source_line=(\d+)', i.attributes)
        return f"{m[1]}:{m[2]}" if m else ""


def parse(text: str) -> Module:
    """Parse the text of a module, from ``Compiled.as_text()`` or ``xla_dump_to``.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    now: Computation | None = None
    lines = text.splitlines()
    for n, line in enumerate(lines):
        if not line.startswith((" ", "\t")):
            head = None if line.startswith("HloModule") else _HEAD.match(line)
            if head:
                now = computations[head[2]] = Computation(head[2])
                entry = head[2] if head[1] else entry
            elif _END.match(line) and (n + 1 == len(lines) or not lines[n + 1].strip()):
                now = None  # a brace in column 0 inside a multi-line backend_config is followed by another line
            continue
        if now is None:
            continue
        m = _NAMED.match(line)
        if m is None:
            continue
        instruction = _instruction(line, m.end(), m[2])
        if instruction is not None:
            now.instructions[instruction.name] = instruction
            if m[1]:
                now.root = instruction.name
    if not entry:
        raise ValueError("this text has no ENTRY computation: it is not an HLO module")
    instructions = {i.name: i for computation in computations.values() for i in computation}
    return Module(computations, instructions, entry, _devices(lines[0]), _frames(lines))


def _instruction(line: str, start: int, name: str) -> Instruction | None:
    """The instruction of a line whose shape starts at ``start``; None for other lines."""
    end = start
    while end < len(line) and line[end] != " ":
        end = closing(line, end) if line[end] in "({[" else end + 1
    opening = line.find("(", end)
    if opening < 0:
        return None
    close = closing(line, opening)
    opcode, inner = line[end:opening].strip(), line[opening + 1 : close - 1]
    if opcode in ("constant", "parameter"):
        operands: tuple[str, ...] = ()
    elif "%" in inner:
        operands = tuple(re.findall(r"%([\w.\-]+(?:#\d+)*)", inner))
    else:  # the short form, without %
        parts = _COMMENT.sub("", re.sub(r"\{[^}]*\}", "", inner)).split(",")
        operands = tuple(p.split()[-1] for p in parts if p.strip())
    return Instruction(name, line[start:end], opcode, operands, inner, line[close:])


def closing(text: str, at: int) -> int:
    """The index after the bracket that closes the one at ``at``."""
    depth = 0
    for i in range(at, len(text)):
        if text[i] in "({[":
            depth += 1
        elif text[i] in ")}]":
            depth -= 1
            if depth == 0:
                return i + 1
    return len(text)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, sizes) of every array in the text of a shape."""
    return [(t, tuple(int(n.strip("<=")) for n in dims.split(",") if n)) for t, dims in _ARRAY.findall(shape)]


def byte_size(shapes: list[tuple[str, tuple[int, ...]]]) -> float:
    """Bytes of arrays; elements smaller than a byte are packed."""
    return sum(_bits(t) * math.prod(dims) for t, dims in shapes) / 8


def _bits(dtype: str) -> int:
    """Bits per element of a dtype in HLO notation."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else {"pred": 8, "token": 0}[dtype]


def elements(shape: str) -> list[str]:
    """The top-level elements of a tuple's shape."""
    text = _COMMENT.sub("", shape).strip()
    if not text.startswith("("):
        return [text]
    out, at, start = [], 1, 1
    while at < len(text) - 1:
        if text[at] in "({[":
            at = closing(text, at)
        elif text[at] == ",":
            out.append(text[start:at].strip())
            at = start = at + 1
        else:
            at += 1
    return [*out, text[start:-1].strip()]


def _devices(head: str) -> int:
    counts = (re.search(rf"{key}=(\d+)", head) for key in ("num_partitions", "replica_count"))
    return math.prod(int(m[1]) for m in counts if m)


def _frames(lines: list[str]) -> dict[int, str]:
    """Stack frame id → the user's source line, from the tables before the first computation.

    It is the innermost line outside installed packages and meshpar, if there is one.
    """
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    for line in lines[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif line.startswith(("%", "ENTRY")):
            break
        elif table is not None and (m := re.match(r"(\d+) (.*)", line)):
            table[int(m[1])] = m[2].strip('"')
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations: dict[int, str] = {}
    for k, row in tables.get("FileLocations", {}).items():
        of = {a: int(b) for a, b in re.findall(r"(\w+)=(\d+)", row)}
        function = functions.get(of.get("function_name_id", 0), "").rsplit(".", 1)[-1]
        locations[k] = f"{files.get(of.get('file_name_id', 0), '')}:{of.get('line', 0)} ({function})"
    rows = {k: [int(n) for n in re.findall(r"=(\d+)", row)] for k, row in tables.get("StackFrames", {}).items()}
    one = any(k == row[1] for k, row in rows.items() if len(row) > 1)  # then ids start at 1, and 1 means "no parent"
    frames = {}
    for k in rows:
        chain, now = [], k
        while now in rows and len(chain) < len(rows):
            location, parent = (*rows[now], 0)[:2]
            chain.append(locations.get(location, ""))
            now = parent - one
        own = [p for p in chain if not p.startswith(_PACKAGE) and f"{os.sep}site-packages{os.sep}" not in p]
        frames[k] = (own or chain)[0]
    return frames
