"""Builds a program from a jaxpr and the dim names of its inputs: the values of every call site, with names for their dims.

One pass over the equations makes values and ops, and joins dims with the same data (elementwise ops, reshapes, loop carries). A
second pass joins the dims of each factor of an op weakly, broadcasts last. Then dims that the same indices look up are joined, and
names pass between dims and their slices (the q, k and v of a fused projection); renames follow, because they need the names.

The end of the module has one function for each op with bodies: calls, loops, branches, and the user's own ``shard_map``, whose body
says which dims of its operands and results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var

from ...errors import UnknownDimError
from ..compat.jax import constraint_spec, literal_array
from ..compat.loop_operands import loop_parts, operands_of_bodies
from ..dims import Dims, did_you_mean
from ..rules import OpRule, bodies, no_rule, primitive, separated
from ..rules.index import LookupDims
from ..rules.mesh_in_shard_map import Factors
from ..rules.rule import NameLink
from ..rules.shape import reshape_order
from .ir import Frame, Join, Op, Program, Value
from .names import NONE, DimSlice, Nodes, Unifier, joined_names
from .primitives import name_dims_p, place_p


def infer(
    closed: ClosedJaxpr,
    annotations: Sequence[Dims | None],
    paths: Sequence[str],
    out_annotations: Sequence[Dims | None],
    out_paths: Sequence[str],
) -> Program:
    """Build the program of a closed jaxpr and name its dims.

    Args:
      closed: ClosedJaxpr.
      annotations: the dim names of every flat input; None: it has none.
      paths: the tree path of every flat input, for reports.
      out_annotations, out_paths: the same for the results.

    Raises:
      UnknownDimError: a rename of a dim that the value does not have.
    """
    builder = Builder()
    jaxpr = closed.jaxpr
    root = Frame(jaxpr)
    inputs = []
    for var, dims, path in zip(jaxpr.invars, annotations, paths, strict=True):
        value = builder.value(var.aval)
        value.path = path
        builder.annotate(value, dims, path)
        inputs.append(value)
    for var in jaxpr.constvars:
        root.env[var] = builder.value(var.aval)
    builder.run(root, inputs)
    outputs = []
    for var, value, dims, path in zip(jaxpr.outvars, root.outs(), out_annotations, out_paths, strict=True):
        value = builder.value(var.aval) if value is None else value
        if value.path is None:
            value.path = path
            builder.annotate(value, dims, path)
        outputs.append(value)
    builder.finish()
    program = Program(closed, root, inputs, outputs, builder.unifier)
    for a, b, origin_a, origin_b, op in joined_names(builder.unifier):
        program.joins.append(Join(a, b, origin_a, origin_b, op.location if isinstance(op, Op) else None))
    return program


def infer_like(program: Program, closed: ClosedJaxpr) -> Program:
    """The program of another jaxpr, with the names, paths and kinds of inputs and results of ``program``.

    The jaxpr may have more results, after the results of ``program``.
    """
    ins, outs = program.inputs, program.outputs
    more = range(len(closed.jaxpr.outvars) - len(outs))
    names, out_names = ([v.annotation for v in side] for side in (ins, outs))
    paths, out_paths = ([v.path or "" for v in side] for side in (ins, outs))
    out_paths += [f"value {k}" for k in more]
    new_program = infer(closed, names, paths, [*out_names, *(None for _ in more)], out_paths)
    for new, old in zip((*new_program.inputs, *new_program.outputs), (*ins, *outs), strict=False):
        new.kind = new.kind or old.kind
    new_program.pipelines = program.pipelines
    return new_program


def _signature(eqn: Any) -> Hashable | None:
    """What equal equations have in common: the primitive, its parameters, and the shapes, dtypes and literals of the operands.

    None if a parameter has no hash: the equation equals no other one.
    """
    operands = tuple(
        (v.aval.shape, v.aval.dtype, literal_array(v).tobytes() if isinstance(v, Literal) else None) for v in eqn.invars
    )
    signature = eqn.primitive, tuple(eqn.params.items()), operands, bool(eqn.effects)
    try:
        hash(signature)
    except TypeError:
        return None
    return signature


class Builder:
    """Makes the values and ops of a program, and joins their dims."""

    def __init__(self) -> None:
        """An empty unifier, no rules, and empty lists of the ops that later phases of the inference visit."""
        self.unifier = Unifier()
        self.rules: dict[Hashable, OpRule] = {}
        self.ties: list[Op] = []
        self.stretched: list[Op] = []
        self.renames: list[Op] = []
        self.slices: dict[tuple[int, int], DimSlice] = {}

    # -- values

    def value(self, aval: Any, nodes: Nodes | None = None, op: Op | None = None) -> Value:
        """A new value, with new nodes by default."""
        return Value(aval, self.unifier.fresh(aval.shape) if nodes is None else nodes, None, op)

    def annotate(self, value: Value, dims: Dims | None, origin: str) -> None:
        """Give the dims of a value the names that the user gave them."""
        if dims is None or not any(dims):
            return
        value.annotation = dims
        for node, name in zip(value.nodes, dims, strict=True):
            if name is not None:
                self.unifier.annotate(node, name, f"{origin} names it `{name}`")

    def alias(self, a: Value | None, b: Value | None, where: Op) -> None:
        """Join the dims of two values that have the same data."""
        if a is not None and b is not None:
            self.join(a.nodes, b.nodes, where)

    def join(self, a: Nodes, b: Nodes, where: Op) -> None:
        """Join the dims of two arrays of one shape strongly."""
        for x, y in zip(a, b, strict=True) if a is not b else ():
            if x != y:
                self.unifier.unify(x, y, where)

    # -- equations

    def run(self, frame: Frame, args: Sequence[Value | None]) -> None:
        """Make the values and ops of a frame for these arguments; None: a literal."""
        env = frame.env
        for var, value in zip(frame.jaxpr.invars, args, strict=True):
            env[var] = value if value is not None else self.value(var.aval)
        for eqn in chain.from_iterable(map(separated, frame.jaxpr.eqns)):
            ins = [None if isinstance(v, Literal) else env[v] for v in eqn.invars]
            op = Op(eqn, frame, ins)
            if op.primitive.elementwise:
                outs = self.elementwise(op)
            elif op.primitive.call:
                outs = _call(self, op)
            elif op.name in CONTROL:
                outs = CONTROL[op.name](self, op)
            else:
                outs = self.by_rule(op)
            op.outs = outs
            env.update(zip(eqn.outvars, outs, strict=True))
            frame.ops.append(op)

    def run_body(self, frame: Frame, args: Sequence[Value | None]) -> list[Value | None]:
        """:meth:`run` for a body of the op ``frame.parent``; returns the results of the body, None for a literal."""
        assert frame.parent is not None
        frame.parent.frames.append(frame)
        frame.env.update((v, self.value(v.aval)) for v in frame.jaxpr.constvars)
        self.run(frame, args)
        return frame.outs()

    def elementwise(self, op: Op) -> list[Value]:
        """The results of an elementwise op, which has the dims of its operands."""
        outs = []
        multi = op.primitive.family == "barrier"
        for i, var in enumerate(op.eqn.outvars):
            shape = var.aval.shape
            nodes: Nodes | None = None
            for value in op.ins[i : i + 1] if multi else op.ins:
                if value is None or not value.aval.shape:
                    continue
                if value.aval.shape != shape:  # stretched along dims of size 1
                    self.stretched.append(op)
                    continue
                if nodes is None:
                    nodes = value.nodes
                else:
                    self.join(nodes, value.nodes, op)
            outs.append(self.value(var.aval, nodes, op))
        return outs

    def by_rule(self, op: Op) -> list[Value]:
        """The results of an op with a factor rule, as new values; sets ``op.rule``, and joins the dims that share a
        factor."""
        op.rule = self.rule_of(op.eqn)
        outs = [self.value(v.aval, op=op) for v in op.eqn.outvars]
        if op.rule.given is not None:
            _name_through_body(op, outs)
        if op.rule.strong:
            self.join_strong(op, outs)
        if op.rule.known:
            self.ties.append(op)
        return outs

    def rule_of(self, eqn: Any) -> OpRule:
        """The factor rule of an equation; one object for all equal equations (:func:`_signature`)."""
        signature = _signature(eqn)
        rule = self.rules.get(signature)
        if rule is None:
            in_shapes, out_shapes = ([v.aval.shape for v in part] for part in (eqn.invars, eqn.outvars))
            fn = primitive(eqn.primitive.name).rule
            rule = no_rule(in_shapes, out_shapes) if fn is None else fn(eqn, in_shapes, out_shapes)
            if signature is not None and rule.given is None:  # given specs are changed by the names in the body
                self.rules[signature] = rule
        return rule

    def join_strong(self, op: Op, outs: list[Value]) -> None:
        """Join the dims of operands and results that are the same factor of an op that moves data unchanged."""
        rule = op.rule
        assert rule is not None
        if op.primitive.regroups:
            if op.ins[0] is not None:
                nodes = tuple(op.ins[0].nodes[d] for d in reshape_order(op.eqn))
                self.reshape(nodes, outs[0].nodes)
            return
        where: dict[int, int] = {}
        for node, (factor,) in _factors(op, rule, outs):
            if factor in where:
                self.unifier.unify(where[factor], node, op)
            else:
                where[factor] = node

    def reshape(self, a: Nodes, b: Nodes) -> None:
        """Join the dims of a reshape's operand and result: those between two common boundaries are one sequence of sub-dims."""
        u = self.unifier
        left, right = ([n for n in nodes if n != NONE] for nodes in (a, b))
        while left and right:
            i = j = 1
            while i <= len(left) and j <= len(right):
                first, second = math.prod(u.size[n] for n in left[:i]), math.prod(u.size[n] for n in right[:j])
                if first == second:
                    break
                i, j = i + (first < second), j + (first > second)
            u.unify_sequences(left[:i], right[:j])
            left, right = left[i:], right[j:]

    # -- weak joins and renames, after the pass

    def finish(self) -> None:
        """Join the dims of each factor weakly, in program order, then resolve renames and fix all names.

        Broadcasts come last: a mask must not decide which dim of attention scores is the queries' dim.
        """
        u = self.unifier
        self.find_slices()
        for op in sorted(self.ties, key=lambda op: op.primitive.family == "broadcast"):
            self.tie(op)
        for op in self.stretched:
            (out,) = op.outs
            for value in op.ins:
                if value is not None and len(value.nodes) == len(out.nodes) and value.aval.shape != out.aval.shape:
                    for x, y in zip(value.nodes, out.nodes, strict=True):
                        u.tie([y, x], op)
        self.tie_indexed()
        slices = list(self.slices.values())
        for op in self.renames:
            u.name_slices(slices)
            self.resolve_rename(op)
        u.name_slices(slices)
        u.freeze()

    def find_slices(self) -> None:
        """Find the slices of dims that may be dims of their own, in program order: the q, k, v of a fused projection.

        Slices that cover half of the dim and overlap all others (``x[:, :-1]`` and ``x[:, 1:]``) are not.
        """
        u = self.unifier
        links: dict[int, list[tuple[int, int, range, Op]]] = {}
        for op in self.ties:
            rule = op.rule
            assert rule is not None
            if any(link.elements for link in rule.name_links):
                nodes: dict[int, int] = {}
                for node, factors in _factors(op, rule, op.outs):
                    if len(factors) == 1:
                        nodes.setdefault(factors[0], node)
                for full, part, elements in rule.name_links:
                    if elements and full in nodes and part in nodes:
                        links.setdefault(u.find(nodes[full]), []).append((nodes[full], nodes[part], elements, op))
        for root, own in links.items():
            last_start, first_stop = max(r.start for *_, r, _ in own), min(r.stop for *_, r, _ in own)
            for full, part, elements, op in own:
                if elements.start >= first_stop or elements.stop <= last_start or 2 * len(elements) < u.size[root]:
                    is_slice = op.primitive.family in ("slice", "split")
                    self.slices[full, part] = DimSlice(full, part, is_slice, elements, op)

    def tie_indexed(self) -> None:
        """Join the dims that the same indices index: an embedding's gradient gets the embedding's ``vocab``.

        Only unnamed dims are joined, and only if all named dims of these indices have the same names.
        """
        u = self.unifier
        groups: dict[tuple[Nodes, int], list[tuple[int, Op]]] = {}
        for op in self.ties:
            if op.primitive.family not in ("gather", "scatter"):
                continue
            into, (operand, indices) = LookupDims.of(op.eqn).indexed, op.ins[:2]
            if len(into) != 1 or operand is None or operand.nodes[into[0]] == NONE:
                continue
            node = operand.nodes[into[0]]
            while indices is not None:
                if any(n != NONE for n in indices.nodes):
                    groups.setdefault((indices.nodes, u.size[node]), []).append((node, op))
                made = indices.op
                if made is None or made.primitive.family not in ("broadcast", "reshape", "squeeze"):
                    break
                indices = made.ins[0]
        for indexed in groups.values():
            named = [node for node, _ in indexed if u.names_now(node)]
            if len({frozenset(u.names_now(node)) for node in named}) == 1:
                for node, op in indexed:
                    if not u.names_now(node):
                        u.tie([named[0], node], op)

    def tie(self, op: Op) -> None:
        """Join the dims of each factor of an op weakly, and the dims of each of its name links."""
        rule = op.rule
        assert rule is not None
        groups: list[list[int]] = [[] for _ in rule.sizes]
        composites: dict[tuple[int, ...], list[int]] = {}
        for node, factors in _factors(op, rule, op.outs):
            if len(factors) == 1:
                groups[factors[0]].append(node)
            elif factors and not rule.strong:
                self.composite(node, factors, groups, rule)
                composites.setdefault(factors, []).append(node)
        if not rule.strong:
            for group in (*groups, *composites.values()):
                self.unifier.tie(group, op)
        for x, y, _ in rule.name_links:
            if groups[x] and groups[y] and (pair := (groups[x][0], groups[y][0])) not in self.slices:
                self.unifier.link_names(*pair, op)

    def composite(self, node: int, factors: tuple[int, ...], groups: list[list[int]], rule: OpRule) -> None:
        """Split a dim that consists of several factors of an op (grouped convolutions) into sub-dims; add these to ``groups``."""
        u = self.unifier
        factors = tuple(f for f in factors if rule.sizes[f] != 1)
        parts = [node] if len(factors) == 1 else [u.node(rule.sizes[f]) for f in factors]
        if len(factors) == 1 or u.unify_sequences([node], parts):
            for f, p in zip(factors, parts, strict=True):
                groups[f].append(p)

    def resolve_rename(self, op: Op) -> None:
        """Name the dims of the result of ``mp.rename``; raises UnknownDimError for a name that the operand lacks."""
        pairs, back = dict(op.eqn.params["pairs"]), op.eqn.params["back"]
        (value,), (out,) = op.ins, op.outs
        if value is None:
            return
        names = []
        for i, node in enumerate(value.nodes):
            own = value.annotation[i] if value.annotation else None
            names.append({own} if own else self.unifier.names_now(node))
        found = {old: next((i for i, ns in enumerate(names) if old in ns), None) for old in pairs}
        missing = [old for old, i in found.items() if i is None]
        if missing and not back:
            raise UnknownDimError(
                f"mp.rename: the value has no dim `{missing[0]}`",
                shape=value.shape,
                dim=missing[0],
                source=op.location,
                fixes=did_you_mean(missing[0], set().union(*names), "its dims"),
            )
        # the cotangent of a rename may have an unnamed dim (from a sum): if one is unnamed, it is the renamed one
        bare = [i for i, ns in enumerate(names) if not ns and value.nodes[i] != NONE]
        if len(missing) == len(bare) == 1:
            found[missing[0]] = bare[0]
        renamed = {i: pairs[old] for old, i in found.items() if i is not None}
        for i, (a, b) in enumerate(zip(value.nodes, out.nodes, strict=True)):
            if i in renamed:
                self.unifier.annotate(b, renamed[i], "mp.rename")
            elif names[i] or not missing:
                self.unifier.tie([a, b], op)
        if renamed:
            base = out.annotation or (None,) * len(out.nodes)
            out.annotation = tuple(renamed.get(i, n) for i, n in enumerate(base))


