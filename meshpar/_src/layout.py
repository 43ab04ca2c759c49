"""A layout: ordered rules ``dim: axis``, and who gets an axis (the claims)."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..errors import AxisConflictError, DivisibilityError, LayoutSyntaxError, UnknownAxisError, UnknownDimError
from .dims import NAME, DimsLike, did_you_mean, fit_dims, format_dims, near, parse_dims, path_matches
from .iterables import grouped
from .units import mesh_text

AnyMesh = Mesh | AbstractMesh

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of every dimension of a value, major to minor."""

_LEFT = re.compile(
    r"""(?:(?P<scope>[A-Za-z_]\w*|"[^"]+")\.)?   # opt.  params.  "*/embedding".
        (?P<dim>[A-Za-z_][\w\-]*)(?P<optional>\?)?\Z""",
    re.VERBOSE,
)
_PAIRS = re.compile(r"""[^",:]+:[^",:]+(,[^",:]+:[^",:]+)+\Z""")
"""Rules of one dim each that commas separate, as in Mesh-TensorFlow: ``batch:rows,hidden:cols``."""
UNSHARDED = "(nothing sharded)"
"""The text of an empty layout in reports."""
SCOPES = ("params", "opt")
BETWEEN_SLICES = "slice"
"""The usual name of the axis between slices of TPUs, or nodes of GPUs."""

EXPERTS = ("expert", "experts", "exp")
"""Names of the dim of experts: the one of this library and of inferred names, another usual one, the one of MaxText."""
_EXPERTS = ", ".join(f"{name}?" for name in EXPERTS)
_TENSOR = "batch: {data}; heads?, kv_heads?, mlp?, vocab?: {model}"
_FSDP_TENSOR = _TENSOR + "; embed?: {data}"
SCHEMES = {
    "data_parallel": "batch: {data}",
    "zero1": "batch: {data}; opt.embed?: {data}",
    "fsdp": "batch, embed?: {data}",
    "hsdp": "batch: {slice}+{data}; embed?: {data}",
    "tensor_parallel": _TENSOR,
    "megatron": _TENSOR,
    "fsdp_tensor": _FSDP_TENSOR,
    "fsdp_megatron": _FSDP_TENSOR,
    "sequence_parallel": _FSDP_TENSOR + "; seq?: {model}",
    "context_parallel": "batch: {data}; seq?: {context}",
    "expert_parallel": _EXPERTS + ": {expert}; batch: {data}+{expert}; embed?: {data}",
    "expert_megatron": _EXPERTS
    + ", batch: {data}; heads?, kv_heads?, mlp?, vocab?, seq?: {model}; embed?: {data}+{model}",
    "expert_tensor": _EXPERTS + ": {expert}; mlp?, expert_mlp?: {model}; batch: {data}+{model}; "
    "heads?, kv_heads?, vocab?: {expert}; embed?: {data}+{expert}+{model}",
}
"""Name of a scheme → its layout, a format string with one field for each mesh axis. See :mod:`meshpar.layouts`."""
OTHER_NAMES = {
    "zero2": "zero1",
    "zero3": "fsdp",
    "ddp": "data_parallel",
    "dp": "data_parallel",
    "tp": "tensor_parallel",
    "sp": "sequence_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
}
"""Name of a scheme in other libraries → its name here, for suggestions."""
OTHER_AXES = {
    **dict.fromkeys(("dp", "fsdp", "dp_shard"), "data"),
    **{"tp": "model", "cp": "context", "ep": "expert", "dp_replicate": BETWEEN_SLICES},
}
"""Name of a mesh axis in other libraries → its name in the known schemes."""
PIPELINE = "pipeline"
"""Name of the scheme that is combined with the others: ``"fsdp+pipeline"``."""
USUAL_AXES = {"data", "model", BETWEEN_SLICES, "context", "seq", "expert", "stage", "pipe", "tensor", *OTHER_AXES}
"""Names of mesh axes that are no misspellings of each other."""
_DEFAULT_AXES = {axis: axis for axis in ("data", "model", BETWEEN_SLICES, "context", "expert")}


