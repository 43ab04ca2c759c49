"""From a jaxpr and the names of its inputs to a program: every value of every call site, every dim named.

One pass over the equations builds values and ops and joins what is surely one (elementwise, reshapes, loop carries). A
second pass ties what ops relate, broadcasts last. Then come renames, which must know the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from jax.extend.core import Literal

from ..compat.jax import body_of, closed_parts, constraint_spec, new_var, scan_counts
from ..dims import Dims, did_you_mean
from ..errors import UnknownDimError
from ..rules import ELEMENTWISE, OpRule, having, no_rule, primitive, separated
from ..rules.rule import NameLink
from ..rules.shape import reshape_order
from .ir import Frame, Join, Op, Program, Value
from .names import NONE, Nodes, Piece, Unifier
from .primitives import name_dims_p, place_p


def infer(
    closed: Any,
    annotations: Sequence[Dims | None],
    paths: Sequence[str],
    out_annotations: Sequence[Dims | None],
    out_paths: Sequence[str],
) -> Program:
    """Build the program of a closed jaxpr and name its dims.

    Args:
      closed: ClosedJaxpr.
      annotations: the names of every flat input, or None.
      paths: the tree path of every flat input, for reports.
      out_annotations, out_paths: likewise of the results.

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
    for var, dims, path in zip(jaxpr.outvars, out_annotations, out_paths, strict=True):
        value = builder.read(root, var) or builder.value(var.aval)
        if value.path is None:
            value.path = path
            builder.annotate(value, dims, path)
        outputs.append(value)
    builder.finish()
    program = Program(closed, root, inputs, outputs, builder.unifier)
    for a, b, origin_a, origin_b, op in builder.unifier.joins():
        program.joins.append(Join(a, b, origin_a, origin_b, op.source if isinstance(op, Op) else None))
    return program


def again(program: Program, closed: Any) -> Program:
    """The program of another jaxpr with the same inputs and results."""
    ins, outs = program.inputs, program.outputs
    found = infer(
        closed, [v.annotation for v in ins], [v.path or "" for v in ins],
        [v.annotation for v in outs], [v.path or "" for v in outs],
    )  # fmt: skip
    for new, old in zip((*found.inputs, *found.outputs), (*ins, *outs), strict=True):
        new.kind = new.kind or old.kind
    return found


