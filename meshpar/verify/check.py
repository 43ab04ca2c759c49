"""``mp.check``: the sharded run has the numbers of the unsharded one, or here is the first op that goes wrong.

Every leaf of the results is compared with the run of the same function on one device. A leaf that differs by more
than the tolerance may still be *explained*: rounding that the program itself blows up (Adam turns a gradient that is
zero but for rounding into a full step). To tell, both programs are run again with all values between as further
results, and the leaf is followed back to values on which both runs agree. It is explained if every op on the way does
to the *sharded* run's operands what one device does to them: within the tolerance, or within what the op makes of
operands that differ by the tolerance (its backward error: the sum of terms that cancel has the rounding of its terms).
An op that does something else is the culprit, and the error names its line.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, primitives
from jax.sharding import Mesh

from .. import api
from .._compat import closed_parts, is_graph_node, new_var, source_line
from ..dims import format_dims
from ..errors import CheckError, DivisibilityError, JoinWarning
from ..flax import capture_names
from ..layout import Layout
from ..mesh import mesh as make_mesh
from ..plan import Plan, make_plan
from ..program import Program, infer
from ..program.rules import ELEMENTWISE

WHOLE = "(nothing split)"
IDLE = "idle"
"""The axis of the default meshes that no rule uses: XLA's partitioner gets some gradients wrong by its size."""

SLACK = 8.0
"""How many times the differences that moved operands make are allowed."""

QUICK: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0},  # since 0.12 there is no choice of emitters
)
"""Compiler options, the first that this version has, of the reference and of the programs that return all values: plain
code is made several times faster, and is no worse a witness. The sharded program is compiled as it is for its user."""

BATCH = 256
"""How many ops are looked at in one compilation."""