@dataclass(frozen=True)
class Rule:
    """``dim: axes``, perhaps only in a scope, perhaps only where it divides.

    Attributes:
      dim: the name of the dim.
      axes: mesh axes, major to minor; empty: the dim is replicated, whatever later rules say.
      optional: ``dim?``: a size that does not divide is left unsharded, and a program need not have the dim.
      scope: None, ``params``, ``opt`` or a path pattern.
      rounds: ``layers: stage*2``: a pipeline over the axes in which each microbatch passes all stages twice.
    """

    dim: str
    axes: tuple[str, ...]
    optional: bool = False
    scope: str | None = None
    rounds: int = 1

    def __str__(self) -> str:
        """The rule as in the text of a layout: ``opt.embed?: data+model``, ``seq: none``, ``layers: stage*2``."""
        scope = self.scope
        if scope is not None:
            scope = scope if scope in SCOPES else f'"{scope}"'
        left = f"{scope}.{self.dim}" if scope else self.dim
        rounds = f"*{self.rounds}" if self.rounds > 1 else ""
        return f"{left}{'?' * self.optional}: {'+'.join(self.axes) or 'none'}{rounds}"


class Layout:
    """Ordered rules that say over which mesh axis each dim is split.

    An axis goes to the first rule, in this order, whose dim is present: among the dims of a value,
    among the factors of an op. A dim with several rules takes the first that can claim.

    Args:
      rules: text (``"batch: data; heads, mlp: model"``; ``;`` or line ends separate, or commas if every rule has one dim,
        ``"batch:data,mlp:model"``; ``#`` comments,
        ``batch: slice+data`` takes two axes, ``kv_heads?: model`` only where it divides,
        ``opt.embed: data`` for optimizer state only, ``"*/embedding".vocab: model`` for the paths that a
        pattern matches, ``seq: none`` for no axis, ``layers: stage*2`` for a pipeline of two
        rounds), a Flax ``logical_axis_rules`` list of pairs, a mapping
        with the same left sides, another layout, or the name of a scheme of :mod:`meshpar.layouts`, ``"fsdp"``. A list or
        mapping may have rules for dims that a program does not
        have, unless one is spelt nearly as a dim that is there.
      resolve: ``"order"``: the order of the rules decides; ``"cost"``: where several dims of an op have rules for one axis, the
        op picks the dim with which it moves the fewest bytes. The default is ``"order"``, and ``"cost"`` for a list of pairs:
        Flax reads its order for arrays only, and leaves ops to XLA.
      optional: dims that a function need not have, ``"batch seq"``, or True: any of them. So one layout serves several
        functions: a train step, and an update without a batch. A rule whose missing dim is spelled almost like
        an existing one is still an error.
      scheme: the name of the scheme of :mod:`meshpar.layouts` that this layout is, with which warnings call it; empty: it is not
        one. Default: the name that ``rules`` is, or the scheme of the layout that it is. Layouts with equal rules are equal,
        whatever their schemes.

    Raises:
      LayoutSyntaxError: text that is no layout.
      AxisConflictError: an axis twice in one rule.
      UnknownDimError: ``optional`` names a dim that no rule has.

    Example:
      >>> layout = mp.Layout("batch: data; mlp: model; embed: data")
      >>> tuple(layout.spec("batch embed")), tuple(layout.spec("embed mlp"))
      (('data',), ('data', 'model'))
      >>> print(layout | "vocab: model")
      batch: data; mlp: model; embed: data; vocab: model
    """

    rules: tuple[Rule, ...]
    resolve: Literal["order", "cost"]
    from_pairs: bool
    optional: frozenset[str]
    scheme: str

    def __init__(
        self,
        rules: str | Layout | Mapping[str, object] | Iterable[object] = "",
        *,
        resolve: Literal["order", "cost"] | None = None,
        optional: bool | str | Iterable[str] = (),
        scheme: str | None = None,
    ):
        """Parse the rules; the arguments and errors are described in the docstring of the class."""
        self.resolve, self.from_pairs, self.optional, self.scheme = "order", False, frozenset(), ""
        if isinstance(rules, Layout):
            vars(self).update(vars(rules))
        elif isinstance(rules, str):
            self.rules = tuple(_parse(rules))
            if scheme_text(rules) is not None:
                self.scheme = scheme_name(rules)
        elif isinstance(rules, Iterable):
            pairs = rules.items() if isinstance(rules, Mapping) else rules
            self.rules, self.from_pairs, self.resolve = tuple(map(_rule_of_pair, pairs)), True, "cost"
        else:
            text = f"Layout({rules!r}) is neither text nor a list of rules"
            raise LayoutSyntaxError(text, fixes=['mp.Layout("batch: data; mlp: model")'])
        self.scheme = self.scheme if scheme is None else scheme
        self.resolve = resolve or self.resolve
        if self.resolve not in ("order", "cost"):
            raise LayoutSyntaxError(
                f"resolve={resolve!r}: it is 'order' or 'cost'",
                fixes=['leave it out: "order" for text, "cost" for lists and mappings'],
            )
        for rule in self.rules:
            twice = next((axis for axis in rule.axes if rule.axes.count(axis) > 1), None)
            if twice is not None:
                fix = f"name each axis once: `{rule.dim}: {'+'.join(dict.fromkeys(rule.axes))}`"
                headline = f"rule `{rule}` asks for axis `{twice}` twice"
                raise AxisConflictError(headline, dim=rule.dim, axis=twice, rule=str(rule), fixes=[fix])
        named = {r.dim for r in self.rules}
        if isinstance(optional, bool):
            absent = named if optional else set()
        else:
            absent = set(optional.split() if isinstance(optional, str) else optional)
        for dim in sorted(absent - named):
            raise UnknownDimError(
                f"optional={optional!r}: the layout has no rule for `{dim}`",
                dim=dim,
                fixes=did_you_mean(dim, named, "dims"),
            )
        self.optional |= absent
        self._set(self.rules)

    def _set(self, rules: tuple[Rule, ...]) -> None:
        """Set the rules, the index from dims to rules, and the key by which layouts are compared and hashed."""
        self.rules = rules
        self._by_dim = grouped((rule.dim, i) for i, rule in enumerate(rules))
        self._key = (rules, self.resolve, self.from_pairs, self.optional)

    def __str__(self) -> str:
        """The rules as text, from which ``Layout(text)`` makes the same rules; consecutive rules with the same axes are
        joined."""
        sides = (str(rule).rsplit(": ", 1) for rule in self.rules)
        groups = itertools.groupby(sides, key=lambda pair: pair[1])
        return "; ".join(f"{', '.join(left for left, _ in pairs)}: {right}" for right, pairs in groups)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __or__(self, other: Layout | str | Mapping[str, object] | Sequence[object]) -> Layout:
        """This layout with rules replaced and added from another one.

        A rule is replaced by the right operand's rules for the same dim in the same scope, which take its position. The right
        operand's other rules follow at the end, so that the rules of this layout take precedence where both want one axis:
        given ``"batch: data; mlp: model" | "mlp: none; heads: model"``, returns ``"batch: data; mlp: none; heads: model"``.
        ``resolve`` is taken from the left operand; a dim that either operand has as optional is optional.

        Raises:
          LayoutSyntaxError, AxisConflictError: an operand that is no layout.
        """
        if not isinstance(other, Layout | str | Mapping | list | tuple):
            return NotImplemented
        right = Layout(other)
        replacing = grouped(((rule.dim, rule.scope), rule) for rule in right.rules)
        replaced = replacing.keys() & {(r.dim, r.scope) for r in self.rules}
        rules: list[Rule] = []
        for rule in self.rules:
            key = (rule.dim, rule.scope)
            rules += replacing.pop(key, []) if key in replaced else [rule]
        rules += [r for r in right.rules if (r.dim, r.scope) not in replaced]
        pairs, optional = self.from_pairs or right.from_pairs, self.optional | right.optional
        return self._with(rules, scheme="", from_pairs=pairs, optional=optional)

    def __ror__(self, other: Layout | str | Mapping[str, object] | Sequence[object]) -> Layout:
        """The left operand (text, a mapping or a list) with rules replaced and added from this layout; see :meth:`__or__`."""
        if not isinstance(other, Layout | str | Mapping | list | tuple):
            return NotImplemented
        return Layout(other) | self

    def _with(self, rules: Sequence[Rule], **changes: object) -> Layout:
        """A copy with other rules, and other values of attributes."""
        out = copy.copy(self)
        vars(out).update(changes)
        out._set(tuple(rules))
        return out

    @property
    def by_cost(self) -> str:
        """In reports, after the rules: `` (by cost)`` if ops resolve them by cost; empty if their order decides."""
        return " (by cost)" if self.resolve == "cost" else ""

    def with_first(self, rules: Sequence[Rule]) -> Layout:
        """This layout with some rules before its own."""
        return self._with([*rules, *self.rules])

    def with_axis_names(self, names: Iterable[str], mesh: AnyMesh) -> Layout:
        """This layout with rules ``a: a`` after its own, for the names that are axes of the mesh and have no rule.

        Args:
          names: of dims in Flax metadata, where people may write axes of a mesh. Names of ``dims=`` are never axes.
        """
        axes = sorted(set(names).intersection(mesh.shape).difference(self.dims))
        return self._with([*self.rules, *(Rule(a, (a,)) for a in axes)]) if axes else self

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims that the rules name, in order."""
        return tuple(self._by_dim)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rules name, in order."""
        return tuple(dict.fromkeys(axis for rule in self.rules for axis in rule.axes))

    @property
    def unscoped(self) -> dict[str, Rule]:
        """For each dim, its first rule without a scope."""
        return {rule.dim: rule for rule in reversed(self.rules) if rule.scope is None}

    def rules_of(self, names: Iterable[str], scopes: Iterable[str] = ()) -> list[int]:
        """Indices of the rules for any of these names that hold in these scopes, in layout order."""
        scopes = tuple(scopes)
        return sorted(
            i
            for name in names
            for i in self._by_dim.get(name, ())
            if self.rules[i].scope is None or self.rules[i].scope in scopes
        )

    def scopes_of(self, path: str, kind: str | None) -> tuple[str, ...]:
        """The scopes of this layout that hold for a value: its kind (``params``, ``opt``) and the path patterns."""
        return scopes_of(dict.fromkeys(r.scope for r in self.rules if r.scope is not None), path, kind)

    def check_axes(self, mesh: AnyMesh, dims: Collection[str] | None = None) -> None:
        """Raise UnknownAxisError where a rule names an axis that the mesh lacks; ``dims``: of the program, if it is known."""
        for rule, axis in ((r, a) for r in self.rules for a in r.axes if a not in mesh.shape):
            sizes = mesh_text(mesh.shape)
            swapped = rule.dim in mesh.shape and (dims is None or axis in dims)
            fixes = [f"dim and axis are swapped: write `{axis}: {rule.dim}`"] * swapped
            known = {OTHER_AXES.get(a, a): a for a in reversed(mesh.shape)}
            renamed = {a: a if a in mesh.shape else known.get(OTHER_AXES.get(a, a)) for r in self.rules for a in r.axes}
            same = renamed[axis]
            named = [replace(r, axes=tuple(renamed[a] or a for a in r.axes)) for r in self.rules]
            if self.scheme and None not in renamed.values():
                back = {new: a for a, new in renamed.items() if new is not None}
                fixes.append(f'mesh="{mesh_text({back.get(str(a), str(a)): n for a, n in mesh.shape.items()})}"')
                fixes.append(f'or layout="{"; ".join(map(str, named))}"')
            else:
                fixes += (
                    [f"write `{named[self.rules.index(rule)]}`"] if same else did_you_mean(axis, mesh.shape, "axes")
                )
            if not same and not near(axis, mesh.shape):
                split, idle = (f'mp.mesh("{mesh_text(_with_axis(mesh.shape, axis, size))}")' for size in (2, 1))
                fixes += [f"give the mesh that axis: {split}"] * (split != idle)
                fixes.append(f"so that rules for `{axis}` have no effect: {idle}")
            of = f" of the scheme `{self.scheme}`" * bool(self.scheme)
            headline = f"rule `{rule}`{of} names axis `{axis}`, which the mesh ({sizes}) does not have"
            raise UnknownAxisError(headline, dim=rule.dim, axis=axis, rule=str(rule), fixes=fixes)

    def spec(
        self,
        dims: DimsLike,
        mesh: AnyMesh | None = None,
        shape: Sequence[int] | None = None,
        *,
        scope: str | None = None,
        path: str = "value",
    ) -> PartitionSpec:
        """The PartitionSpec of a value with these dims.

        Args:
          dims: ``"batch seq embed"``.
          mesh: where given, its axes are checked, and axes of size 1 are still named.
          shape: sizes; where given with a mesh, each sharded dim must be divisible by its axes.
          scope: ``params``, ``opt`` or None.
          path: how errors call the value.

        Raises:
          UnknownAxisError, DivisibilityError, RankError.
        """
        parsed = parse_dims(dims)
        if shape is not None:
            parsed = fit_dims(parsed, shape, path=path, origin="the call")
        if mesh is not None:
            self.check_axes(mesh)
        scopes = self.scopes_of(path, scope)
        names = [(d,) if isinstance(d, str) else () for d in parsed]
        sizes = {} if mesh is None else dict(mesh.shape)
        claimed, refused = claim(self, list(zip(names, shape or [None] * len(names), strict=True)), sizes, scopes)
        if refused and shape is not None:
            i, rule = next(iter(refused.items()))
            value: dict[str, Any] = {"path": path, "shape": shape, "dims": format_dims(parsed)}
            raise divisibility_error(**value, dim=str(parsed[i]), size=shape[i], rule=self.rules[rule], sizes=sizes)
        return to_partition_spec(tuple(claimed))


