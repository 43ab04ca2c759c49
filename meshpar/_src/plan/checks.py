"""Errors of planning: unknown dims, joined names, sizes that do not divide, and ops that cannot be split as the layout asks."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax.numpy as jnp

from ...errors import DivisibilityError, JoinError, JoinWarning, MeshError, UnknownAxisError, UnknownDimError
from ..compat.jax import user_stacklevel
from ..dims import SPELLING_SIMILARITY, did_you_mean, format_dims, near
from ..iterables import grouped
from ..layout import SCHEMES, Layout, Rule, Spec, divisibility_error
from ..program.ir import Join, Op, Program, Value
from ..program.names_from_uses import inferred_names
from ..program.pipeline import masking_text
from .assignment import AxisAssignment
from .shard_shapes import shard_count

MIN_MISSPELLED = 3
"""Characters of the shortest name of which one changed character, or two exchanged ones, is a misspelling."""

ACTIVATION_DIMS = ("batch", "seq")
"""Dims of the known schemes that weights do not have."""

RELATED = {
    "mlp": ("rank", "channels", "embed"),
    "embed": ("channels", "mlp"),
    "heads": ("kv_heads", "head_dim"),
    "vocab": ("classes", "embed"),
    "seq": ("height",),
    "expert": ("mlp",),
    "channels": ("embed", "mlp"),
}
"""Dims of the known schemes → other inferred names of a dim that may be meant, the likeliest first."""

MAX_TEMPLATE_LINES = 16
"""Entries of a ``dims=`` that an error or a warning proposes."""

CONSTRAINTS = ("nn.with_logical_constraint", "with_sharding_constraint")
"""The origins of names that are constraints of a model."""

REPORTED_JOINS: set[frozenset[tuple[str, str]]] = set()
"""The joined names that this process has warned about: (name, its pattern or the end of its path) of both."""


def check_dims(program: Program, layout: Layout, init: bool) -> None:
    """Raise UnknownDimError if a rule names a dim that no value of the program has.

    Args:
      init: the program makes the state, so it need not have the dims of the batch.
    """
    names = program.all_names()
    shared = init or layout.from_pairs  # a Flax rule list serves many models; the plan lists the rules without effect
    for rule in layout.rules:
        if rule.dim in names:
            continue
        similar = [d for d in misspelled(rule.dim, names) if d not in layout.dims]
        if (shared or rule.optional or rule.dim in layout.optional) and not similar:
            continue
        raise UnknownDimError(
            f"rule `{rule}` names dim `{rule.dim}`, which no value of the program has",
            dim=rule.dim,
            rule=str(rule),
            fixes=_template(program)
            if not names
            else [
                *_unnamed_inputs(program, rule.dim),
                *(sequence_name(program, [rule.dim]) or did_you_mean(rule.dim, names, "dims")),
                *_inferred_names(program, rule.dim),
                *_misspelled_names(program, rule.dim),
                *_list_of_layers(program, rule.dim),
                "remove the rule, or name the dim (dims=…, Flax metadata, mp.named)",
                *([_rule_of_its_own(layout, similar[0])] if shared else []),
                *(
                    []
                    if near(rule.dim, names)
                    else [f"or, if other programs with this layout have this dim, make it optional: `{rule.dim}?: …`"]
                ),
            ],
        )


def _rule_of_its_own(layout: Layout, dim: str) -> str:
    """The fix for a rule that seems to be misspelled: a rule for the dim that it is similar to, as the user writes rules."""
    return f"give `{dim}` a rule of its own: {f'({dim!r}, None)' if layout.from_pairs else f'`{dim}: none`'}"


def check_spelling(layout: Layout, names: Collection[str]) -> None:
    """Raise UnknownDimError if a rule names a dim that is not among ``names``, and is spelled nearly as one that has no rule."""
    for rule in layout.rules:
        similar = [] if rule.dim in names else [d for d in misspelled(rule.dim, names) if d not in layout.dims]
        if similar:
            raise UnknownDimError(
                f"rule `{rule}` names dim `{rule.dim}`, which no array has",
                dim=rule.dim,
                rule=str(rule),
                fixes=[
                    *did_you_mean(rule.dim, names, "dims"),
                    "remove the rule",
                    _rule_of_its_own(layout, similar[0]),
                ],
            )


def _unnamed_inputs(program: Program, dim: str) -> list[str]:
    """The fix for an unknown dim if arguments or all weights have no names: a ``dims=`` for these."""
    if near(dim, program.all_names()):
        return []
    arrays = [v for v in program.inputs if v.shape and v.kind is None and not any(program.dims(v))]
    weights = [v for v in program.inputs if v.kind == "params" and len(v.shape) > 1]
    if not any(any(program.dims(v)) for v in weights):
        arrays += weights
    if not arrays:
        return []
    template = dims_template(program, arrays)
    if dim == "batch" and all(v.kind is None for v in arrays):
        template = [re.sub(r'": "_\b', '": "batch', line) for line in template]
    return ["these arguments have no names: name their dims", *template]


def _inferred_names(program: Program, dim: str) -> list[str]:
    """The fixes for an unknown dim if names are inferred, or could be: the names that there are, and the one probably meant."""
    sizes = {name: dict.fromkeys(size for size, _ in dims) for name, dims in inferred_names(program).items()}
    related = () if near(dim, program.all_names()) else RELATED.get(dim, ())
    meant = next((f"; `{name}` is probably meant" for name in related if name in sizes), "")
    shown = ", ".join(f"{name} ({', '.join(own)})" for name, own in sizes.items())
    fixes = [f"names are inferred from uses: {shown}{meant}; mp.infer_dims lists them to be changed"] if sizes else []
    if any(v.kind != "opt" and v.path not in program.inferred and None in program.dims(v) for v in program.inputs):
        fixes.append(
            'dims= or metadata turned inference off: dims={…, "*": "auto"} (--dims auto) infers the other names'
        )
    return fixes


def sequence_name(program: Program, missing: Collection[str]) -> list[str]:
    """The fix if ``seq`` is among the unknown dims, and the dim after the batch of integer inputs has another name."""
    values = [v for v in program.inputs if v.kind is None and jnp.issubdtype(v.aval.dtype, jnp.integer)]
    own = next((d[1] for d in map(program.dims, values) if d[:1] == ("batch",) and d[1:] and d[1]), "")
    fix = f'did you mean `{own}`? The known schemes say `seq`: rename it, for example names={{"{own}": "seq"}}'
    return [fix] if "seq" in missing and own.isidentifier() else []


def _misspelled_names(program: Program, dim: str) -> list[str]:
    """The fixes for an unknown dim that the known schemes have, if a similar name of an input is not one of theirs."""
    known = {rule.dim for scheme in SCHEMES for rule in Layout(scheme).rules}
    return [
        f"or, if `{name}` is misspelled, correct the names of {value.path}: {format_dims(program.dims(value))}"
        for name in near(dim, program.all_names())
        if dim in known and name not in known
        for value in [v for v in program.inputs if name in program.dims(v)][:1]
    ]


def _list_of_layers(program: Program, dim: str) -> list[str]:
    """The fix for an unknown dim that may number the layers of a list of weights, ``params/layers/0/up``."""
    paths = {v.path or "" for v in program.inputs if v.kind != "opt" and "batch" not in program.dims(v)}
    first = sorted(p for p in paths if re.search(r"/0/", p) and re.sub(r"/0/", "/1/", p, count=1) in paths)
    if not first or near(dim, program.all_names()):
        return []
    return [
        f"if `{dim}` numbers the layers of a list, as of {first[0]}: stages need one array of all layers, whose first dim it is. "
        "Stack layers of equal shapes, jax.tree.map(lambda *w: jnp.stack(w), *layers), and loop over them with jax.lax.scan; "
        "layers of different shapes cannot be stages"
    ]


def misspelled(name: str, candidates: Iterable[str]) -> list[str]:
    """The names that ``name`` is probably a misspelling of.

    They are similar (:data:`SPELLING_SIMILARITY`), or differ by one character that is missing, added or replaced, or by two
    exchanged neighbours: ``mpl`` for ``mlp``.
    """
    candidates = sorted(set(candidates))
    close = near(name, candidates, cutoff=SPELLING_SIMILARITY)
    return [
        *close,
        *(c for c in candidates if c not in close and len(name) >= MIN_MISSPELLED and _differ_by_one(name, c)),
    ]


def _differ_by_one(a: str, b: str) -> bool:
    """Whether one edit, or the exchange of two neighbours, changes one name into the other."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    if [c for c in a if c.isdigit()] != [c for c in b if c.isdigit()]:  # layer1 and layer2 are two names
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[:2][::-1] and a[2:] == b[2:])