class Builder:
    """Makes the values and ops of a program, and ties their dims."""

    def __init__(self) -> None:
        self.unifier = Unifier()
        self.ties: list[Op] = []
        self.stretched: list[Op] = []
        self.renames: list[Op] = []
        self.pieces: dict[tuple[int, int], Piece] = {}

    # -- values

    def value(self, aval: Any, nodes: Nodes | None = None, op: Op | None = None) -> Value:
        return Value(aval, self.unifier.fresh(aval.shape) if nodes is None else nodes, None, op)

    def annotate(self, value: Value, dims: Dims | None, origin: str) -> None:
        if dims is None or not any(dims):
            return
        value.annotation = dims
        for node, name in zip(value.nodes, dims, strict=True):
            if name is not None:
                self.unifier.annotate(node, name, f"{origin} names it `{name}`")

    def read(self, frame: Frame, var: Any) -> Value | None:
        return None if isinstance(var, Literal) else frame.env[var]

    def alias(self, a: Value | None, b: Value | None, where: Op) -> None:
        """The same data in two places: join dim by dim."""
        if a is None or b is None or a.nodes is b.nodes:
            return
        for x, y in zip(a.nodes, b.nodes, strict=True):
            if x != y:
                self.unifier.unify(x, y, where)

    # -- equations

    def run(self, frame: Frame, args: Sequence[Value | None]) -> None:
        env = frame.env
        for var, value in zip(frame.jaxpr.invars, args, strict=True):
            env[var] = value if value is not None else self.value(var.aval)
        for eqn in chain.from_iterable(map(separated, frame.jaxpr.eqns)):
            ins = [None if isinstance(v, Literal) else env[v] for v in eqn.invars]
            op = Op(eqn, frame, ins)
            name = eqn.primitive.name
            if name in ELEMENTWISE:
                outs = self.elementwise(op)
            elif name in CONTROL:
                outs = CONTROL[name](self, op)
            else:
                outs = self.by_rule(op)
            op.outs = outs
            env.update(zip(eqn.outvars, outs, strict=True))
            frame.ops.append(op)

    def elementwise(self, op: Op) -> list[Value]:
        outs = []
        multi = op.primitive.barrier
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
                elif nodes is not value.nodes:
                    for x, y in zip(nodes, value.nodes, strict=True):
                        if x != y:
                            self.unifier.unify(x, y, op)
            outs.append(self.value(var.aval, nodes, op))
        return outs

    def by_rule(self, op: Op) -> list[Value]:
        eqn = op.eqn
        in_shapes = [v.aval.shape for v in eqn.invars]
        out_shapes = [v.aval.shape for v in eqn.outvars]
        fn = primitive(eqn.primitive.name).rule
        op.rule = no_rule(in_shapes, out_shapes) if fn is None else fn(eqn, in_shapes, out_shapes)
        outs = [self.value(v.aval, op=op) for v in eqn.outvars]
        if op.rule.given is not None:
            _name_through_body(op, outs)
        if op.rule.strong:
            self.join_strong(op, outs)
        if op.rule.known:
            self.ties.append(op)
        return outs

    def join_strong(self, op: Op, outs: list[Value]) -> None:
        rule = op.rule
        assert rule is not None
        if op.primitive.reshape:
            if op.ins[0] is not None:
                nodes = tuple(op.ins[0].nodes[d] for d in reshape_order(op.eqn))
                self.reshape(nodes, outs[0].nodes, rule)
            return
        where: dict[int, int] = {}
        for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(outs, rule.outs, strict=True)]:
            if value is None:
                continue
            for node, (factor,) in zip(value.nodes, dims, strict=True) if dims else ():
                if node == NONE:
                    continue
                if factor in where:
                    self.unifier.unify(where[factor], node, op)
                else:
                    where[factor] = node

    def reshape(self, a: Nodes, b: Nodes, rule: OpRule) -> None:
        """Join run by run: dims between two common boundaries are one sequence of parts."""
        i = j = 0
        left: list[int] = []
        right: list[int] = []
        pa = pb = 1
        u = self.unifier
        while i < len(a) or j < len(b):
            if pa <= pb and i < len(a):
                if a[i] != NONE:
                    left.append(a[i])
                    pa *= u.size[a[i]]
                i += 1
            elif j < len(b):
                if b[j] != NONE:
                    right.append(b[j])
                    pb *= u.size[b[j]]
                j += 1
            else:
                if a[i] != NONE:
                    left.append(a[i])
                    pa *= u.size[a[i]]
                i += 1
            if pa == pb and left and right:
                u.unify_sequences(left, right)
                left, right = [], []

    # -- weak joins and renames, after the pass

    def finish(self) -> None:
        """Tie factors in program order; broadcasts come last: a mask must not decide which dim of the scores is the query's."""
        u = self.unifier
        self.find_pieces()
        for op in self.ties:
            if not op.primitive.broadcast:
                self.tie(op)
        for op in self.ties:
            if op.primitive.broadcast:
                self.tie(op)
        for op in self.stretched:
            (out,) = op.outs
            for value in op.ins:
                if value is not None and len(value.nodes) == len(out.nodes) and value.aval.shape != out.aval.shape:
                    for x, y in zip(value.nodes, out.nodes, strict=True):
                        u.tie([y, x], op)
        self.tie_indexed()
        pieces = list(self.pieces.values())
        for op in self.renames:
            u.name_pieces(pieces)
            self.resolve_rename(op)
        u.name_pieces(pieces)
        u.freeze()

    def find_pieces(self) -> None:
        """Which parts of arrays may be other dims than the array's, in program order: a fused projection is cut into several.

        Not those that cover half of it and overlap all the others (``x[:, :-1]`` and ``x[:, 1:]``).
        """
        u = self.unifier
        links: dict[int, list[tuple[int, int, range, Op]]] = {}
        for op in self.ties:
            rule = op.rule
            assert rule is not None
            if any(link.elements for link in rule.name_links):
                nodes: dict[int, int] = {}
                for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(op.outs, rule.outs, strict=True)]:
                    for node, factors in zip(value.nodes, dims, strict=True) if value is not None and dims else ():
                        if len(factors) == 1 and node != NONE:
                            nodes.setdefault(factors[0], node)
                for whole, part, lies in rule.name_links:
                    if lies and whole in nodes and part in nodes:
                        links.setdefault(u.find(nodes[whole]), []).append((nodes[whole], nodes[part], lies, op))
        for root, found in links.items():
            first, past = max(lies.start for *_, lies, _ in found), min(lies.stop for *_, lies, _ in found)
            for whole, part, lies, op in found:
                if lies.start >= past or lies.stop <= first or 2 * len(lies) < u.size[root]:
                    self.pieces[whole, part] = Piece(whole, part, op.primitive.static_slice, lies, op)

    def tie_indexed(self) -> None:
        """What the same indices point into is one dim: an embedding's gradient has the embedding's ``vocab``.

        Only dims without a name take one, and only where there is no doubt about it.
        """
        u = self.unifier
        groups: dict[tuple[Nodes, int], list[tuple[int, Op]]] = {}
        for op in self.ties:
            if op.primitive.gather:
                into = op.eqn.params["dimension_numbers"].start_index_map
            elif op.primitive.scatter:
                into = op.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
            else:
                continue
            operand, indices = op.ins[:2]
            if len(into) != 1 or operand is None or operand.nodes[into[0]] == NONE:
                continue
            node = operand.nodes[into[0]]
            while indices is not None:
                if any(n != NONE for n in indices.nodes):
                    groups.setdefault((indices.nodes, u.size[node]), []).append((node, op))
                made = indices.op
                if made is None or not (made.primitive.broadcast or made.primitive.reshape):
                    break
                indices = made.ins[0]
        for found in groups.values():
            named = [node for node, _ in found if u.names_now(node)]
            if len({frozenset(u.names_now(node)) for node in named}) == 1:
                for node, op in found:
                    if not u.names_now(node):
                        u.tie([named[0], node], op)

    def tie(self, op: Op) -> None:
        """Tie the dims that share a factor of an op; pass names along its links."""
        rule = op.rule
        assert rule is not None
        groups: list[list[int]] = [[] for _ in rule.sizes]
        composites: dict[tuple[int, ...], list[int]] = {}
        for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(op.outs, rule.outs, strict=True)]:
            if value is None:
                continue
            for node, factors in zip(value.nodes, dims, strict=True) if dims else ():
                if node == NONE:
                    continue
                if len(factors) == 1:
                    groups[factors[0]].append(node)
                elif factors and not rule.strong:
                    self.composite(node, factors, groups, rule)
                    composites.setdefault(factors, []).append(node)
        if not rule.strong:
            for group in (*groups, *composites.values()):
                self.unifier.tie(group, op)
        for x, y, _ in rule.name_links:
            if groups[x] and groups[y] and (pair := (groups[x][0], groups[y][0])) not in self.pieces:
                self.unifier.link_names(*pair, op)

    def composite(self, node: int, factors: tuple[int, ...], groups: list[list[int]], rule: OpRule) -> None:
        """A dim that an op sees as several factors (grouped convolutions): split it, and tie its parts."""
        u = self.unifier
        factors = tuple(f for f in factors if rule.sizes[f] != 1)
        parts = [node] if len(factors) == 1 else [u.node(rule.sizes[f]) for f in factors]
        if len(factors) == 1 or u.unify_sequences([node], parts):
            for f, p in zip(factors, parts, strict=True):
                groups[f].append(p)

    def resolve_rename(self, op: Op) -> None:
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
                source=op.source,
                fixes=did_you_mean(missing[0], set().union(*names), "its dims"),
            )
        # the cotangent of a rename may come from nothing that has names (a sum): then the dim without a name is the one
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