def scopes_of(scopes: Iterable[str], path: str, kind: str | None) -> tuple[str, ...]:
    """Those of some scopes that hold for a value: its kind and the path patterns that match it."""
    return tuple(s for s in scopes if s == kind or (s not in SCOPES and path_matches(s, path)))


def to_partition_spec(spec: Spec) -> PartitionSpec:
    """Spec → PartitionSpec, without trailing replicated dims."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def claim(
    layout: Layout,
    items: Sequence[tuple[Sequence[str], int | None]],
    sizes: Mapping[str, int],
    scopes: Sequence[str] = (),
) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """Who gets which axis: the first rule, in the layout's order, whose dim is present.

    Of a dim that is cut into parts the major one has the name; where that does not divide, its ``-inner`` part claims instead.

    Args:
      items: (names, size) of every dim of a value, or every factor of an op.
      sizes: axis → size; an axis that is not in it counts as fitting.
      scopes: the scopes that hold.

    Returns:
      The axes of every item, and {item: rule} of claims refused because the size does not divide
      (rules marked ``?`` are not listed).
    """
    out: list[tuple[str, ...]] = [()] * len(items)
    refused: dict[int, int] = {}
    closed: set[int] = set()
    used: set[str] = set()
    named = ((i, names) for i, (names, size) in enumerate(items) if names and size != 1)
    wanted = sorted((r, i) for i, names in named for r in layout.rules_of(names, scopes))
    for r, i in wanted:
        if i in closed:
            continue
        rule = layout.rules[r]
        axes = tuple(a for a in rule.axes if a not in used)
        if rule.axes and not axes:
            continue
        parts = math.prod(sizes.get(a, 1) for a in axes)
        k = next((k for k in (i, *_inner_part(items, i)) if k not in closed and _divides(items[k][1], parts)), None)
        if k is None:
            if not rule.optional:
                refused.setdefault(i, r)
            continue
        closed.update((i, k))
        used.update(axes)
        out[k] = axes
    for i in closed:
        refused.pop(i, None)
    return out, refused


def _divides(size: int | None, parts: int) -> bool:
    return size is None or size % parts == 0


def _inner_part(items: Sequence[tuple[Sequence[str], int | None]], i: int) -> list[int]:
    """The item that is the minor part of a dim of which an item is the major part, if there is one."""
    names = {f"{name}-inner" for name in items[i][0]}
    return [k for k, (others, _) in enumerate(items) if names.intersection(others)][:1]


def divisibility_error(
    *,
    path: str,
    shape: Sequence[int],
    dims: str,
    dim: str,
    size: int,
    rule: Rule,
    sizes: Mapping[str, int],
    dtype: object = None,
    source: str | None = None,
    optional: str | None = None,
    inside: int | None = None,
) -> DivisibilityError:
    """The error for a named dim that its rule's axes do not divide, with the nearest legal sizes.

    Args:
      source: the constraint that names the dim.
      optional: the effect of an optional rule; None: it splits the dim only where it divides.
      inside: the size of the dim of this name in most results of the program, if it is another one.
    """
    parts = math.prod(sizes.get(a, 1) for a in rule.axes)
    axes = " × ".join(f"{a}={sizes.get(a, 1)}" for a in rule.axes)
    below, above = size // parts * parts, -(-size // parts) * parts
    legal = " or ".join(str(n) for n in (below, above) if n > 0)
    devices = math.prod(sizes.values())
    divisors = [n for n in range(2, 2 * parts + 1) if size % n == 0 and devices % n == 0]
    nearest = [*[n for n in divisors if n < parts][-1:], *[n for n in divisors if n > parts][:1]]
    axis, *more = rule.axes
    spare = next((a for a in sizes if a not in rule.axes), "data" if axis == "model" else "model")
    total = devices // math.prod(n for a, n in sizes.items() if a not in (spare, *rule.axes))
    needs = "" if spare in sizes else f", with rules for `{spare}`: its devices else do the same work"
    meshes = [{**sizes, axis: n, spare: total // n} for n in nearest if not (total % n or more)]
    fixes = [f'mesh="{mesh_text(mesh)}"{needs}' for mesh in meshes]
    fixes.append(f"`{replace(rule, optional=True)}` {optional or 'splits it only where it divides'}")
    if inside is not None and inside % parts == 0:
        fixes.insert(0, f"{fixes.pop()}: only the input is {size}, the activations are {inside}")
    resized = f"`{dim}` of {legal}: the nearest multiple{'s' * (below > 0)} of {parts}"
    fixes.insert(0 if dim == "batch" else len(fixes), resized)  # sizes of a model rarely change
    return DivisibilityError(
        f"{path}: dim `{dim}` of size {size} does not divide over {axes}: {size} is not a multiple of {parts}",
        path=path,
        shape=shape,
        dtype=dtype,
        dims=dims,
        dim=dim,
        axis="+".join(rule.axes),
        rule=str(rule),
        source=source,
        fixes=fixes,
    )


def _with_axis(sizes: Mapping[str, int], axis: str, factor: int) -> dict[str, int]:
    """The sizes of a mesh of as many devices with one more axis of size ``factor``: ``{"data": 16}`` → ``{"data": 8, "model": 2}``.
    Its size is 1 where it divides no size; the axis between slices is the first."""
    largest = max(sizes, key=lambda a: (sizes[a] % factor == 0, sizes[a]))
    factor = math.gcd(factor, sizes[largest])
    divided, new = {**sizes, largest: sizes[largest] // factor}, {axis: factor}
    return new | divided if axis == BETWEEN_SLICES else divided | new


def _bad_rule(statement: str, why: str, *fixes: str) -> LayoutSyntaxError:
    return LayoutSyntaxError(f"layout rule {statement!r}{why}", rule=statement, fixes=fixes)


def _parse(text: str) -> Iterable[Rule]:
    """The rules of a layout's text, or of the scheme that it names.

    Raises:
      LayoutSyntaxError: text that is neither.
    """
    statements = _statements(scheme_text(text) or text)
    parts = [s for rules in statements for s in (rules.split(",") if _PAIRS.match(rules) else [rules])]
    for statement in map(str.strip, parts):
        if not statement:
            continue
        left, colon, right = statement.rpartition(":")
        if not colon:
            written = [f"write `:` in rules: `{': '.join(statement.split('=', 1))}`"]
            pair = re.fullmatch(r"(\S.*?)\s+([\w+]+)", statement)
            meant = [f"did you mean `{pair[1]}: {pair[2]}`?"] if pair else []
            other = [*meant, *_similar_schemes(statement), "write `dim: axis`, e.g. `batch: data`"]
            raise _bad_rule(statement, " has no `:`", *(written if "=" in statement else other))
        right, rounds = _rounds(right, statement)
        axes = _axes(right)
        for axis in axes:
            if not NAME.match(axis):
                fix = "one axis, or several joined by `+`: `batch: slice+data`"
                raise _bad_rule(statement, f": {axis!r} is not an axis", fix)
        for item in (d.strip() for d in left.split(",")):
            yield _rule(item, axes, statement, rounds)


def _statements(text: str) -> list[str]:
    """The parts of a layout's text between ``;`` and line ends, without comments."""
    return [part for line in text.splitlines() for part in line.partition("#")[0].split(";")]