def unnamed_weights(program: Program) -> list[str]:
    """The fix for a program whose batch alone has names: a ``dims=`` for its other matrices; empty if one of them has a name."""
    names = program.all_names()
    arrays = [v for v in program.inputs if len(v.shape) > 1 and "batch" not in program.dims(v) and v.kind != "opt"]
    return [] if any(names.intersection(program.dims(v)) for v in arrays) else dims_template(program, arrays)


def unnamed_results(program: Program, layout: Layout) -> list[str]:
    """The fix for an initializer whose matrices have no names of the layout: a ``dims=`` for them.

    Empty if one of them has a name that a rule shards, or the layout shards :data:`ACTIVATION_DIMS` only (or misspellings of them),
    so that weights are replicated.
    """
    sharded = {rule.dim for rule in layout.rules if rule.axes and not misspelled(rule.dim, ACTIVATION_DIMS)}
    arrays = [v for v in program.outputs if len(v.shape) > 1 and v.kind != "opt"]
    if not sharded or any(sharded.intersection(program.dims(v)) for v in arrays):
        return []
    return dims_template(program, arrays, any_root=True)


def _template(program: Program) -> list[str]:
    """The fixes for a program in which no dim has a name: a ``dims=`` to fill in for the batch and the weights."""
    arrays = [v for v in program.inputs if v.shape and (v.kind is None or (v.kind == "params" and len(v.shape) > 1))]
    arrays = arrays or [v for v in program.inputs if v.shape]
    return [
        "no tensor has names: fill in those of the weights and the batch",
        *dims_template(program, sorted(arrays, key=lambda v: v.kind is not None)),
    ]