def _factors(op: Op, rule: OpRule, outs: Sequence[Value]) -> Iterator[tuple[int, Factors]]:
    """(node, factors) of each dim of the operands and results of an op, without dims of size 1."""
    for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(outs, rule.outs, strict=True)]:
        if value is not None and dims:
            yield from ((node, own) for node, own in zip(value.nodes, dims, strict=True) if node != NONE)


# -- loops, branches, calls, and ops that set names or specs


def _call(b: Builder, op: Op) -> list[Value]:
    """Infer the body of a call with the operands of ``op``; returns one Value for each result of the body."""
    ((jaxpr,), (operands,)) = bodies(op.eqn), operands_of_bodies(op.eqn, op.ins)
    if op.primitive.family == "custom_derivative":
        jaxpr = _with_own_results(jaxpr, op)
    results = b.run_body(Frame(jaxpr, op), operands)
    return [b.value(v.aval, op=op) if r is None else r for v, r in zip(jaxpr.outvars, results, strict=True)]


def _with_own_results(jaxpr: Any, op: Op) -> Any:
    """A jaxpr that returns no operand: an identity is inserted before such results."""
    eqns, outvars, ins = list(jaxpr.eqns), list(jaxpr.outvars), set(jaxpr.invars)
    for k, var in enumerate(outvars):
        if not isinstance(var, Literal) and var in ins:
            outvars[k], params = Var(var.aval), {"names": (None,) * len(var.aval.shape)}
            same = op.eqn.replace(primitive=name_dims_p, params=params, effects=frozenset())
            eqns.append(same.replace(invars=[var], outvars=[outvars[k]]))
    return jaxpr.replace(eqns=eqns, outvars=outvars) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _inside(value: Value | None, b: Builder, aval: Any, drop: int = 0) -> Value:
    """A value inside a loop body, without the first ``drop`` dims of the value outside."""
    if value is None:
        return b.value(aval)
    inner = Value(aval, b.unifier.register(value.nodes[drop:]) if drop else value.nodes)
    if value.annotation is not None:
        inner.annotation = value.annotation[drop:]
    inner.kind = value.kind
    return inner