# -- loops, branches and calls, and ops that say names


def _call(own: bool = False):
    """A body that runs once, on the operands as they are; ``own``: with a derivative of its own, even where it does nothing."""

    def handler(b: Builder, op: Op) -> list[Value]:
        jaxpr, _ = closed_parts(body_of(op.eqn))
        if own:
            jaxpr = _with_own_results(jaxpr, op)
        frame = Frame(jaxpr, op)
        op.frames = [frame]
        _bind_consts(b, frame)
        n = len(jaxpr.invars)
        b.run(frame, op.ins[len(op.ins) - n :])
        return [_result(b, frame, v, op) for v in jaxpr.outvars]

    return handler


def _with_own_results(jaxpr: Any, op: Op) -> Any:
    """A body none of whose results is an operand."""
    eqns, outvars, ins = list(jaxpr.eqns), list(jaxpr.outvars), set(jaxpr.invars)
    for k, var in enumerate(outvars):
        if not isinstance(var, Literal) and var in ins:
            outvars[k] = new_var(var.aval)
            same = {
                "primitive": name_dims_p,
                "params": {"names": (None,) * len(var.aval.shape)},
                "effects": frozenset(),
            }
            eqns.append(op.eqn.replace(**same, invars=[var], outvars=[outvars[k]]))
    return jaxpr.replace(eqns=eqns, outvars=outvars) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _result(b: Builder, frame: Frame, var: Any, op: Op) -> Value:
    value = b.read(frame, var)
    return b.value(var.aval, op=op) if value is None else value