def dims_template(program: Program, arrays: Sequence[Value], any_root: bool = False) -> list[str]:
    """A ``dims=`` for arrays, with the names that the program has for them and ``_`` for others; no lines without arrays.

    Arrays of equal shape and dims whose paths differ in indices only are one pattern: ``layers_*/up/kernel``.

    Args:
      any_root: patterns begin with ``*/``, in place of the name of an argument or the index of a result: they fit a step and its
        initializer.
    """
    roots = {(v.path or "").partition("/")[0] for v in program.inputs}
    groups = grouped((re.sub(r"(?<=[/_])\d+(?=/|$)", "*", value.path or ""), value) for value in arrays)
    entries = []
    for general, values in groups.items():
        alike = len({(v.shape, tuple(program.dims(v))) for v in values}) == 1
        for value in values[:1] if alike else values:
            pattern = general if alike and len(values) > 1 else value.path or ""
            root, _, below = pattern.partition("/")
            if any_root:
                pattern = f"*/{below if below and (root in roots or root.isdigit()) else pattern}"
            dims = " ".join(d if d and d.isidentifier() else "_" for d in program.dims(value))
            more = f" and {len(values) - 1} more" * (alike and len(values) > 1)
            entries.append(f'  "{pattern}": "{dims}",  # {list(value.shape)}{more}')
    rest = [f"  # … and {len(entries) - MAX_TEMPLATE_LINES} more"] * (len(entries) > MAX_TEMPLATE_LINES)
    return ["dims={", *entries[:MAX_TEMPLATE_LINES], *rest, "}"] if entries else []


def check_joins(program: Program, strict: bool, layout: Layout) -> None:
    """Warn of pairs of names that are one dim of the program; raise JoinError if ``strict``.

    A constraint of the model whose name has no rule, where the other name has one, replicates the dim: the warning has the edit.

    Each pair is reported once in a process, in whichever program of a model (initializer, train step, evaluation) it comes first.
    """
    if not program.joins:
        return
    if strict:
        j = program.joins[0]
        raise JoinError(
            f"`{j.first}` and `{j.second}` are the same dim of the program",
            dim=j.first,
            source=j.source,
            dims="; ".join(map(str, program.joins)),
            fixes=[
                *(f"swap the names of one array: {entry}" for entry in _swaps(j)),
                f'give both the same name, or make clear where they part: mp.rename(x, {j.first}="{j.second}")',
                "plan without strict=True",
            ],
        )
    new = {_join_key(j): j for j in program.joins}
    new = {key: j for key, j in new.items() if key not in REPORTED_JOINS}
    if new:
        warnings.warn(_join_text(list(new.values()), layout), JoinWarning, stacklevel=user_stacklevel())
        REPORTED_JOINS.update(new)  # not if the warning is an error


