"""The function that ``mp.jit`` returns: it traces, names, plans, lowers and runs, once for every set of shapes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ._compat import is_graph_node, is_tracer, without_gc
from .arguments import (
    annotation_of,
    check_patterns,
    donated_leaves,
    name_state,
    prefix_donation,
    selected_arguments,
    shape_key,
    twins,
    with_statics,
)
from .dims import Dims, PathDims
from .errors import MeshError
from .flax import Leaf, capture_names, flatten_named
from .global_arrays import global_array
from .layout import AnyMesh, Layout
from .lower import LOWERINGS
from .plan import Plan, make_plan
from .pods.agree import before_call
from .program import Program, infer, trace


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
    spans: bool  # several processes
    agreed: bool = False  # they have compared what they are about to run


class Jitted:
    """What :func:`meshpar.jit` returns: it is called, lowered and traced as the result of ``jax.jit`` is.

    Attributes:
      mesh, layout: what it was made with.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, layout: Layout, dims: PathDims, *, lowering: str = "jit", strict: bool = False,
        static_argnums: int | Sequence[int] | None = None, static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None, donate_argnames: str | Iterable[str] | None = None,
        keep_unused: bool = False, compiler_options: Mapping[str, Any] | None = None, init: bool = False,
        topology: str | None = None, overlap: str | None = None,
    ):  # fmt: skip
        functools.update_wrapper(self, fn)
        self.fn, self.mesh, self.layout, self.dims = fn, mesh, layout, dims
        self.lowering, self.strict, self.is_init = lowering, strict, init
        self.keep_unused, self.compiler_options, self.topology = keep_unused, compiler_options, topology
        self.overlap = overlap or ("auto" if lowering == "shard_map" else "off")
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        names = list(self.signature.parameters) if self.signature else []
        kinds = {p.kind for p in self.signature.parameters.values()} if self.signature else set()
        variadic = bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
        self.static = selected_arguments(static_argnums, static_argnames, names, "static", variadic)
        self.donated = selected_arguments(donate_argnums, donate_argnames, names, "donate", variadic)
        self._entries: dict[Any, _Entry] = {}
        self._plans: dict[Any, Plan] = {}
        self._traced: dict[Any, _Traced] = {}
        self._last: _Entry | None = None
        self._graph: bool | None = None

    # -- what users call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._uses_graph(args, kwargs):
            with self.pure(args, kwargs) as pure:
                out = self.run(*pure)
                _, _, result = nnx.from_tree(out, ctxtag=self, is_inner=False)
            return result
        return self.run(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``ShapeDtypeStruct``); nothing runs, nothing is compiled."""
        with self.pure(args, kwargs) as (pure, pure_kwargs):
            return self._plan(pure, pure_kwargs)[0]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, as ``jax.jit(f).lower`` does."""
        traced = self.trace(*args, **kwargs)
        with without_gc():
            return traced.lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments, as ``jax.jit(f).trace`` does."""
        with self.pure(args, kwargs) as (pure, pure_kwargs):
            entry = self.entry(pure, pure_kwargs)
        with without_gc():
            dynamic, statics = self.split(pure, pure_kwargs)
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
            flat = set(entry.donate)
            tree_donate = prefix_donation((call_args, call_kwargs), flat)
            jitted = jax.jit(
                step,
                out_shardings=jax.tree.unflatten(entry.out_tree, entry.out_shardings),
                donate_argnums=tree_donate[0],
                donate_argnames=tree_donate[1],
                keep_unused=self.keep_unused,
            )
            return jitted.trace(*call_args, **call_kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the results."""
        (dynamic, rest), statics = self.split(args, kwargs)

        def fn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = with_statics(args, kwargs, statics)
            return self.fn(*args, **kwargs)

        return jax.eval_shape(fn, dynamic, rest)

    def abstract(self, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct`` with their shardings, in the trees, boxes and modules that a call returns.

        Nothing is computed or compiled: what ``mp.init(create, …).abstract(key)`` gives is what a checkpoint is restored into.
        """
        with self.pure(args, kwargs) as pure:
            entry = self.entry(*pure)
            shapes = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s)
                for v, s in zip(entry.plan.program.outputs, entry.out_shardings, strict=True)
            ]
            out = jax.tree.unflatten(entry.out_tree, shapes)
            return nnx.from_tree(out, ctxtag=self, is_inner=False)[2] if self._graph or self.is_init else out

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Compare this layout with the unsharded run on these arguments; see :func:`meshpar.check`."""
        from .verify.check import check

        assert isinstance(self.mesh, Mesh)
        return check(self, *args, kwargs=kwargs, meshes=[self.mesh], layouts=[self.layout], lowerings=[self.lowering],
                     overlap=self.overlap)  # fmt: skip

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile ahead of time with the real compiler, for devices that need not be here; see :func:`meshpar.compile`.

        Its own options (``topology=``, ``mesh=``, ``effort=``, ``timeout=``, ``cache=``, ``progress=``,
        ``compiler_options=``) stand beside the arguments of the function.
        """
        from .verify.aot import compile

        return compile(self, *args, **kwargs)

    def on(self, mesh: AnyMesh) -> Jitted:
        """The same function under the same layout on another mesh."""
        other = copy.copy(self)
        other.mesh, other.topology = mesh, None
        other.clear_cache()
        return other

    def clear_cache(self) -> None:
        """Forget compiled programs."""
        self._entries, self._plans, self._traced = {}, {}, {}
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

    @contextlib.contextmanager
    def pure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments as trees of arrays, while in this context: nnx objects are taken apart."""
        if self._uses_graph(args, kwargs):
            with nnx.update_context(self):
                yield nnx.to_tree((args, kwargs), ctxtag=self)
        else:
            yield args, kwargs

    def function(self, tree: Any, statics: tuple[Any, ...]) -> Callable[..., Any]:
        """The function over flat arrays: it puts its arguments together, and takes apart what it updates and returns."""

        def flat(*xs: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, xs)
            args, kwargs = with_statics(args, kwargs, statics)
            if not (self._graph or self.is_init):
                return self.fn(*args, **kwargs)
            args, kwargs = nnx.from_tree((args, kwargs), ctxtag=self, is_inner=True)
            out = self.fn(*args, **kwargs)
            kept = jax.tree.map(lambda x: x if is_graph_node(x) else None, (args, kwargs), is_leaf=is_graph_node)
            return nnx.to_tree((*kept, out), ctxtag=self)

        return flat

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
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
        return (tree, statics, tuple(map(shape_key, leaves))), leaves, tree

    def _trace(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Traced, Any, list[Any], Any, tuple[Any, ...]]:
        dynamic, statics = self.split(args, kwargs)
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
        annotations = [annotation_of(leaf, self.dims, used) for leaf in named]

        with capture_names(self.mesh.axis_names):
            closed, shapes, out_leaves = trace(self.function(tree, statics), leaves)
        results = self._results(shapes)
        if len(results) != len(out_leaves):
            raise AssertionError("paths and results do not match")
        twin_of = twins(named, annotations)
        out_annotations: list[Dims | None] = []
        for leaf in results:
            mine = annotation_of(leaf, self.dims, used) if self.is_init else leaf.dims
            twin = twin_of(leaf)
            if twin is not None:
                mine = mine or twin[1]
                leaf.kind = leaf.kind or twin[0].kind
            out_annotations.append(mine)
        if self.is_init:
            name_state(results, out_annotations)
        check_patterns(self.dims, used, [leaf.path for leaf in (*named, *(results if self.is_init else ()))])
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

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Plan, _Traced, Any, Any, tuple[Any, ...]]:
        traced, key, _, tree, statics = self._trace(args, kwargs)
        plan = self._plans.get(key)
        if plan is None:
            with without_gc():
                plan = make_plan(
                    traced.program, self.layout, self.mesh, strict=self.strict, init=self.is_init,
                    topology=self.topology, donated=donated_leaves(self.split(args, kwargs)[0], self.donated, self.signature),
                    overlap=self.overlap,
                )  # fmt: skip
            self._plans[key] = plan
        return plan, traced, key, tree, statics

    def entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Entry:
        dynamic, statics = self.split(args, kwargs)
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
            flat, ins, outs = LOWERINGS[self.lowering](plan, self.mesh)
        donate = donated_leaves(dynamic, self.donated, self.signature)
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
        spans = len({d.process_index for d in self.mesh.devices.flat}) > 1
        return _Entry(tree, statics, plan, run, flat, ins, outs, donate, traced.out_tree, spans)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dynamic, statics = self.split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        last = self._last
        if last is not None and not last.spans and last.in_tree == tree and last.statics == statics:
            try:
                return jax.tree.unflatten(last.out_tree, last.run(*leaves))
            except (_Stale, ValueError):
                pass  # other shapes, or arrays that lie elsewhere: find or make the entry, and bring them into place
        entry = self.entry(args, kwargs)
        self._last = entry
        if entry.spans:
            before_call(self, entry, leaves)
        placed = [put(x, s) for x, s in zip(leaves, entry.in_shardings, strict=True)]
        return jax.tree.unflatten(entry.out_tree, entry.run(*placed))


def put(x: Any, sharding: Any) -> Any:
    """Bring an array that lies elsewhere into place; what is not yet on a device is left to jit."""
    if not sharding.is_fully_addressable and not is_tracer(x):
        return global_array(x, sharding)
    if (
        isinstance(x, jax.Array)
        and not is_tracer(x)
        and x.committed
        and not x.sharding.is_equivalent_to(sharding, x.ndim)
    ):
        return jax.device_put(x, sharding)
    return x