_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_lin")
INLINED = frozenset({*_CALLS, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


# -- what comes out


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two arrays are apart.

    Attributes:
      largest: max |sharded − unsharded|; infinite where one is NaN or infinite and the other is something else.
      scale: the largest |unsharded|, infinities left out.
      allowed: the part of ``scale`` that ``largest`` may be: 0 for integers and booleans.
      at: the index of the largest difference.
      sharded, unsharded: the two numbers there.
    """

    largest: float
    scale: float
    allowed: float
    at: tuple[int, ...] = ()
    sharded: Any = 0
    unsharded: Any = 0

    @property
    def ok(self) -> bool:
        """Whether the arrays agree."""
        return self.largest <= self.allowed * self.scale

    @property
    def relative(self) -> float:
        """The largest difference as a part of the largest value."""
        return self.largest / self.scale if self.scale else math.inf if self.largest else 0.0

    def __str__(self) -> str:
        where = f" at [{', '.join(map(str, self.at))}]" if self.at else ""
        return (
            f"largest difference {self.largest:.3g}{where} ({self.sharded} sharded, {self.unsharded} unsharded): "
            f"{self.relative:.2g} of the largest value {self.scale:.3g}; allowed: {self.allowed:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome for one layout on one mesh.

    Attributes:
      mesh, layout, lowering: what ran; the mesh as ``"data=2, model=4"``.
      path: the tree path of the worst leaf, the explained ones left out.
      difference: of that leaf, as a part of its largest value.
      leaves: how many were compared.
      explained: paths of the leaves that differ only by rounding that the program blows up.
      error: what went wrong, or None.
    """

    mesh: str
    layout: str
    lowering: str
    path: str
    difference: float
    leaves: int
    explained: tuple[str, ...] = ()
    error: CheckError | None = None


@dataclass(slots=True)
class Report:
    """What :func:`check` found; print it.

    Attributes:
      rows: one for every mesh, layout and lowering.
      skipped: (mesh, layout, reason) for the default meshes that a size does not divide over.
      tolerance: as it was asked for.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    tolerance: float = 1e-5

    @property
    def ok(self) -> bool:
        """Whether something ran, and nothing differed."""
        return bool(self.rows) and all(r.error is None for r in self.rows)

    def __str__(self) -> str:
        cells = [("layout", "mesh", "lowering", "leaves", "explained", "worst", "of", "")]
        for r in self.rows:
            verdict = "equal" if r.error is None else "DIFFERS"
            counts = str(r.leaves), str(len(r.explained) or "")
            cells.append((r.layout or WHOLE, r.mesh, r.lowering, *counts, f"{r.difference:.1e}", r.path, verdict))
        cells += [(layout or WHOLE, mesh, "", "", "", "", "", "skipped") for mesh, layout, _ in self.skipped]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        bad = sum(r.error is not None for r in self.rows)
        head = (
            f"{len(self.rows) - bad} of {len(self.rows)} runs equal to the unsharded one, "
            f"to {self.tolerance:g} of each leaf's largest value"
        )
        notes = [f"skipped {mesh}: {reason}" for mesh, _, reason in self.skipped]
        errors = [str(r.error) for r in self.rows if r.error is not None]
        return "\n".join([head, *lines, *notes, *errors])


# -- the call


def check(
    fn: Callable[..., Any],
    *args: Any,
    layouts: Any,
    meshes: Iterable[Mesh | str] | None = None,
    mesh: Mesh | str | None = None,
    dims: api.DimsPatterns = None,
    lowerings: Sequence[str] = ("jit",),
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    tolerance: float = 1e-5,
    raises: bool = True,
) -> Report:
    """Run a function sharded in every way asked for; compare every leaf of its results with the run on one device.

    The arguments are copied: nothing of the caller's is donated or updated. State that the function updates in place
    (nnx modules, optimizers) is compared as well.

    Args:
      fn: a function as :func:`meshpar.jit` takes it, e.g. a train step, or what ``mp.jit`` returned.
      *args: its arguments: arrays, trees of arrays, random keys, nnx modules and optimizers.
      layouts: a layout or several; each a :class:`meshpar.Layout`, its text, or a Flax rule list.
      meshes, mesh: the meshes, as ``mp.mesh`` makes them or as text for it. The default: all n devices as 1×n, 2×n/2
        and 2×2×n/4 over the layout's axes in the order of its rules, with an idle axis for the sizes that are left;
        those over which a size does not divide are skipped, and the report says so.
      dims, static_argnums, static_argnames: as in :func:`meshpar.jit`.
      lowerings: as in :func:`meshpar.jit`, one or several.
      kwargs: keyword arguments of ``fn``.
      tolerance: the largest difference allowed, as a part of the largest value of the leaf, for f32 and wider; narrower
        floats get more by their precision, at most 16 of their ulps. Integers, booleans and keys must be equal, NaNs
        and infinities at the same places.
      raises: raise at the first difference; else only note it in the report.

    Returns:
      A :class:`Report`: print it, or read ``ok`` and ``rows``.

    Raises:
      CheckError: a leaf differs, and rounding does not explain it: its path, by how much, the first op that goes wrong.
      MeshError: fewer devices than a mesh needs.
      DivisibilityError: a size that does not divide over a mesh that was given, or over each of the default ones.
    """
    if isinstance(fn, api.Jitted):
        given, fn = fn, fn.fn
        dims = given.dims if dims is None else dims
        if static_argnums is None and static_argnames is None:
            static_argnums = tuple(n for n in given.static if isinstance(n, int))
    asked = [mesh] if mesh is not None else None if meshes is None else list(meshes)
    case = _Case(fn, args, kwargs or {}, tolerance)
    report = Report(tolerance=tolerance)
    refused: DivisibilityError | None = None
    for layout in _each_layout(layouts):
        for m in _default_meshes(layout) if asked is None else asked:
            m = make_mesh(m) if isinstance(m, str) else m
            for lowering in lowerings:
                jitted = api.jit(
                    fn, mesh=m, layout=layout, dims=dims, lowering=cast(Any, lowering),
                    static_argnums=static_argnums, static_argnames=static_argnames,
                )  # fmt: skip
                try:
                    row = case.run(jitted, lowering)
                except DivisibilityError as e:
                    if asked is not None:
                        raise
                    refused = refused or e
                    report.skipped.append((_mesh_text(m), str(layout), e.headline))
                    break
                report.rows.append(row)
                if row.error is not None and raises:
                    raise row.error
    if refused is not None and not report.rows:
        raise refused
    return report


def _each_layout(layouts: Any) -> list[Layout]:
    if isinstance(layouts, str | Layout | Mapping):
        return [Layout(layouts)]
    layouts = list(layouts)
    if layouts and all(isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str) for p in layouts):
        rest = [p[1] for p in layouts]
        if all(a is None or isinstance(a, str | tuple | list) for a in rest) and not any(":" in p[0] for p in layouts):
            return [Layout(layouts)]  # one Flax rule list
    return [Layout(x) for x in layouts]


def _default_meshes(layout: Layout) -> list[Mesh]:
    """All n devices as 1×n, 2×n/2, 2×2×n/4; what the layout has no axis for is an idle axis."""
    n = len(jax.devices())
    n = n if n >= 4 else 8  # too few: let the error say how to get eight
    axes = list(dict.fromkeys(a for r in layout.rules for a in r.axes))
    idle = next(name for name in (IDLE, *(f"{IDLE}_{i}" for i in range(len(axes)))) if name not in axes)
    shapes = [(1, n), (2, n // 2), (2, 2, n // 4)]
    if len(axes) == 1:
        shapes = [(n,), (n // 2, 2), (2, n // 2)]
    texts: dict[str, None] = {}
    for shape in shapes:
        if math.prod(shape) != n:
            continue
        sizes = dict.fromkeys(axes, 1)
        for k, size in enumerate(shape):
            if k < len(axes):
                sizes[axes[k]] = size
            else:
                sizes[idle] = sizes.get(idle, 1) * size
        texts[", ".join(f"{a}={size}" for a, size in sizes.items() if a != idle or size > 1)] = None
    return [make_mesh(text) for text in texts]


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{a}={n}" for a, n in mesh.shape.items())


# -- numbers


def allowed(dtype: Any, tolerance: float) -> float:
    """The relative difference allowed in a dtype: 0 for integers; scaled to the precision of narrow floats."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    scaled = tolerance * eps / float(np.finfo(np.float32).eps)
    return max(tolerance, min(scaled, 16 * eps, 0.5))


def compare(sharded: np.ndarray, unsharded: np.ndarray, tolerance: float) -> Difference:
    """How far two arrays of one shape and dtype are apart; NaNs are equal to each other."""
    limit = allowed(unsharded.dtype, tolerance)
    if sharded.shape != unsharded.shape or sharded.dtype != unsharded.dtype:
        kinds = [f"{x.dtype}{list(x.shape)}" for x in (sharded, unsharded)]
        return Difference(math.inf, 0.0, limit, (), *kinds)
    if not unsharded.size:
        return Difference(0.0, 0.0, limit)
    same = np.asarray(sharded == unsharded)
    a, b = _wide(sharded), _wide(unsharded)
    with np.errstate(invalid="ignore", over="ignore"):
        same = same | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
    gap = np.where(np.isfinite(gap), gap, math.inf)
    at = tuple(map(int, np.unravel_index(int(np.argmax(gap)), gap.shape)))
    sizes = np.abs(b[np.isfinite(b)])
    scale = float(sizes.max()) if sizes.size else 0.0
    return Difference(float(gap[at]), scale, limit, at, sharded[at], unsharded[at])


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _host(x: Any) -> np.ndarray:
    """The array on the host; keys as their data."""
    return np.asarray(_data(x))


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.dtype(object)), jax.dtypes.prng_key)