def _join_key(join: Join) -> frozenset[tuple[str, str]]:
    return frozenset(zip((join.first, join.second), join.keys, strict=True))


def _join_text(joins: Sequence[Join], layout: Layout) -> str:
    """The warning for pairs of names, in three lines: the pairs, the origins of the names of the first pair, and what to do."""
    misspelled = [j for j in joins if j.is_misspelled]
    replicating = {j: edit for j in joins if (edit := _edit_of_constraint(j, layout))}
    j = next(iter(misspelled or replicating or joins))
    more = ", ".join(f"{k.first} = {k.second}" for k in joins if k is not j)
    head = f"two names of one dim of the program: {j.first} = {j.second}" + (f" (and {more})" if more else "")
    head += ". Is one of them misspelled?" if misspelled else ""
    where = f" (joined at {j.source})" if j.source else ""
    (pattern, _, first), (other, _, second) = (x.partition(" names it ") for x in (j.first_origin, j.second_origin))
    same = pattern == other and second
    swaps = [] if misspelled or same else _swaps(j)
    swap = f"  are the names of one array swapped? {' or '.join(swaps)}\n" if swaps else ""
    origins = f"{pattern} names it {first} and {second}" if same else f"{j.first_origin}; {j.second_origin}"
    return (
        f"{head}\n  {origins}{where}\n{''.join(replicating.values())}{swap}"
        "  use one name for both (patterns of dims= replace names of Flax metadata), or "
        f'mp.rename(x, {j.first}="{j.second}") where they differ; '
        'to silence this: warnings.simplefilter("ignore", mp.errors.JoinWarning)'
    )


def _edit_of_constraint(join: Join, layout: Layout) -> str:
    """The line of a warning for a constraint whose name has no rule, of a dim whose other name has one; else empty."""
    for name, origin, other in (
        (join.first, join.first_origin, join.second),
        (join.second, join.second_origin, join.first),
    ):
        rules = [rule for rule in layout.rules if rule.dim == other and rule.axes]
        if rules and name not in layout.dims and origin.startswith(CONSTRAINTS):
            new = str(rules[0]).replace(other, f"{other}{'?' * rules[0].optional}, {name}", 1)
            return (
                f"  `{other}` has the rule `{rules[0]}` and `{name}` has none, so its constraint replicates the dim: "
                f'write `{new}`, or names={{"{name}": "{other}"}}\n'
            )
    return ""


def _swaps(join: Join) -> list[str]:
    """The entries of ``dims=`` that have both names of a join, with the two exchanged: ``"*/down": "mlp embed"``."""
    other, entries = {join.first: join.second, join.second: join.first}, []
    for origin in dict.fromkeys((join.first_origin, join.second_origin)):
        match = re.match(r'(".*": )"(.*)" names it ', origin)
        names = match[2].split() if match else []
        if match and {*other} <= {*names}:
            entries.append(f'{match[1]}"{" ".join(other.get(name, name) for name in names)}"')
    return entries


def check_divides(values: Sequence[Value], assignment: AxisAssignment) -> None:
    """Raise DivisibilityError if a rule does not divide a dim of an input or output that the user named.

    Optimizer state, which has the dims of its parameter, is reported last.
    """
    named = _refused(values, assignment)
    if named:
        raise division_error(*min(named, key=lambda r: r[0].kind == "opt"), assignment)


def _refused(values: Iterable[Value], assignment: AxisAssignment) -> list[tuple[Value, int, Rule]]:
    """(value, dim, rule) of the dims that the user named and a rule does not divide."""
    refused = ((v, i, rule) for v in values for i, rule in assignment.indivisible(v).items())
    return [(v, i, rule) for v, i, rule in refused if v.annotation is not None and v.annotation[i] is not None]


def division_error(value: Value, i: int, rule: Rule, assignment: AxisAssignment) -> DivisibilityError:
    """The error for a rule that does not divide dim ``i`` of an argument or result, with the constraint that names the dim."""
    program, unifier, size = assignment.program, assignment.program.unifier, value.shape[i]
    inside = program.cached(sizes_of_results).get(program.dim_name(value, i))
    origins = unifier.names_in(m for atom in unifier.atoms(value.nodes[i]) for m in unifier.weak_class(atom))
    inferred = value.path in program.traced.inferred
    return divisibility_error(
        path=value.path or "an input", shape=value.shape, dtype=value.aval.dtype,
        dims=format_dims(program.dims(value)) + " (inferred; dims= gives other names)" * inferred,
        dim=rule.dim, size=size, rule=rule, sizes=assignment.sizes,
        source=None if value.annotation or inferred else origins.get(rule.dim),
        optional=masking_text(program, rule, assignment.sizes) if i == 0 else None,
        inside=None if inside == size else inside,
        divides=lambda mesh: not _refused(program.inputs, AxisAssignment(program, assignment.layout, mesh)),
    )  # fmt: skip