def scheme_name(text: str) -> str:
    """The name under which :data:`SCHEMES` would have a scheme: ``"fsdp+tensor"`` → ``"fsdp_tensor"``.

    ``"fsdp+tensor+sequence"`` is another name of ``"sequence_parallel"``.
    """
    return re.sub(r"\W+", "_", text.strip()).replace("fsdp_tensor_sequence", "sequence_parallel")


def scheme_text(text: str) -> str | None:
    """The rules of the scheme that a text names, as text; None: it names none. ``"fsdp+pipeline"`` is FSDP inside of stages."""
    if ":" in text:
        return None
    name = scheme_name(text)
    base = "data_parallel" if name == PIPELINE else name.removesuffix(f"_{PIPELINE}")
    if base not in SCHEMES:
        return None
    rules = SCHEMES[base].format_map(_DEFAULT_AXES)
    return rules if base == name else str(with_stages(Layout(rules), "stage", "layers"))


def characteristic_dims(scheme: Layout) -> set[str]:
    """The dims of which a program has one if the scheme is for it: the dims of the first rules, before other axes or the batch.

    the names of the dim of experts for the schemes of mixtures, ``batch`` for most others.

    Example:
      >>> sorted(characteristic_dims(Layout("expert, experts: model; batch: data")))
      ['expert', 'experts']
    """
    first, *others = scheme.rules
    alike = itertools.takewhile(lambda r: r.axes == first.axes and r.dim != "batch", others)
    return {first.dim, *(r.dim for r in alike)}