def _scan(b: Builder, op: Op) -> list[Value]:
    """The results of a ``scan``: carries have one class inside and outside, and stacks one more dim than their slices."""
    (jaxpr,), parts, length = bodies(op.eqn), loop_parts(op.eqn), op.eqn.params["length"]
    pairs = parts.split(list(zip(op.ins, (v.aval for v in jaxpr.invars), strict=True)))
    consts = [_inside(v, b, a) for v, a in pairs[0]]
    carry = [_carry(v, b, a) for v, a in pairs[1]]
    arguments = [*consts, *carry, *(_inside(v, b, a, 1) for v, a in pairs[2])]
    carried, made = parts.split_results(b.run_body(Frame(jaxpr, op, trip_count=length), arguments))
    for before, after in zip(carry, carried, strict=True):
        b.alias(before, after, op)
    last, stacked = parts.split_results(op.eqn.outvars)
    outs = [b.value(v.aval, c.nodes, op) for v, c in zip(last, carry, strict=True)]
    stacks = [v for v, _ in pairs[2] if v is not None]
    layers = stacks[0].nodes[0] if stacks else NONE if length == 1 else b.unifier.node(length)
    for v in stacks:
        b.unifier.unify(layers, v.nodes[0], op)
    b.unifier.looped.add(layers)
    for var, y in zip(stacked, made, strict=True):
        inner = y.nodes if y is not None else b.unifier.fresh(var.aval.shape[1:])
        outs.append(b.value(var.aval, b.unifier.register((layers, *inner)), op))
    return outs