def _bind_consts(b: Builder, frame: Frame) -> None:
    for var in frame.jaxpr.constvars:
        frame.env[var] = b.value(var.aval)


def _inside(value: Value | None, b: Builder, aval: Any, drop: int = 0) -> Value:
    """The value as a loop body sees it: the same dims, less the first ``drop``."""
    if value is None:
        return b.value(aval)
    inner = Value(aval, b.unifier.register(value.nodes[drop:]) if drop else value.nodes)
    if value.annotation is not None:
        inner.annotation = value.annotation[drop:]
    inner.kind = value.kind
    return inner


def _scan(b: Builder, op: Op) -> list[Value]:
    p = op.eqn.params
    jaxpr, _ = closed_parts(p["jaxpr"])
    nc, nk = scan_counts(p)
    frame = Frame(jaxpr, op, trip_count=p["length"])
    op.frames = [frame]
    _bind_consts(b, frame)
    avals = [v.aval for v in jaxpr.invars]
    consts = [_inside(v, b, a) for v, a in zip(op.ins[:nc], avals[:nc], strict=True)]
    carry = [_carry(v, b, a) for v, a in zip(op.ins[nc : nc + nk], avals[nc : nc + nk], strict=True)]
    xs = [_inside(v, b, a, 1) for v, a in zip(op.ins[nc + nk :], avals[nc + nk :], strict=True)]
    b.run(frame, [*consts, *carry, *xs])
    results = [b.read(frame, v) for v in jaxpr.outvars]
    for before, after in zip(carry, results[:nk], strict=True):
        b.alias(before, after, op)
    outs = [b.value(v.aval, c.nodes, op) for v, c in zip(op.eqn.outvars[:nk], carry, strict=True)]
    layers = next((v.nodes[0] for v in op.ins[nc + nk :] if v is not None), None)
    if layers is None:
        layers = NONE if p["length"] == 1 else b.unifier.node(p["length"])
    for v in op.ins[nc + nk :]:
        if v is not None:
            b.unifier.unify(layers, v.nodes[0], op)
    b.unifier.looped.add(layers)
    for var, y in zip(op.eqn.outvars[nk:], results[nk:], strict=True):
        inner = y.nodes if y is not None else b.unifier.fresh(var.aval.shape[1:])
        outs.append(b.value(var.aval, b.unifier.register((layers, *inner)), op))
    return outs