def with_stages(layout: Layout, stage: str, layers: str, rounds: int = 1) -> Layout:
    """A layout with the dim of stacked layers over an axis of stages, and the vocabulary over this axis as well.

    Given ``"batch: data; vocab?: model"``, returns ``"layers: stage; batch: data; vocab?: stage+model"``.
    """
    rules = [Rule(layers, (stage,), rounds=rounds), *(r for r in layout.rules if (r.dim, r.scope) != (layers, None))]
    if not any(r.dim == "vocab" and r.scope is None for r in rules):
        rules.append(Rule("vocab", (), optional=True))
    over = lambda r: (stage, *(a for a in r.axes if a != stage))  # noqa: E731
    rules = [replace(r, axes=over(r)) if r.dim == "vocab" and r.scope is None else r for r in rules]
    return Layout("; ".join(map(str, rules)), resolve=layout.resolve, optional=layout.optional)


def similar_schemes(text: str) -> list[str]:
    """The schemes that an unknown name may mean: by its use elsewhere (``zero3``), or by its spelling."""
    name = scheme_name(text).lower()
    return [OTHER_NAMES[name]] if name in OTHER_NAMES else near(name, SCHEMES)


def _similar_schemes(text: str) -> list[str]:
    """The fixes for an unknown name of a scheme; empty for a text that is no name."""
    similar = similar_schemes(text)
    if similar:
        return [f"did you mean the scheme {' or '.join(f'`{name}`' for name in similar)}?"]
    return [f"schemes are {', '.join(SCHEMES)}"] if re.fullmatch(r"[\w+-]+", text) else []