def sizes_of_results(program: Program) -> dict[str | None, int]:
    """Name of a dim → its size in most results of ops, which for ``tokens[:, :-1]`` is not the size in the argument."""
    results = [v for op in program.root.walk() for v in op.outs]
    every = Counter(pair for v in results for pair in zip(program.dims(v), v.shape, strict=True))
    return {name: size for (name, size), _ in reversed(every.most_common())}


def check_blocks(op: Op, spec: Spec, assignment: AxisAssignment) -> None:
    """Raise DivisibilityError if a shard of an array whose blocks have common scales (``in_blocks``) ends within a block."""
    (value,), sizes, path = op.outs, assignment.sizes, op.eqn.params["path"]
    dims = format_dims(assignment.program.dims(value))
    for d, (block, axes, n) in enumerate(zip(op.eqn.params["blocks"], spec, value.shape, strict=True)):
        if (own := n // shard_count(axes, sizes)) % block:
            name, over = assignment.program.dim_name(value, d) or f"dim {d}", ", ".join(f"{a}={sizes[a]}" for a in axes)
            raise DivisibilityError(
                f"an operand or the gradient of a matmul of `{path}`: blocks of {block} elements of `{name}` have a common scale, "
                f"and {over} shards its {n} elements into {own}",
                path=path, shape=value.shape, dims=dims, dim=name, axis=axes[-1], rule=assignment.rule_text([name], axes[-1]),
                source=op.location, fixes=[
                    f"at most {n // block} devices along `{name}`, or a rule for another dim",
                    "a format of smaller blocks: of experts, mxfp8; of others, float8 has one scale for each array",
                ],
            )  # fmt: skip


def kernel_rule_text(op: Op, program: Program) -> str:
    """A factor rule for a kernel, as an example: ``"batch embed! -> batch embed!"``. The last dim of each array is not split, which
    most kernels need complete (norms, softmax, attention); a dim of a result is the dim of an operand that has its size."""
    named: list[tuple[str, int]] = []

    def dims(value: Value | None, result: bool) -> str:
        """The names of a value's dims, the last one with ``!``; of an operand, they are added to ``named``."""
        if value is None or not value.shape:
            return ""
        names: list[str] = []
        for i, size in enumerate(value.shape):
            known = [program.dim_name(value, i) or "", *(name for name, n in named if result and n == size), f"d{i}"]
            names.append(next(name for name in known if name.isidentifier() and name not in names))
        named.extend([] if result else zip(names, value.shape, strict=True))
        return " ".join(names) + "!"

    return " -> ".join(", ".join(dims(v, side is op.outs) for v in side) for side in (op.ins, op.outs))


def check_manual_axes(op: Op, sizes: Mapping[str, int]) -> None:
    """Raise UnknownAxisError or MeshError if a ``shard_map`` of the program runs over axes that the mesh does not have."""
    mesh = op.eqn.params["mesh"]
    for axis in (a for a in mesh.axis_names if a in op.eqn.params["newly_manual_axes"]):
        if axis not in sizes:
            raise UnknownAxisError(
                f"this shard_map runs over axis `{axis}`, which the mesh does not have",
                axis=axis,
                source=op.location,
                fixes=[*did_you_mean(axis, sizes, "axes"), f"plan on a mesh with `{axis}={mesh.shape[axis]}`"],
            )
        if mesh.shape[axis] != sizes[axis]:
            raise MeshError(
                f"this shard_map runs over `{axis}={mesh.shape[axis]}`, and the mesh has `{axis}={sizes[axis]}`",
                axis=axis,
                source=op.location,
                fixes=["make both from one mesh"],
            )
    if [a for a in mesh.axis_names if a in sizes] != [a for a in sizes if a in mesh.axis_names]:
        raise MeshError(
            f"this shard_map has the axes in the order {', '.join(mesh.axis_names)}, and the mesh {', '.join(sizes)}: "
            "they would number the devices differently",
            source=op.location,
            fixes=["make both from one mesh"],
        )