def _copies(x: Any) -> Iterator[np.ndarray]:
    """The array, and once more for every device whose copy of its part differs."""
    x = _data(x)
    whole = np.asarray(x)
    yield whole
    for shard in getattr(x, "addressable_shards", ()):
        if shard.replica_id:
            mine = np.asarray(shard.data)
            if mine.tobytes() != whole[shard.index].tobytes():
                other = whole.copy()
                other[shard.index] = mine
                yield other


def _worst(sharded: Any, unsharded: np.ndarray, tolerance: float) -> Difference:
    return max((compare(c, unsharded, tolerance) for c in _copies(sharded)), key=lambda d: d.largest)


def _moved(x: Any, by: float | None, tolerance: float, draw: np.random.Generator) -> Any:
    """A float array, each element moved by a random part of itself; ``by`` is in ulps, None: the tolerance."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or getattr(x, "weak_type", False) or _is_key(x) or not jnp.issubdtype(dtype, jnp.inexact):
        return x
    part = allowed(dtype, tolerance) if by is None else by * float(jnp.finfo(dtype).eps)
    values = _wide(np.asarray(x))
    moved = (values * (1 + part * draw.uniform(-1, 1, values.shape))).astype(dtype)
    return jax.device_put(moved, x.sharding) if isinstance(x, jax.Array) else moved


def _spread(run: Callable[[list[Any]], Sequence[Any]], xs: Sequence[Any], base: Sequence[np.ndarray], by: float | None,
            tolerance: float) -> list[float]:  # fmt: skip
    """How far moved operands move each result: the largest of two draws."""
    out = [0.0] * len(base)
    draw = np.random.default_rng(0)
    for _ in range(3):
        moved = run([_moved(x, by, tolerance, draw) for x in xs])
        for k, (a, b) in enumerate(zip(moved, base, strict=True)):
            out[k] = max(out[k], compare(_host(a), b, tolerance).largest)
    return out


# -- one function and its arguments


def _compiled(fn: Callable[..., Any], xs: Sequence[Any], **shardings: Any) -> Callable[..., Any]:
    """``jax.jit(fn)`` for these arguments, compiled quickly where the compiler knows how."""
    lowered = jax.jit(fn, keep_unused=True, **shardings).lower(*xs)
    if jax.default_backend() == "cpu":
        for options in QUICK:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another version, other options
                return lowered.compile(compiler_options=options)
    return lowered.compile()


@dataclass(eq=False, slots=True)
class _Reference:
    """The run on one device: its flat arguments, the results, and the compiled function."""

    leaves: list[Any]
    results: list[np.ndarray]
    run: Callable[[list[Any]], list[Any]]
    spread: list[float] | None = None


class _Case:
    """A function and its arguments; the unsharded run is made once."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], tolerance: float):
        self.fn, self.args, self.kwargs, self.tolerance = fn, args, dict(kwargs), tolerance
        self.device = jax.devices()[0]
        self.reference: _Reference | None = None
        self.between: tuple[object, list[Any]] | None = None  # (which program, all values of it on one device)

    def fresh(self, tree: Any) -> Any:
        """Copies of the arrays of a tree on one device."""
        copy = lambda x: jax.device_put(x, self.device, may_alias=False) if isinstance(x, jax.Array) else x  # noqa: E731
        return jax.tree.map(copy, tree)

    def run(self, jitted: api.Jitted, lowering: str) -> Row:
        with jitted._pure(self.args, self.kwargs) as pure:
            reference = self.reference or self.unsharded(jitted, self.fresh(pure))
            self.reference = reference
            args, kwargs = self.fresh(pure)
            plan = jitted._entry(args, kwargs).plan
            outs = jax.tree.leaves(jitted._run(args, kwargs))
            found = [_worst(a, b, self.tolerance) for a, b in zip(outs, reference.results, strict=True)]
            failed = [k for k, d in enumerate(found) if not d.ok]
            explained: list[int] = []
            error = None
            if failed:
                again = _Again(self, plan, reference, lowering, self.device)
                explained = [k for k in failed if again.explains(k, found[k])]
                failed = [k for k in failed if k not in explained]
                if failed:
                    error = again.error(failed, found)
        paths = [h.path for h in plan.outputs]
        rest = [k for k in range(len(found)) if k not in explained]
        worst = failed[0] if failed else max(rest, key=lambda k: found[k].relative, default=None)
        return Row(
            _mesh_text(plan.mesh), str(plan.layout), lowering, "" if worst is None else paths[worst],
            0.0 if worst is None else found[worst].relative, len(found), tuple(paths[k] for k in explained), error,
        )  # fmt: skip

    def unsharded(self, jitted: api.Jitted, pure: tuple[Any, Any]) -> _Reference:
        """The run on one device, under ``jax.jit`` alone."""
        dynamic, statics = jitted._split(*pure)
        leaves, tree = jax.tree.flatten(dynamic)
        graph = any(is_graph_node(x) for x in jax.tree.leaves((self.args, self.kwargs), is_leaf=is_graph_node))

        def flat(*xs: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, xs)
            args = list(args)
            for k, v in statics:
                if isinstance(k, int):
                    args[k] = v
                else:
                    kwargs[k] = v
            if not graph:
                return jax.tree.leaves(self.fn(*args, **kwargs))
            args, kwargs = nnx.from_tree((tuple(args), kwargs), ctxtag=jitted, is_inner=True)
            out = self.fn(*args, **kwargs)
            kept = jax.tree.map(lambda x: x if is_graph_node(x) else None, (args, kwargs), is_leaf=is_graph_node)
            return jax.tree.leaves(nnx.to_tree((*kept, out), ctxtag=jitted))

        axes = {*jitted.mesh.axis_names, *(a for r in jitted.layout.rules for a in r.axes)}
        with capture_names(axes):  # constraints over names and axes mean nothing on one device
            run = _compiled(flat, leaves)
        return _Reference(leaves, [_host(x) for x in run(*leaves)], lambda xs: run(*xs))