def _axes(text: str) -> tuple[str, ...]:
    """``"slice+data"`` → the axes; ``"none"``: no axis."""
    axes = tuple(a.strip() for a in text.split("+"))
    return () if axes in (("none",), ("None",)) else axes


def _rounds(text: str, statement: str) -> tuple[str, int]:
    """``"stage*2"`` → (``"stage"``, 2), the axes and the rounds of a pipeline; one round without ``*``.

    Raises:
      LayoutSyntaxError: the rounds are no positive number.
    """
    axes, star, count = (part.strip() for part in text.partition("*"))
    if not star:
        return axes, 1
    if not count.isdecimal() or not int(count) or axes.lower() == "none":
        fix = "after all axes, a number of at least 1: `layers: stage*2`"
        raise _bad_rule(statement, ": `*` is followed by the number of rounds of a pipeline", fix)
    return axes, int(count)


def _rule(left: str, axes: tuple[str, ...], statement: str, rounds: int = 1) -> Rule:
    """The Rule with the axes ``axes`` for one left side: ``dim``, ``dim?``, ``opt.dim`` or ``"*/path".dim``.

    Args:
      statement: how errors call the rule.
      rounds: of the pipeline that the rule makes.

    Raises:
      LayoutSyntaxError: no dim, a scope that does not exist, or rounds in a scope.
    """
    m = _LEFT.match(left)
    if m is None and ":" in left:
        separator = r"(:[^,:]*)," if "," in statement else r"(:[^:]*\S)(?=\s+\S+\s*:)"
        rules = re.sub(separator, r"\1;", statement)
        once = re.sub(r":[:\s]*:", ":", statement)
        fix = f"write `{once}`" if once != statement else f"separate rules by `;`: `{rules}`"
        raise _bad_rule(statement, " has several `:`", fix)
    if m is None:
        fixes = ['write `dim: axis`, `dim?: axis`, `opt.dim: axis` or `"*/path".dim: axis`']
        if "/" in left or "*" in left:
            fixes = [
                f'a pattern of tree paths says the dims of tensors: dims={{{left!r}: "embed mlp"}}',
                f"for these tensors alone, name one of their dims behind it: '\"{left}\".mlp: {'+'.join(axes) or 'none'}'",
            ]
        raise _bad_rule(statement, f": {left!r} is not a dim", *fixes)
    scope = m["scope"]
    if scope is not None and scope.startswith('"'):
        scope = scope.strip('"')
    elif scope is not None and scope not in SCOPES:
        fix = f'scopes are {", ".join(SCOPES)} or a quoted path pattern: "*/{scope}/*".{m["dim"]}'
        raise _bad_rule(statement, f": there is no scope `{scope}`", fix)
    if scope is not None and rounds > 1:
        why = f": a rule for {scope} alone makes no pipeline, and so has no rounds"
        raise _bad_rule(statement, why, f"write `{m['dim']}: {'+'.join(axes)}*{rounds}`")
    return Rule(m["dim"], axes, bool(m["optional"]), scope, rounds)


