"""``mp.jit``, ``mp.plan`` and ``mp.init``: a function, a mesh and a layout in, a sharded function or a plan out."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ._compat import is_graph_node, without_gc
from .dims import Dims, DimsLike, PathDims, did_you_mean, fit_dims, near, path_matches
from .errors import MeshError, PatternError, UnsupportedError
from .flax import Leaf, capture_names, flatten_named
from .layout import AnyMesh, Layout
from .lower import lower_to_jit
from .plan import Plan, make_plan
from .program import Program, infer, trace

Lowering = Literal["jit"]
LayoutLike = Layout | str | Mapping[str, Any] | Sequence[Any]
DimsPatterns = Mapping[str, DimsLike] | Iterable[tuple[str, DimsLike]] | PathDims | None


class _Stale(Exception):
    """The arguments no longer have the shapes that a compiled entry was made for."""


@dataclass(eq=False, slots=True)
class _Traced:
    """A program with its trees, before any layout."""

    program: Program
    out_tree: Any
    avals: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class _Entry:
    """A program lowered for one structure and one set of shapes of the arguments."""

    in_tree: Any
    statics: tuple[Any, ...]
    plan: Plan
    run: Any
    flat: Callable[..., list[Any]]
    in_shardings: list[Any]
    out_shardings: list[Any]
    donate: tuple[int, ...]
    out_tree: Any


class Jitted:
    """What :func:`meshpar.jit` returns: it is called, lowered and traced as the result of ``jax.jit`` is.

    Attributes:
      mesh, layout: what it was made with.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, layout: Layout, dims: PathDims, *, strict: bool = False,
        static_argnums: int | Sequence[int] | None = None, static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None, donate_argnames: str | Iterable[str] | None = None,
        keep_unused: bool = False, compiler_options: Mapping[str, Any] | None = None, init: bool = False,
    ):  # fmt: skip
        functools.update_wrapper(self, fn)
        self.fn, self.mesh, self.layout, self.dims = fn, mesh, layout, dims
        self.strict, self.is_init = strict, init
        self.keep_unused, self.compiler_options = keep_unused, compiler_options
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        names = list(self.signature.parameters) if self.signature else []
        kinds = {p.kind for p in self.signature.parameters.values()} if self.signature else set()
        variadic = bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
        self.static = _selected(static_argnums, static_argnames, names, "static", variadic)
        self.donated = _selected(donate_argnums, donate_argnames, names, "donate", variadic)
        self._entries: dict[Any, _Entry] = {}
        self._plans: dict[Any, Plan] = {}
        self._traced: dict[Any, _Traced] = {}
        self._last: _Entry | None = None
        self._graph: bool | None = None

    # -- what users call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._uses_graph(args, kwargs):
            with nnx.update_context(self):
                pure = nnx.to_tree((args, kwargs), ctxtag=self)
                out = self._run(*pure)
                _, _, result = nnx.from_tree(out, ctxtag=self, is_inner=False)
            return result
        return self._run(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``ShapeDtypeStruct``); nothing runs, nothing is compiled."""
        with self._pure(args, kwargs) as (pure, pure_kwargs):
            return self._plan(pure, pure_kwargs)[0]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, as ``jax.jit(f).lower`` does."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments, as ``jax.jit(f).trace`` does."""
        with self._pure(args, kwargs) as (pure, pure_kwargs):
            entry = self._entry(pure, pure_kwargs)
            dynamic, statics = self._split(pure, pure_kwargs)
            leaves, _ = jax.tree.flatten(dynamic)
            placed = iter(
                jax.ShapeDtypeStruct(
                    np.shape(x), jax.dtypes.result_type(x) if not hasattr(x, "dtype") else x.dtype, sharding=s
                )
                for x, s in zip(leaves, entry.in_shardings, strict=True)
            )
            (call_args, call_kwargs) = jax.tree.map(lambda _: next(placed), dynamic)
            positions = {k for k, _ in statics}
            call_args = tuple(x for i, x in enumerate(call_args) if i not in positions)  # as jax.jit: statics are gone

            def step(*a: Any, **k: Any) -> Any:
                return jax.tree.unflatten(entry.out_tree, entry.flat(*jax.tree.leaves((a, k))))

            step.__name__ = getattr(self.fn, "__name__", "step")
            flat = {i for i in entry.donate}
            tree_donate = _prefix_donation((call_args, call_kwargs), flat)
            jitted = jax.jit(
                step, donate_argnums=tree_donate[0], donate_argnames=tree_donate[1], keep_unused=self.keep_unused
            )
            return jitted.trace(*call_args, **call_kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the results."""
        (dynamic, rest), statics = self._split(args, kwargs)

        def fn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            full, named = list(args), dict(kwargs)
            for k, v in statics:
                if isinstance(k, int):
                    full[k] = v
                else:
                    named[k] = v
            return self.fn(*full, **named)

        return jax.eval_shape(fn, dynamic, rest)

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Compare this layout with the unsharded run on these arguments; see :func:`meshpar.check`."""
        from .verify.check import check

        assert isinstance(self.mesh, Mesh)
        return check(
            self.fn, *args, kwargs=kwargs, meshes=[self.mesh], layouts=[self.layout], dims=self.dims,
            static_argnames=tuple(n for n in self.static if isinstance(n, str)),
            static_argnums=tuple(n for n in self.static if isinstance(n, int)),
        )  # fmt: skip

    def clear_cache(self) -> None:
        """Forget compiled programs."""
        self._entries.clear()
        self._plans.clear()
        self._traced.clear()
        self._last = None

    # -- arguments

    def _uses_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._graph is None or not self._graph:
            found = (
                any(is_graph_node(x) for x in jax.tree.leaves((args, kwargs), is_leaf=is_graph_node))
                if (self._graph is None)
                else any(map(is_graph_node, args))
            )
            self._graph = found
        return self._graph or self.is_init

    def _pure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import contextlib

        @contextlib.contextmanager
        def context():
            if self._uses_graph(args, kwargs):
                with nnx.update_context(self):
                    yield nnx.to_tree((args, kwargs), ctxtag=self)
            else:
                yield args, kwargs

        return context()

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """((dynamic args, dynamic kwargs), static ones)."""
        if not self.static:
            return (tuple(args), dict(kwargs)), ()
        names = list(self.signature.parameters) if self.signature else []
        statics: list[Any] = []
        dynamic: list[Any] = []
        for i, x in enumerate(args):
            if i in self.static or (i < len(names) and names[i] in self.static):
                statics.append((i, x))
                dynamic.append(None)
            else:
                dynamic.append(x)
        rest = {}
        for k, x in kwargs.items():
            if k in self.static:
                statics.append((k, x))
            else:
                rest[k] = x
        return (tuple(dynamic), rest), tuple(statics)

    def _arg_name(self, i: int, count: int) -> str:
        if self.signature is None:
            return str(i)
        params = list(self.signature.parameters.values())
        for k, p in enumerate(params):
            if p.kind is inspect.Parameter.VAR_POSITIONAL and i >= k:
                return f"{p.name}/{i - k}"
        return params[i].name if i < len(params) else str(i)

    def _leaves(self, dynamic: tuple[Any, Any]) -> list[Leaf]:
        args, kwargs = dynamic
        out: list[Leaf] = []
        for i, x in enumerate(args):
            out += flatten_named(x, tuple(self._arg_name(i, len(args)).split("/")))
        for k in sorted(kwargs):
            out += flatten_named(kwargs[k], (k,))
        return out

    # -- programs, plans, entries

    def _key(self, dynamic: Any, statics: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        leaves, tree = jax.tree.flatten(dynamic)
        return (tree, statics, tuple(map(_signature, leaves))), leaves, tree

    def _trace(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Traced, Any, list[Any], Any, tuple[Any, ...]]:
        dynamic, statics = self._split(args, kwargs)
        key, leaves, tree = self._key(dynamic, statics)
        found = self._traced.get(key)
        if found is None:
            found = self._traced[key] = self._make_program(dynamic, statics, leaves, tree)
        return found, key, leaves, tree, statics

    def _make_program(self, dynamic: Any, statics: tuple[Any, ...], leaves: list[Any], tree: Any) -> _Traced:
        named = self._leaves(dynamic)
        if len(named) != len(leaves):
            raise AssertionError("paths and leaves do not match")
        used: set[str] = set()
        annotations = [self._annotation(leaf, used) for leaf in named]

        def flat(*xs: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, xs)
            args = list(args)
            for k, v in statics:
                if isinstance(k, int):
                    args[k] = v
                else:
                    kwargs[k] = v
            if not (self._graph or self.is_init):
                return self.fn(*args, **kwargs)
            args, kwargs = nnx.from_tree((tuple(args), kwargs), ctxtag=self, is_inner=True)
            out = self.fn(*args, **kwargs)
            kept = jax.tree.map(lambda x: x if is_graph_node(x) else None, (args, kwargs), is_leaf=is_graph_node)
            return nnx.to_tree((*kept, out), ctxtag=self)

        with capture_names(self.mesh.axis_names):
            closed, shapes, out_leaves = trace(flat, leaves)
        results = self._results(shapes)
        if len(results) != len(out_leaves):
            raise AssertionError("paths and results do not match")
        twin_of = _twins(named, annotations)
        out_annotations: list[Dims | None] = []
        for leaf in results:
            mine = self._annotation(leaf, used) if self.is_init else leaf.dims
            twin = twin_of(leaf)
            if twin is not None:
                mine = mine or twin[1]
                leaf.kind = leaf.kind or twin[0].kind
            out_annotations.append(mine)
        if self.is_init:
            _name_state(results, out_annotations)
        self._check_patterns(used, [leaf.path for leaf in (*named, *(results if self.is_init else ()))])
        with without_gc():
            program = infer(
                closed, annotations, [leaf.path for leaf in named], out_annotations, [leaf.path for leaf in results]
            )
        for value, leaf in zip(program.inputs, named, strict=True):
            value.kind = leaf.kind
        for value, leaf in zip(program.outputs, results, strict=True):
            value.kind = value.kind or leaf.kind
        return _Traced(program, jax.tree.structure(shapes), tuple(closed.in_avals))

    def _results(self, shapes: Any) -> list[Leaf]:
        """The leaves of the results; updated arguments keep their own paths."""
        if not (self._graph or self.is_init):
            return flatten_named(shapes)
        args, kwargs, out = shapes
        return [*self._leaves((args, kwargs)), *flatten_named(out)]

    def _annotation(self, leaf: Leaf, used: set[str]) -> Dims | None:
        found = self.dims.match(leaf.path)
        if found is None:
            return leaf.dims
        pattern, dims = found
        used.add(pattern)
        return fit_dims(dims, np.shape(leaf.value), path=leaf.path, origin=f"the pattern {pattern!r}")

    def _check_patterns(self, used: set[str], paths: list[str]) -> None:
        for pattern, _ in self.dims.items:
            if pattern in used:
                continue
            shadow = next((p for p in paths if path_matches(pattern, p)), None)
            if shadow is not None:
                earlier = self.dims.match(shadow)
                assert earlier is not None
                raise PatternError(
                    f"the dims= pattern {pattern!r} is never used: {earlier[0]!r} stands before it and matches the same tensors",
                    path=shadow,
                    fixes=["the first pattern that matches wins: put the narrower one first"],
                )
            raise PatternError(
                f"the dims= pattern {pattern!r} matches no tensor",
                path=pattern,
                fixes=[f"did you mean {' or '.join(map(repr, near(pattern, paths)))}?"] * bool(near(pattern, paths))
                + [f"paths are: {', '.join(paths[:8])}{', …' if len(paths) > 8 else ''}"],
            )

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Plan, _Traced, Any, Any, tuple[Any, ...]]:
        traced, key, _, tree, statics = self._trace(args, kwargs)
        plan = self._plans.get(key)
        if plan is None:
            with without_gc():
                plan = make_plan(traced.program, self.layout, self.mesh, strict=self.strict, init=self.is_init)
            self._plans[key] = plan
        return plan, traced, key, tree, statics

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Entry:
        dynamic, statics = self._split(args, kwargs)
        key, _, _ = self._key(dynamic, statics)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._lower(dynamic, *self._plan(args, kwargs))
        return entry

    def _lower(
        self, dynamic: Any, plan: Plan, traced: _Traced, key: Any, tree: Any, statics: tuple[Any, ...]
    ) -> _Entry:
        if not isinstance(self.mesh, Mesh):
            raise MeshError("an abstract mesh has no devices to run on", fixes=["plan with it, or give mp.mesh(…)"])
        del key
        with without_gc():
            flat, ins, outs = lower_to_jit(plan, self.mesh)
        donate = self._donate_flat(dynamic)
        avals = traced.avals

        def checked(*xs: Any) -> list[Any]:
            for x, aval in zip(xs, avals, strict=True):
                if x.aval.shape != aval.shape or x.aval.dtype != aval.dtype or x.aval.weak_type != aval.weak_type:
                    raise _Stale
            return flat(*xs)

        checked.__name__ = getattr(self.fn, "__name__", "step")
        options: dict[str, Any] = {"compiler_options": dict(self.compiler_options)} if self.compiler_options else {}
        run = jax.jit(
            checked, in_shardings=tuple(ins), out_shardings=list(outs), donate_argnums=donate,
            keep_unused=self.keep_unused, **options,
        )  # fmt: skip
        return _Entry(tree, statics, plan, run, flat, ins, outs, donate, traced.out_tree)

    def _donate_flat(self, dynamic: tuple[Any, Any]) -> tuple[int, ...]:
        if not self.donated:
            return ()
        args, kwargs = dynamic
        out: list[int] = []
        n = 0
        names = list(self.signature.parameters) if self.signature else []
        entries = [((i, names[i] if i < len(names) else i), x) for i, x in enumerate(args)]
        entries += [((k,), kwargs[k]) for k in sorted(kwargs)]
        for ids, x in entries:
            size = len(jax.tree.leaves(x))
            if any(i in self.donated for i in ids):
                out += range(n, n + size)
            n += size
        return tuple(out)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dynamic, statics = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        last = self._last
        if last is not None and last.in_tree == tree and last.statics == statics:
            try:
                return jax.tree.unflatten(last.out_tree, last.run(*leaves))
            except (_Stale, ValueError):
                pass  # other shapes, or arrays that lie elsewhere: find or make the entry, and bring them into place
        entry = self._entry(args, kwargs)
        self._last = entry
        placed = [_put(x, s) for x, s in zip(leaves, entry.in_shardings, strict=True)]
        return jax.tree.unflatten(entry.out_tree, entry.run(*placed))


def _selected(nums: Any, names: Any, params: list[str], what: str, variadic: bool = False) -> frozenset[int | str]:
    nums = () if nums is None else (nums,) if isinstance(nums, int) else tuple(nums)
    names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    for n in names:
        if params and n not in params:
            raise UnsupportedError(
                f"{what}_argnames: the function has no argument `{n}`",
                fixes=did_you_mean(n, params, "arguments"),
            )
    out: set[int | str] = set(names)
    for n in nums:
        if params and not variadic and not -len(params) <= n < len(params):
            raise UnsupportedError(
                f"{what}_argnums: the function has {len(params)} arguments, so there is no argument {n}",
                fixes=[f"arguments are {', '.join(f'{i}: {p}' for i, p in enumerate(params))}"],
            )
        n = n % len(params) if params and n < 0 else n
        out.add(n)
        if n < len(params):
            out.add(params[n])
    return frozenset(out | {params.index(n) for n in names if n in params})


def _prefix_donation(call: tuple[Any, Any], flat: set[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    args, kwargs = call
    nums: list[int] = []
    names: list[str] = []
    n = 0
    for ident, x in [*enumerate(args), *((k, kwargs[k]) for k in sorted(kwargs))]:
        size = len(jax.tree.leaves(x))
        if size and all(i in flat for i in range(n, n + size)):
            (nums if isinstance(ident, int) else names).append(ident)  # type: ignore[arg-type]
        n += size
    return tuple(nums), tuple(names)


def _twins(named: list[Leaf], annotations: list[Dims | None]) -> Callable[[Leaf], tuple[Leaf, Dims | None] | None]:
    """Finds the input that a result continues: ``0/params/w`` of a returned state is ``state/params/w`` of the argument."""
    exact = {leaf.path: (leaf, dims) for leaf, dims in zip(named, annotations, strict=True)}
    tails: dict[str, list[str]] = {}
    for path in exact:
        tails.setdefault(path.partition("/")[2], []).append(path)

    def find(result: Leaf) -> tuple[Leaf, Dims | None] | None:
        twin = exact.get(result.path)
        for tail in (result.path, result.path.partition("/")[2]):
            if twin is None and tail and len(tails.get(tail, ())) == 1:
                twin = exact[tails[tail][0]]
        return twin if twin is not None and np.shape(twin[0].value) == np.shape(result.value) else None

    return find


def _name_state(results: list[Leaf], annotations: list[Dims | None]) -> None:
    """Give fresh optimizer state the names of its parameter: the one whose path ends alike.

    A moment has the parameter's shape; factored ones (Adafactor, SM3) have some of its dims, if the sizes leave no doubt.
    """
    params = [(leaf, dims) for leaf, dims in zip(results, annotations, strict=True) if leaf.kind == "params" and dims]
    by_end: dict[str, list[tuple[Leaf, Dims]]] = {}
    for leaf, dims in params:
        by_end.setdefault(leaf.path.rsplit("/", 1)[-1], []).append((leaf, dims))
    for k, leaf in enumerate(results):
        if leaf.kind != "opt" or annotations[k] is not None:
            continue
        mine = leaf.path.split("/")[::-1]
        best, length = None, 0
        for other, dims in by_end.get(mine[0], ()):
            theirs = other.path.split("/")[::-1]
            same = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            if same > length:
                best, length = (other, dims), same
        if best is not None:
            annotations[k] = _dims_like(leaf.value.shape, best[0].value.shape, best[1])


def _dims_like(shape: Sequence[int], whole: Sequence[int], dims: Dims) -> Dims | None:
    """The names of an array whose dims are some of a parameter's; None where the sizes do not tell which."""
    if len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True)):
        return tuple(None if n == 1 else d for n, d in zip(shape, dims, strict=True))
    found = {
        picks
        for picks in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[i] for i in picks) == tuple(shape)
    }
    if len(found) == 1 and shape:
        return tuple(dims[i] for i in found.pop())
    return None