# -- the second look: all values between


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls inlined and dead ops dropped; loops and conditionals stay one op each."""
    eqns: list[Any] = []
    constvars: list[Any] = []
    consts: list[Any] = []

    def bind(jaxpr: Any, values: Sequence[Any]) -> dict[Any, Any]:
        env = {v: new_var(v.aval) for v in jaxpr.constvars}
        constvars.extend(env.values())
        consts.extend(values)
        return env

    def inline(jaxpr: Any, env: dict[Any, Any]) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn.primitive.name in INLINED:
                body, values = closed_parts(next(eqn.params[k] for k in _BODIES if k in eqn.params))
                scope = bind(body, values)
                scope.update(zip(body.invars, ins[len(ins) - len(body.invars) :], strict=True))
                outs = inline(body, scope)
            else:
                outs = [new_var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    root = closed.jaxpr
    outs = inline(root, {**bind(root, closed.consts), **{v: v for v in root.invars}})
    needed = {v for v in outs if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    live.reverse()
    return ClosedJaxpr(root.replace(constvars=constvars, eqns=live, outvars=outs), consts)


def _with_all_values(flat: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The flat program that returns, after its results, everything that an op makes; and those variables."""
    made = [v for eqn in flat.jaxpr.eqns for v in eqn.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(outvars=[*flat.jaxpr.outvars, *made]), flat.consts), made