def _rule_of_pair(pair: object) -> Rule:
    """The Rule of a Flax logical axis rule: (name, axis), (name, (axis, …)) or (name, None).

    Raises:
      LayoutSyntaxError: it is not such a pair.
    """
    if isinstance(pair, str):
        raise LayoutSyntaxError(
            f"logical axis rule {pair!r} is not a pair (name, axis)",
            fixes=['give rules in one text, separated by `;`: "batch: data; mlp: model"'],
        )
    rounds = 1
    try:
        dim, axes = pair  # type: ignore[misc]
        if not isinstance(dim, str):
            raise TypeError
        if isinstance(axes, str):
            axes, rounds = _rounds(axes, f"{dim}: {axes}")
        axes = () if axes is None else _axes(axes) if isinstance(axes, str) else tuple(axes)
        if not all(isinstance(a, str) and NAME.match(a) for a in axes):
            raise TypeError
    except (TypeError, ValueError):
        raise LayoutSyntaxError(
            f"logical axis rule {pair!r} is not a pair (name, axis), (name, (axis, …)) or (name, None)",
            fixes=['an axis of the mesh, a tuple of axes, or None: ("embed", "data"), ("batch", ("slice", "data"))'],
        ) from None
    return _rule(dim, axes, f"{dim}: {'+'.join(axes) or 'none'}", rounds)
