"""The steps of a plan as the text of an SPMD program, one line per step."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import format_bytes, mesh_text
from .plan import Plan
from .steps import Barrier, Body, Branch, Call, Constant, Loop, Reduce, Reshard, Run, Shard, Step


def plan_steps(plan: Plan) -> str:
    """The steps of a plan as text: operands, results with the axes of their dims, the user's source line.

    The lines below a step list its collectives: bytes that a device sends per call, and the cause.
    """
    return "\n".join(_Printer(plan).lines())


class _Printer:
    """Writes the steps of a plan as lines of text: what every device runs, one line a step. It prints nothing itself.

    Attributes:
      plan: the plan.
      names: shard → its name in the text: the path of an argument, or ``%0``, ``%1``, …
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.names: dict[Shard, str] = {}

    def lines(self) -> Iterator[str]:
        """The lines of the whole program."""
        body = self.plan.body
        yield f"every device of {mesh_text(self.plan.sizes)} runs:"
        for shard in body.inputs:
            self.names[shard] = shard.value.path or self.name(shard)
            yield f"{self.names[shard]}: {self.shard(shard)}"
        yield from self.body(body, 0)
        yield f"return {self.list(body.outputs)}"

    def name(self, shard: Shard) -> str:
        return self.names.setdefault(shard, f"%{len(self.names)}")

    def list(self, shards: tuple[Shard | None, ...]) -> str:
        return ", ".join("_" if s is None else self.name(s) for s in shards)

    def shard(self, shard: Shard) -> str:
        """``bfloat16[batch:data seq mlp:model]``, and the axes over which it is partial."""
        value = shard.value
        names = [None] * len(value.shape) if -1 in value.nodes and value.op is None else self.plan.program.dims(value)
        dims = (
            (name or str(n)) + (f":{'+'.join(axes)}" if axes else "")
            for name, n, axes in zip(names, value.shape, shard.spec, strict=False)
        )
        over = f", partial ({shard.kind}) over {'+'.join(shard.partial)}" if shard.partial else ""
        return f"{value.aval.dtype}[{' '.join(dims)}]{over}"

    def body(self, body: Body, depth: int) -> Iterator[str]:
        for step in body.steps:
            yield from self.step(step, depth)

    def step(self, step: Step, depth: int) -> Iterator[str]:
        """The lines of one step: the operation, its collectives, its bodies."""
        pad = "  " * depth
        source = "" if step.op is None or isinstance(step, Constant | Barrier) else step.op.location
        made = f"{self.list(step.makes)} = " if step.makes and not isinstance(step, Call) else ""
        text, result = self.description(step)
        end = f": {result}" if result else ""
        yield f"{pad}{made}{text}{end}" + (f"    # {source}" if source else "")
        for c in step.sends:
            algorithm = "" if c.algorithm == "native" else f"({c.algorithm}) "
            yield f"{pad}    sends {format_bytes(c.bytes)} {algorithm}per call: {c.explanation}"
        for body in step.bodies:
            if isinstance(step, Loop):
                yield f"{pad}  given {self.list(body.inputs)}:"
            elif isinstance(step, Branch):
                yield f"{pad}  branch {step.branches.index(body)}:"
            yield from self.body(body, depth + 1 + (not isinstance(step, Call)))
            if not isinstance(step, Call):
                yield f"{pad}    yield {self.list(body.outputs)}"

    def description(self, step: Step) -> tuple[str, str]:
        """(operation and operands of a step, sharding of its results)."""
        if isinstance(step, Constant):
            size = getattr(step.array, "size", 1)
            return f"constant {step.array if size == 1 else ''}".rstrip(), self.shard(step.result)
        if isinstance(step, Reshard):
            moves = " then ".join(f"{m.op} over {'+'.join(m.axes)}" for m in step.path) or "identity"
            ring = f", as a ring with {len(step.ring.dots)} matmuls" if step.ring else ""
            buffer = ", into a separate buffer" if step.separate_buffer else ""
            return f"{moves} of {self.name(step.source)}{ring}{buffer}", self.shard(step.result)
        if isinstance(step, Reduce):
            parts = [
                f"{'all-reduce and slice' if s.entry.slices_locally else 'reduce-scatter'} over {'+'.join(s.axes)}"
                for s in step.scatters
            ]
            parts += [f"all-reduce ({step.source.kind}) over {'+'.join(step.over)}"] * bool(step.over)
            parts += [f"{m.op} over {'+'.join(m.axes)}" for m in step.path]
            ring = f", as a ring with {len(step.ring.leaves)} matmuls" if step.ring else ""
            return f"{' then '.join(parts) or 'identity'} of {self.name(step.source)}{ring}", self.shard(step.result)
        if isinstance(step, Run):
            ring = {"gather": ", chunk by chunk as they arrive", "reduce": ", chunk by chunk as they are sent"}.get(
                step.in_ring or "", ""
            )
            name = step.op.label
            operands = ", ".join(
                f"{var.val}" if s is None else self.name(s)
                for var, s in zip(step.op.eqn.invars, step.operands, strict=True)
            )
            rows = f", padded to {step.rows} rows" if step.rows > 1 else ""
            return f"{name} {operands}".rstrip() + rows + ring, " | ".join(map(self.shard, step.results))
        if isinstance(step, Barrier):
            after = f", after {self.list(step.after)}" if step.after else ""
            return f"barrier{' as integers' if step.opaque else ''} {self.list(step.sources)}{after}", ""
        if isinstance(step, Loop):
            trips = "while" if step.op.primitive.family != "scan" else f"scan × {step.body.trip_count}"
            over = f" over {self.list(step.stacks)}" if step.stacks else ""
            read = f" reading {self.list(step.hoisted)}, hoisted" if step.hoisted else ""
            return f"{trips} from {self.list(step.inits) or 'nothing'}{over}{read}", ""
        if isinstance(step, Branch):
            return f"branch on {'a literal' if step.index is None else self.name(step.index)}", ""
        assert isinstance(step, Call)
        return f"{step.op.name} {step.op.eqn.params.get('name', '')}".rstrip() + ":", ""