def _carry(value: Value | None, b: Builder, aval: Any) -> Value:
    return b.value(aval) if value is None else Value(aval, value.nodes)


def _while(b: Builder, op: Op) -> list[Value]:
    """The results of a ``while``, whose carries have one class inside and outside."""
    jaxprs, parts = bodies(op.eqn), loop_parts(op.eqn)
    inits = parts.carried(op.ins)
    carry = [_carry(v, b, a.aval) for v, a in zip(inits, parts.carried(jaxprs[1].invars), strict=True)]
    results: list[Value | None] = []
    for jaxpr, operands in zip(jaxprs, operands_of_bodies(op.eqn, op.ins), strict=True):
        consts = operands[: len(operands) - len(carry)]
        inner = [_inside(v, b, a.aval) for v, a in zip(consts, jaxpr.invars, strict=False)]
        results = b.run_body(Frame(jaxpr, op, trip_count=None), [*inner, *carry])
    for before, after in zip(carry, results, strict=True):
        b.alias(before, after, op)
    return [b.value(v.aval, c.nodes, op) for v, c in zip(op.eqn.outvars, carry, strict=True)]


def _cond(b: Builder, op: Op) -> list[Value]:
    """The results of a ``cond``, joined with the results of all its branches."""
    outs = [b.value(v.aval, op=op) for v in op.eqn.outvars]
    for jaxpr, operands in zip(bodies(op.eqn), operands_of_bodies(op.eqn, op.ins), strict=True):
        inner = [_inside(v, b, a.aval) for v, a in zip(operands, jaxpr.invars, strict=True)]
        for out, result in zip(outs, b.run_body(Frame(jaxpr, op), inner), strict=True):
            b.alias(out, result, op)
    return outs


