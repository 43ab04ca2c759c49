"""Plans from the text of their steps, so that the test of a pass is text in, text out.

The text is that of ``plan.steps_text()``, in which a name may have a size where it comes first (``embed=4096:data``). The parser
adds what the text does not have: a resharding whose result is returned is the stored shard of its value, others are copies; an op
without operands is constant; a matmul contracts the dims whose names both operands have and the result has not.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar._src.hardware.topology import chip_of, torus_of, torus_of_slices
from meshpar._src.layout import Layout
from meshpar._src.plan.collectives import Collective
from meshpar._src.plan.plan import Placement, Plan
from meshpar._src.plan.request import PlanRequest
from meshpar._src.plan.resharding import Move
from meshpar._src.plan.steps import (
    Barrier,
    Body,
    Branch,
    Call,
    Constant,
    GatherRing,
    Loop,
    Reduce,
    ReduceRing,
    Reshard,
    Run,
    Scatter,
    Shard,
    Step,
)
from meshpar._src.plan.text import plan_steps
from meshpar._src.program.ir import Frame, Op, Program, Value
from meshpar._src.program.names import Unifier

TYPE = re.compile(r"(\S+?)\[(.*?)\](?:, partial \((\S+)\) over (\S+))?")
CHANGE = re.compile(r"(.*) of (\S+?)(?:, as a ring with (\d+) matmuls)?(, into a separate buffer)?")
SENDS = re.compile(r"sends ([\d.e+]+) (\w+) (?:\((\w+)\) )?per call: (.*)")
RINGS = {"gather": ", chunk by chunk as they arrive", "reduce": ", chunk by chunk as they are sent"}
SCATTERS = {"reduce-scatter": "native", "all-reduce and slice": "all_reduce"}
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


class ParsedOp(Op):
    """An op whose source line is text."""

    __slots__ = ("location",)

    def __init__(self, name: str, frame: Frame, location: str):
        kernel = SimpleNamespace(name=name)
        eqn = SimpleNamespace(primitive=SimpleNamespace(name=name), params={"kernel": kernel}, invars=[], outvars=[])
        super().__init__(eqn, frame, [])
        self.location = location


def changes(run: Callable[[Plan], Body], text: str, **how) -> None:
    """Assert that a pass makes the change of a text: lines with ``-`` are before it only, lines with ``+`` after it only.

    A line that ends in ``…`` has only the first words of the text.
    """
    plan, expected = (parse_plan(half, **how) for half in halves(text))
    found = plan_steps(replace(plan, body=run(plan))).splitlines()
    for k, line in enumerate(lines := plan_steps(expected).splitlines()):
        if line.endswith("…") and found[k : k + 1] and found[k].startswith(line[:-1]):
            lines[k] = found[k]
    assert found == lines, "\n".join(difflib.ndiff(lines, found))


def halves(text: str) -> list[str]:
    """The texts before and after a change."""
    lines = textwrap.dedent(text).splitlines()
    return ["\n".join(re.sub("^[+-]", " ", line) for line in lines if line[:1] != other) for other in "+-"]


def parse_plan(text: str, topology: str | None = None, **attributes) -> Plan:
    """The plan with the steps of a text, on a topology, with other attributes of plans and their requests."""
    return _Parser(text).plan(topology, attributes)


class _Parser:
    def __init__(self, text: str):
        lines = [re.fullmatch(r"( *)(.*?)(?:    # (.*))?", line).groups() for line in text.splitlines() if line.strip()]
        margin = min(len(pad) for pad, _, _ in lines)
        self.lines = [(len(pad) - margin, line, source or "") for pad, line, source in lines]
        self.shards: dict[str, Shard] = {}
        self.sizes: dict[str, int] = {}  # of the dims with names
        self.placements: dict[Value, Placement] = {}
        self.unifier = Unifier()

    def next(self) -> tuple[str, str]:
        """(text, source line) of the next line, which is taken."""
        _, line, source = self.lines.pop(0)
        return line, source

    def plan(self, topology: str | None, attributes: dict[str, Any]) -> Plan:
        self.mesh = {axis: int(n) for axis, n in re.findall(r"(\w+)=(\d+)", self.next()[0])}
        root, inputs = self.frame(None, 1), []
        while match := re.fullmatch(rf"(\S+): ({TYPE.pattern})", self.lines[0][1]):
            name, type_ = self.next()[0].split(": ", 1)
            inputs.append(self.shard(name, type_, None))
            inputs[-1].value.path = None if name.startswith("%") else name
            assert match
        steps = self.steps(root, 0)
        outputs = self.list(self.next()[0].removeprefix("return").strip())
        self.close(root, inputs, outputs)
        self.unifier.freeze()
        body = Body(root, tuple(inputs), stored(steps, outputs), outputs)
        closed = SimpleNamespace(jaxpr=SimpleNamespace(constvars=[]))
        program = Program(closed, root, [s.value for s in inputs], [s.value for s in outputs], self.unifier)
        mesh = jax.sharding.AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))
        request = PlanRequest(Layout(""), mesh, topology, donated=frozenset(attributes.pop("donated", ())))
        chip, torus = (
            (None, torus_of(mesh)) if topology is None else (chip_of(topology), torus_of_slices(self.mesh, topology))
        )
        return Plan(program, request, request.layout, torus, chip, body, self.placements, (), (), (), **attributes)

    # -- shards

    def shard(self, name: str, type_: str, op: Op | None, value: Value | None = None) -> Shard:
        """The shard of this name and type; of a new value if none is given."""
        dtype, dims, kind, over = TYPE.fullmatch(type_).groups()
        words = [re.fullmatch(r"(.+?)(?:=(\d+))?(?::(\S+))?", word).groups() for word in split_dims(dims)]
        self.sizes.update((name, int(size)) for name, size, _ in words if size)
        names = tuple(None if name.isdecimal() else name for name, _, _ in words)
        shape = tuple(int(name) if name.isdecimal() else self.sizes.get(name, 8) for name, _, _ in words)
        if value is None:
            aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype) if hasattr(jnp, dtype) else jax.dtypes.prng_key)
            value = Value(aval, tuple(map(self.unifier.node, shape)), names, op)
        shard = Shard(
            value,
            tuple(tuple(axes.split("+")) if axes else () for _, _, axes in words),
            tuple(over.split("+")) if over else (),
            kind or "sum",
            isinstance(op, ParsedOp) and all(v is None or self.placements[v].made.is_constant for v in op.ins),
        )
        return self.define(name, shard)

    def define(self, name: str, shard: Shard) -> Shard:
        assert name not in self.shards, f"{name} is made twice"
        self.shards[name] = shard
        self.placements.setdefault(shard.value, Placement(shard, shard))
        return shard

    def like(self, name: str, shard: Shard, op: Op | None = None, lead: tuple[int, ...] = (), drop: int = 0) -> Shard:
        """A shard of a new value like another one, with leading dims ``lead``, without the first ``drop`` dims."""
        shape = (*lead, *shard.value.shape[drop:])
        names = (*(None,) * len(lead), *shard.value.annotation[drop:])
        aval = jax.ShapeDtypeStruct(shape, shard.value.aval.dtype)
        value = Value(aval, tuple(map(self.unifier.node, shape)), names, op)
        spec = (*((),) * len(lead), *shard.spec[drop:])
        return self.define(name, Shard(value, spec, shard.partial, shard.kind))

    def list(self, text: str) -> tuple[Shard | None, ...]:
        return tuple(None if name == "_" else self.shards[name] for name in filter(None, text.split(", ")))

    # -- steps

    def frame(self, parent: Op | None, trips: int | None) -> Frame:
        return Frame(SimpleNamespace(invars=[], outvars=[], constvars=[], eqns=[]), parent, trips)

    def close(self, frame: Frame, inputs, outputs) -> None:
        """Set the arguments and results of a frame, whose values are their own variables."""
        for shards, names in ((inputs, frame.jaxpr.invars), (outputs, frame.jaxpr.outvars)):
            names += [s.value for s in shards if s is not None]
            frame.env.update((v, v) for v in names)

    def steps(self, frame: Frame, depth: int) -> list[Step]:
        """The steps of the next lines with this indentation, up to the end of the body."""
        steps: list[Step] = []
        while self.lines and self.lines[0][0] >= depth and not self.lines[0][1].startswith(("yield", "return")):
            steps.append(self.step(frame, depth))
        return steps

    def step(self, frame: Frame, depth: int) -> Step:
        line, source = self.next()
        made, equals, text = line.partition(" = ")
        made, text = (made.split(", "), text) if equals and made[0] not in "\"'" else ([], line)
        kind = text.split()[0].rstrip(":")
        op = ParsedOp(kind, frame, source)
        if kind == "barrier":
            sources, _, after = re.sub("^barrier( as integers)? ?", "", text).partition(", after ")
            shards = self.list(sources)
            results = (self.define(name, s.copy()) for name, s in zip(made, shards, strict=True))
            return Barrier(op, shards, tuple(results), self.list(after), "barrier as integers" in text)
        if re.match(r"(scan|while) .*from ", text):
            return self.loop(op, made, text, depth)
        if text.startswith("branch on "):
            return self.branch(ParsedOp("cond", frame, source), made, text, depth)
        if text.endswith(":"):
            frame.ops.append(op)
            op.eqn.params["name"] = text[len(kind) + 1 : -1]
            inner = self.frame(op, 1)
            op.frames = [inner]
            steps = self.steps(inner, depth + 2)
            return Call(op, Body(inner, (), tuple(steps), ()))
        text, _, types = text.partition(": ")
        if kind == "constant":
            array = text.removeprefix("constant").strip()
            return Constant(None, self.shard(made[0], types, None), array)
        change = CHANGE.fullmatch(text)
        if change and re.match("all-|slice|reduce-scatter|collective-permute|identity", text):
            return self.change(op, made[0], types, *change.groups())
        return self.run(op, made, text.removeprefix(kind).strip(), types)

    def run(self, op: ParsedOp, made, text, types) -> Run:
        op.frame.ops.append(op)
        ring = next((name for name, words in RINGS.items() if text.endswith(words)), None)
        text, _, rows = text.removesuffix(RINGS.get(ring, "")).removesuffix(" rows").partition(", padded to ")
        names = filter(None, text.split(", "))
        operands = [self.shards.get(name, name) for name in names]
        op.ins = [None if isinstance(s, str) else s.value for s in operands]
        op.eqn.invars = [SimpleNamespace(val=s) if isinstance(s, str) else s.value for s in operands]
        results = [self.shard(name, t, op) for name, t in zip(made, types.split(" | ") if types else (), strict=True)]
        op.outs = [s.value for s in results]
        if op.name == "dot_general":
            x, y, out = (v.annotation for v in (*op.ins, *op.outs))
            batch = [n for n in x if n and n in y and n in out]
            contracted = [n for n in x if n and n in y and n not in out]
            numbers = tuple(tuple(tuple(v.index(n) for n in names) for v in (x, y)) for names in (contracted, batch))
            op.eqn.params["dimension_numbers"] = numbers
        shards = tuple(None if isinstance(s, str) else s for s in operands)
        sends = tuple(replace(c, op="collective-permute", content=(0, c.wording)) for c in self.sends(op, ()))
        axes = () if op.name == "dot_general" else None
        return Run(op, shards, tuple(results), axes, sends, ring, int(rows or 1))

    def change(self, op, made, types, parts, source, matmuls, buffer) -> Reshard | Reduce:
        source = self.shards[source]
        result = self.shard(made, types, None, source.value)
        scatters, over, path, spec, sent = [], (), [], source.spec, []
        for part in parts.split(" then ") if parts != "identity" else ():
            name, _, axes = part.partition(" over ")
            axes = tuple(axes.split("+"))
            sent += [] if name == "slice" else [("reduce-scatter" if name in SCATTERS else name.split()[0], axes)]
            to = next((i for i, entry in enumerate(result.spec) if set(axes) <= set(entry)), None)
            if name in SCATTERS:
                scatters.append(Scatter(to or 0, axes, SCATTERS[name]))
            elif name.startswith("all-reduce"):
                over = axes
            else:
                kept = [tuple(a for a in entry if a not in axes) for entry in spec]
                after = tuple((*entry, *axes) if i == to else entry for i, entry in enumerate(kept))
                path.append(Move(name, axes, 1, spec, after))
                spec = after
        fixed = {"op": op, "source": source, "result": result, "path": tuple(path)}
        sends = tuple(self.sends(op, sent))
        if scatters or over or (source.partial and not result.partial):
            leaves = ReduceRing(0, (), ((source, 0),) * int(matmuls), 1) if matmuls else None
            return Reduce(**fixed, collectives=sends, scatters=tuple(scatters), over=over, ring=leaves)
        ring = (
            GatherRing(0, (), ((SimpleNamespace(operands=(None, None), op=op), 0),) * int(matmuls), False)
            if matmuls
            else None
        )
        return Reshard(**fixed, collectives=sends, copy=True, ring=ring, separate_buffer=bool(buffer))

    def sends(self, op: Op, sent: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[Collective]:
        """The collectives of the next lines; ``sent``: the kind and axes of each, as far as they are known."""
        while self.lines and (match := SENDS.fullmatch(self.lines[0][1])):
            self.next()
            (name, axes), *sent = sent or [("collective-permute", ())]
            number, unit, algorithm, cause = match.groups()
            why = re.search(r"; (?:all-reduce and local slice, )?((?:ring steps|faster|as XLA|since XLA|…).*)", cause)
            cause, why = (cause[: why.start()], why[1]) if why else (cause, "")
            sent_bytes = float(number) * UNITS[unit]
            yield Collective(name, axes, "", "", (), "", sent_bytes, 1, cause, op, None, algorithm or "native", why)

    def bodies(self, op: ParsedOp, depth: int, trips: int | None = 1, given: Sequence[Callable[[str], Shard]] = ()):
        """(the bodies of a loop or branch, the outer shards that they read).

        Args:
          given: functions from a name to an input of the bodies.
        """
        out: list[Body] = []
        while self.lines and self.lines[0][0] == depth + 2 and re.match("given |branch ", self.lines[0][1]):
            frame, names = self.frame(op, trips), self.next()[0].removeprefix("given ")[:-1].split(", ")
            op.frames.append(frame)
            # both bodies of a while have the same inputs
            inputs = tuple(self.shards.get(name) or make(name) for name, make in zip(names, given, strict=False))
            steps = self.steps(frame, depth + 4)
            outputs = self.list(self.next()[0].removeprefix("yield").strip())
            self.close(frame, inputs, outputs)
            out.append(Body(frame, inputs, stored(steps, outputs), outputs, trips))
        op.frame.ops.append(op)
        return tuple(out), tuple(dict.fromkeys(s for body in out for s in body.free))

    def branch(self, op: ParsedOp, made, text, depth) -> Branch:
        bodies, free = self.bodies(op, depth)
        results = tuple(self.like(name, out, op) for name, out in zip(made, bodies[-1].outputs, strict=True))
        op.ins, op.outs = [s.value for s in free], [s.value for s in results]
        return Branch(op, self.shards.get(text.removeprefix("branch on ")), free, bodies, results)

    def loop(self, op: ParsedOp, made, text, depth) -> Loop:
        pattern = r"(?:scan × (\S+)|while) from (.*?)(?: over (.*?))?(?: reading (.*), hoisted)?"
        count, *lists = re.fullmatch(pattern, text).groups()
        inits, stacks, hoisted = (self.list(names) if names and names != "nothing" else () for names in lists)
        trips = int(count) if count and count.isdecimal() else None
        given = [partial(self.like, shard=s) for s in inits] + [partial(self.like, shard=s, drop=1) for s in stacks]
        bodies, free = self.bodies(op, depth, trips, given)
        results = []
        for k, (name, out) in enumerate(zip(made, bodies[-1].outputs, strict=True)):
            # the text does not say what a result is that no step reads: any shard stands for it
            results.append(self.like(name, out or inits[0], op, () if k < len(inits) else (trips or 1,)))
        consts = tuple(s for s in free if s not in hoisted)
        op.ins, op.outs = [s.value for s in (*consts, *inits, *stacks)], [s.value for s in results]
        return Loop(op, consts, hoisted, inits, stacks, bodies, tuple(results))


def split_dims(text: str) -> list[str]:
    """The dims of ``batch:data (a b) 8``: words, but ``(a b)`` is one."""
    return re.findall(r"\([^)]*\)\S*|\S+", text)


def stored(steps: list[Step], outputs: tuple[Shard | None, ...]) -> tuple[Step, ...]:
    """The steps; a resharding whose result is an output makes the stored shard of its value, not a copy."""
    return tuple(replace(s, copy=False) if isinstance(s, Reshard) and s.result in outputs else s for s in steps)