def _on_one_device(eqn: Any) -> Any:
    """A constraint to some mesh is a copy on one device."""
    return eqn.replace(primitive=primitives.copy_p, params={}) if eqn.primitive.name == "sharding_constraint" else eqn


def _renamed(program: Program, flat: ClosedJaxpr, made: Sequence[Any]) -> Program:
    """The names of a program for its flat form with all values as results."""
    ins, outs = program.inputs, program.outputs
    twin = infer(
        flat, [v.annotation for v in ins], [v.path or "" for v in ins],
        [*(v.annotation for v in outs), *(None for _ in made)],
        [*(v.path or "" for v in outs), *(f"value {k}" for k in range(len(made)))],
    )  # fmt: skip
    for new, old in [*zip(twin.inputs, ins, strict=True), *zip(twin.outputs, outs, strict=False)]:
        new.kind = new.kind or old.kind
    return twin


def _lower(plan: Plan, mesh: Mesh, lowering: str) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    lowered = {"jit": api.lower_to_jit}
    return lowered[lowering](plan, mesh)


class _Again:
    """Both programs once more, with all values between as results: what explains a leaf, or which op goes wrong."""

    def __init__(self, case: _Case, plan: Plan, reference: _Reference, lowering: str, device: Any):
        self.plan, self.reference, self.tolerance, self.device = plan, reference, case.tolerance, device
        flat = flatten(plan.program.closed)
        everything, made = _with_all_values(flat)
        self.eqns = [_on_one_device(e) for e in flat.jaxpr.eqns]
        self.results = flat.jaxpr.outvars
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.values: dict[Any, Any] = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self.values.update(zip(flat.jaxpr.invars, reference.leaves, strict=True))
        count = len(self.results)

        self.program = _renamed(plan.program, everything, made)
        assert isinstance(plan.mesh, Mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JoinWarning)  # said once already
            run, ins, outs = _lower(make_plan(self.program, plan.layout, plan.mesh), plan.mesh, lowering)
        placed = [api._put(x, s) for x, s in zip(reference.leaves, ins, strict=True)]
        sharded = _compiled(run, placed, in_shardings=tuple(ins), out_shardings=list(outs))(*placed)
        self.outs = sharded[:count]
        self.values.update(zip(made, sharded[count:], strict=True))

        ident = [(e.primitive.name, *(v.aval for v in e.outvars)) for e in self.eqns]
        if case.between is None or case.between[0] != ident:
            alone = ClosedJaxpr(everything.jaxpr.replace(eqns=self.eqns), flat.consts)
            case.between = ident, list(_compiled(jaxpr_as_fun(alone), reference.leaves)(*reference.leaves))
        self.out_refs = case.between[1][:count]
        self.references = dict(zip(made, case.between[1][count:], strict=True))
        self._agree: dict[Any, bool] = {}
        self._wrong: dict[int, tuple[Any, Difference] | None] = {}

    # -- questions

    def explains(self, k: int, first: Difference) -> bool:
        """Whether a result that differed differs only by rounding that the program blows up."""
        return self.culprit(k) is None and first.largest <= SLACK * max(self.leaf(k).largest, self.spread(k))

    def leaf(self, k: int) -> Difference:
        """The difference of a result in the programs that return all values."""
        return _worst(self.outs[k], _host(self.out_refs[k]), self.tolerance)

    def spread(self, k: int) -> float:
        """How far the unsharded run moves a result when its arguments are moved by the tolerance."""
        ref = self.reference
        if ref.spread is None:
            ref.spread = _spread(ref.run, ref.leaves, ref.results, None, self.tolerance)
        return ref.spread[k]

    def culprit(self, k: int) -> tuple[int, Any, Difference] | None:
        """(op, its result, how far off) for the first op that goes wrong on the way to a result."""
        way = self.ways_back(self.results[k])
        for start in range(0, len(way), BATCH):
            batch = way[start : start + BATCH]
            self.look([i for i in batch if i not in self._wrong])
            for i in batch:
                wrong = self._wrong[i]
                if wrong is not None:
                    return i, *wrong
        return None

    def ways_back(self, var: Any) -> list[int]:
        """The ops, in program order, between a result and the values on which both runs agree."""
        found: set[int] = set()
        todo = [var]
        while todo:
            v = todo.pop()
            if isinstance(v, Literal) or v not in self.maker or self.maker[v] in found or self.agrees(v):
                continue
            found.add(self.maker[v])
            todo += self.eqns[self.maker[v]].invars
        return sorted(found)

    def agrees(self, var: Any) -> bool:
        if var not in self._agree:
            self._agree[var] = _worst(self.values[var], _host(self.references[var]), self.tolerance).ok
        return self._agree[var]

    def look(self, ops: Sequence[int]) -> None:
        """Find the ops that do something else than one device does to the same operands."""
        eqns = [self.eqns[i] for i in ops]
        runs = [self.alone(eqn) for eqn in eqns]
        # every op has operands of its own here, so one compilation does for all
        xss = [xs for _, xs in runs]
        expected = _compiled(lambda xss: [run(*xs) for (run, _), xs in zip(runs, xss, strict=True)], [xss])(xss)
        for i, eqn, (run, xs), outs in zip(ops, eqns, runs, expected, strict=True):
            ours, theirs = [self.values[v] for v in eqn.outvars], [_host(x) for x in outs]
            off = [_worst(a, b, self.tolerance) for a, b in zip(ours, theirs, strict=True)]
            spread = [0.0] * len(off)
            if not all(d.ok for d in off):
                ulps = 4.0 if eqn.primitive.name in ELEMENTWISE else None
                once = _compiled(run, xs)
                spread = _spread(lambda moved, once=once: once(*moved), xs, theirs, ulps, self.tolerance)
            results = zip(eqn.outvars, off, spread, strict=True)
            beyond = [(v, d) for v, d, s in results if not d.ok and d.largest > SLACK * s]
            self._wrong[i] = max(beyond, key=lambda x: x[1].relative, default=None)

    def alone(self, eqn: Any) -> tuple[Callable[..., list[Any]], list[Any]]:
        """An op as a function, and the sharded run's operands on one device."""
        ins = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        one = self.plan.program.closed.jaxpr.replace(
            constvars=[], invars=ins, eqns=[eqn], outvars=eqn.outvars, effects=eqn.effects
        )
        return jaxpr_as_fun(ClosedJaxpr(one, ())), [jax.device_put(self.values[v], self.device) for v in ins]

    # -- the error

    def error(self, failed: list[int], found: list[Difference]) -> CheckError:
        """The first result that differs, by how much, and the first op that goes wrong."""
        plan, k = self.plan, failed[0]
        value = plan.program.outputs[k]
        path = plan.outputs[k].path
        what = f"`{path}`" if path else "the result"
        lines = [
            f"the layout `{plan.layout}` changes {what} on the mesh {_mesh_text(plan.mesh)}",
            f"  {found[k]}",
        ]
        if len(failed) > 1:
            others = ", ".join(plan.outputs[j].path for j in failed[:6])
            lines.append(f"  {len(failed)} of {len(found)} results differ: {others}{', …' * (len(failed) > 6)}")
        culprits = [c for c in map(self.culprit, failed) if c is not None]
        source = None
        if culprits:
            i, var, off = min(culprits, key=lambda c: c[0])
            eqn = self.eqns[i]
            source = source_line(eqn)
            dims = format_dims(self.program.dims(self.program.root.env[var]))
            made = f"{var.aval.dtype}[{', '.join(map(str, var.aval.shape))}] ({dims})"
            lines.append(f"  the first op that goes wrong: {eqn.primitive.name} → {made} at {source}")
            lines.append(f"  of the same operands one device makes something else: {off}")
        elif not compare(_host(self.out_refs[k]), self.reference.results[k], self.tolerance).ok:
            lines.append("  on one device the traced program differs from the function already: is it deterministic?")
        elif self.results[k] not in self.maker:
            lines.append("  it is an argument that is returned as it came")
        else:
            left = self.leaf(k)
            verb = "vanishes" if left.ok else "shrinks"
            lines.append(f"  with all values between returned as well, the difference {verb} (to {left.relative:.2g})")
            lines.append("  and every op does what it should: the compiler goes wrong where it fuses them")
        return CheckError(
            "\n".join(lines), path=path, shape=value.shape, dtype=value.aval.dtype,
            dims=format_dims(plan.program.dims(value)), source=source, rule=str(plan.layout),
            fixes=["the program is right on one device: this is a bug of the compiler or of meshpar, please report it",
                   "until then leave the dims of that op whole, e.g. `dim: none` before the other rules"],
        )  # fmt: skip