def _named(b: Builder, op: Op) -> list[Value]:
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    b.annotate(out, op.eqn.params["names"], f"{op.eqn.params.get('origin', 'mp.named')} at {op.source}")
    return [out]


def _rename(b: Builder, op: Op) -> list[Value]:
    b.renames.append(op)
    return [b.value(op.eqn.outvars[0].aval, op=op)]


def _place(b: Builder, op: Op) -> list[Value]:
    """The result of an op that sets the spec of its operand."""
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    out.explicit = op.eqn.params["spec"] if op.eqn.primitive is place_p else constraint_spec(op.eqn)
    return [out]


def _name_through_body(op: Op, outs: list[Value]) -> None:
    """Give the results of the user's own ``shard_map`` the specs of its ``out_specs``, and the dims that they have in its body."""
    rule, jaxpr = op.rule, op.eqn.params["jaxpr"]
    assert rule is not None
    assert rule.given is not None
    for value, dims in zip(outs, rule.outs, strict=True):
        value.explicit = tuple(rule.given[f] for (f,) in dims)
    body, frame = Builder(), Frame(jaxpr)
    operands = [body.value(var.aval) for var in jaxpr.invars]
    factor_of: dict[str, int] = {}
    for i, (value, dims) in enumerate(zip(operands, rule.ins, strict=True)):
        names = tuple(f"{i}.{d}" for d in range(len(dims)))
        factor_of.update((name, f) for name, (f,) in zip(names, dims, strict=True))
        body.annotate(value, names, "")
    body.run(frame, operands)
    body.finish()
    for k, value in enumerate(frame.outs()):
        for d, node in enumerate(() if value is None else value.nodes):
            dims = body.unifier.sub_dims_of(node) if node != NONE else ()
            factor = next((factor_of[n] for n in dims[0][0] if n in factor_of), None) if len(dims) == 1 else None
            if factor is None:
                continue
            (own,) = rule.outs[k][d]
            if rule.sizes[own] != rule.sizes[factor]:
                continue  # the concatenated shards of all devices: residuals of a backward pass
            if rule.given[own] == rule.given[factor] and (factor,) not in rule.outs[k]:
                rule.outs[k] = (*rule.outs[k][:d], (factor,), *rule.outs[k][d + 1 :])
            else:
                rule.name_links.append(NameLink(factor, own))


CONTROL: dict[str, Callable[[Builder, Op], list[Value]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "name_dims": _named,
    "rename_dims": _rename,
    "place": _place,
    "sharding_constraint": _place,
}
"""Primitive → (builder, op) → results."""