def _signature(x: Any) -> Any:
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(x, bool | int | float | complex):
        return type(x)
    return np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False)


def _put(x: Any, sharding: Any) -> Any:
    """Bring an array that lies elsewhere into place; what is not yet on a device is left to jit."""
    if (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and x.committed
        and not x.sharding.is_equivalent_to(sharding, x.ndim)
    ):
        return jax.device_put(x, sharding)
    return x


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh,
    layout: LayoutLike,
    dims: DimsPatterns = None,
    lowering: Lowering = "jit",
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a function so that it runs sharded, as the layout says; the layout never changes the result.

    Args:
      fn: an ordinary function of arrays, trees of arrays, and nnx modules or optimizers (updated in place, as
        ``nnx.jit`` does). Used as a decorator if left out.
      mesh: from :func:`meshpar.mesh`, or any ``jax.sharding.Mesh`` with Auto axes.
      layout: rules ``dim: axis``; a :class:`meshpar.Layout`, its text, or a Flax ``logical_axis_rules`` list.
      dims: tree-path patterns → dims, for what carries no Flax metadata: ``{"batch/tokens": "batch seq"}``.
      lowering: ``"jit"``: XLA partitions, held to the plan by sharding constraints.
      strict: two names for one dim of the program are an error instead of a warning.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, compiler_options: as in ``jax.jit``.

    Returns:
      A :class:`Jitted`: call it; ``.plan(*args)``, ``.check(*args)``, ``.lower(*args)``, ``.trace(*args)``. Arguments that lie
      elsewhere are brought into place.

    Raises:
      MeshparError: at the first call or plan; see :mod:`meshpar.errors`.
      UnsupportedError: a lowering that does not exist.
    """
    if lowering != "jit":
        raise UnsupportedError(
            f"there is no lowering {lowering!r}", fixes=[*did_you_mean(str(lowering), ["jit"], "lowerings")]
        )
    if fn is None:
        return functools.partial(
            jit, mesh=mesh, layout=layout, dims=dims, lowering=lowering, strict=strict, static_argnums=static_argnums,
            static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            keep_unused=keep_unused, compiler_options=compiler_options,
        )  # fmt: skip
    return Jitted(
        fn, mesh, Layout(layout), _patterns(dims), strict=strict, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
        keep_unused=keep_unused, compiler_options=compiler_options,
    )  # fmt: skip


def _patterns(dims: DimsPatterns) -> PathDims:
    return dims if isinstance(dims, PathDims) else PathDims(dims)


def plan(
    fn: Callable[..., Any], *args: Any, mesh: AnyMesh, layout: LayoutLike, dims: DimsPatterns = None,
    strict: bool = False, **kwargs: Any,
) -> Plan:  # fmt: skip
    """What a layout makes each device hold and send, without devices and without compiling.

    Args:
      fn: a function, e.g. a train step.
      *args, **kwargs: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      mesh: a mesh, or a ``jax.sharding.AbstractMesh``.
      layout, dims, strict: as in :func:`meshpar.jit`.

    Returns:
      A :class:`meshpar.Plan`: print it, or read ``inputs``, ``outputs``, ``collectives``, ``notes``, ``joins``.
    """
    return jit(fn, mesh=mesh, layout=layout, dims=dims, strict=strict).plan(*args, **kwargs)


def init(
    create: Callable[..., Any], *, mesh: AnyMesh, layout: LayoutLike, dims: DimsPatterns = None, strict: bool = False
) -> Jitted:
    """Make parameters and optimizer state born sharded: no device ever holds them whole.

    Args:
      create: makes the state (``create(rng)``): trees of arrays, linen variables with metadata, nnx modules and optimizers.
      mesh, layout, strict: as in :func:`meshpar.jit`; rules for dims that the state does not have are left aside.
      dims: patterns over the tree paths of what ``create`` returns.

    Returns:
      A function with the arguments of ``create``, whose results are sharded as the layout says.
    """
    return Jitted(create, mesh, Layout(layout), _patterns(dims), strict=strict, init=True)