def _carry(value: Value | None, b: Builder, aval: Any) -> Value:
    return b.value(aval) if value is None else Value(aval, value.nodes)


def _while(b: Builder, op: Op) -> list[Value]:
    p = op.eqn.params
    cond, _ = closed_parts(p["cond_jaxpr"])
    body, _ = closed_parts(p["body_jaxpr"])
    ncc, nbc = p["cond_nconsts"], p["body_nconsts"]
    frames = [Frame(cond, op, trip_count=None), Frame(body, op, trip_count=None)]
    op.frames = frames
    init = op.ins[ncc + nbc :]
    carry = [_carry(v, b, a.aval) for v, a in zip(init, body.invars[nbc:], strict=True)]
    for frame, consts in ((frames[0], op.ins[:ncc]), (frames[1], op.ins[ncc : ncc + nbc])):
        _bind_consts(b, frame)
        inner = [_inside(v, b, a.aval) for v, a in zip(consts, frame.jaxpr.invars, strict=False)]
        b.run(frame, [*inner, *carry])
    for before, var in zip(carry, body.outvars, strict=True):
        b.alias(before, b.read(frames[1], var), op)
    return [b.value(v.aval, c.nodes, op) for v, c in zip(op.eqn.outvars, carry, strict=True)]


def _cond(b: Builder, op: Op) -> list[Value]:
    outs: list[Value] | None = None
    for branch in op.eqn.params["branches"]:
        jaxpr, _ = closed_parts(branch)
        frame = Frame(jaxpr, op)
        op.frames.append(frame)
        _bind_consts(b, frame)
        b.run(frame, [_inside(v, b, a.aval) for v, a in zip(op.ins[1:], jaxpr.invars, strict=True)])
        results = [b.read(frame, v) for v in jaxpr.outvars]
        if outs is None:
            outs = [
                b.value(v.aval, None if r is None else r.nodes, op)
                for v, r in zip(op.eqn.outvars, results, strict=True)
            ]
        for out, result in zip(outs, results, strict=True):
            b.alias(out, result, op)
    assert outs is not None
    return outs


def _named(b: Builder, op: Op) -> list[Value]:
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    b.annotate(out, op.eqn.params["names"], f"mp.named at {op.source}")
    return [out]


def _rename(b: Builder, op: Op) -> list[Value]:
    b.renames.append(op)
    return [b.value(op.eqn.outvars[0].aval, op=op)]


def _place(b: Builder, op: Op) -> list[Value]:
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    if op.eqn.primitive is place_p:
        out.explicit = op.eqn.params["spec"]
    else:
        out.explicit = constraint_spec(op.eqn)
    return [out]


def _name_through_body(op: Op, outs: list[Value]) -> None:
    """A ``shard_map`` of the user's own: results rest as its specs say; their dims are those that its body makes them of."""
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
    for k, var in enumerate(jaxpr.outvars):
        value = body.read(frame, var)
        for d, node in enumerate(() if value is None else value.nodes):
            parts = body.unifier.parts_of(node) if node != NONE else ()
            found = next((factor_of[n] for n in parts[0][0] if n in factor_of), None) if len(parts) == 1 else None
            if found is None:
                continue
            (mine,) = rule.outs[k][d]
            if rule.sizes[mine] != rule.sizes[found]:
                continue  # the shards of all devices side by side: what is kept for a backward pass
            if rule.given[mine] == rule.given[found] and (found,) not in rule.outs[k]:
                rule.outs[k] = (*rule.outs[k][:d], (found,), *rule.outs[k][d + 1 :])
            else:
                rule.name_links.append(NameLink(found, mine))


CONTROL: dict[str, Callable[[Builder, Op], list[Value]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "name_dims": _named,
    "rename_dims": _rename,
    "place": _place,
    "sharding_constraint": _place,
    **dict.fromkeys(having(lambda p: p.call), _call()),
    **dict.fromkeys(having(lambda p: p.own_derivative), _call(own=True)),
}
"""By primitive: (builder, op) → results."""
