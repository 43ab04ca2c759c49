"""What ``mp.jit`` returns: a function's signature and options, and what users call on it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .caches import LRUCache
from .compat import nnx
from .compat.jax import in_explicit_mesh, is_graph_node, jit_disabled, trace_context, without_gc
from .compiled import CompiledStep, lower_step
from .errors import MeshError, UnsupportedError
from .flax import Leaf, capture_names, flatten_named, pure_states
from .global_arrays import place
from .layout import AnyMesh, Layout
from .mesh import MeshLike, device_mesh
from .options import Lowering, Mode, StepOptions, options_apart, selected_arguments
from .passes import make_plan
from .plan_api import Plan
from .tracing import (
    Call,
    Fixed,
    FlatFunction,
    TracedStep,
    annotation_of,
    has_graph_nodes,
    leaf_key,
    trace_call,
    type_key,
    unhashable,
    with_statics,
)
from .verify.aot import Compiled, Effort, compile_lowered, mesh_to_compile_for
from .verify.check import Report, Subject, check_layouts
from .verify.jobs import Progress

NO_DONATION: dict[str, Any] = {"donate_argnums": None, "donate_argnames": None}
"""Options of a step that leaves its arguments alone."""

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

LayoutLike = Layout | str | Mapping[str, Any] | Sequence[Any]


MAX_CALLS = 2048
"""Calls of one function, by tree, shapes and static arguments, whose programs, plans and compiled code are cached. ``jax.jit``
caches as many traces."""


@dataclass(eq=False, slots=True)
class _Caches:
    """Cached results by the keys of calls; one object for a method of all instances. nnx objects are taken apart under it.

    Attributes:
      nodes: some call had nnx objects.
    """

    programs: LRUCache[Any, TracedStep] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    plans: LRUCache[Any, Plan] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    compiled: LRUCache[Any, CompiledStep] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    nodes: bool = False


class Jitted(Generic[P, R]):
    """What :func:`meshpar.jit` returns: call it; it behaves as what ``jax.jit`` returns does.

    A method may be decorated: ``self`` is the function's first argument, an nnx module or another tree of arrays, or static.
    ``trainer.step`` is then a ``Jitted`` of the other arguments.

    Attributes:
      mesh, layout: what it was made with.
      lowering, overlap: as they were asked for; the plan of a call has those that it runs with.
      topology: the slice that an abstract mesh lies on, as text, or None.
    """

    def __init__(
        self, fn: Callable[P, R], mesh: AnyMesh, layout: Layout, options: StepOptions, *, topology: str | None = None,
        init: bool = False,
    ):  # fmt: skip
        functools.update_wrapper(self, fn, updated=())
        given = getattr(fn, "__dict__", {})
        self.__dict__.update({k: x for k, x in given.items() if not hasattr(Jitted, k) and k != "__wrapped__"})
        self.mesh, self.layout, self.topology = mesh, layout, topology
        self.lowering: Lowering = options.lowering
        self.overlap: Mode | None = options.overlap
        self._fn: Callable[..., Any] = fn
        self._options, self._init = options, init
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self._signature = None
        self._static = selected_arguments(self._signature, options.static_argnums, options.static_argnames, "static")
        self._donated = selected_arguments(self._signature, options.donate_argnums, options.donate_argnames, "donate")
        self._from_end = frozenset(n for n in self._static if isinstance(n, int) and n < 0) or None
        both = sorted(n for n in self._static & self._donated if isinstance(n, str)) or self._static & self._donated
        if both:
            raise UnsupportedError(
                f"argument {', '.join(map(repr, both))} is both static and donated; a static argument has no memory to donate",
                fixes=["leave it out of donate_argnums and donate_argnames"],
            )
        self._bound: tuple[Any, ...] = ()
        self._caches = _Caches()

    # -- what users call

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...
    @overload
    def __get__(self: Jitted[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Jitted[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = object.__new__(Jitted)
        bound.__dict__ = {**self.__dict__, "_bound": (instance,), "__wrapped__": MethodType(self._fn, instance)}
        return bound

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given = (*self._bound, *args)
        caches = self._caches
        if caches.compiled and not (caches.nodes or self._init or jit_disabled() or in_explicit_mesh()):
            call = self._call(given, kwargs)
            try:
                entry = caches.compiled.get(call.key)
            except TypeError:  # a value without a hash, which the slow path names
                entry = None
            if entry is not None:
                return entry(call.leaves)
        return self._slow_call(given, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted[P, R]:
        """A copy of the function with the same options, and nothing compiled."""
        other = Jitted(
            copy.deepcopy(self._fn, memo),
            self.mesh,
            self.layout,
            self._options,
            topology=self.topology,
            init=self._init,
        )
        return other.__get__(*copy.deepcopy(self._bound, memo)) if self._bound else other

    def __repr__(self) -> str:
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.shape.items())
        made = "init" if self._init else "jit"
        name = getattr(self, "__name__", "step")
        return f'mp.{made}({name}, mesh="{mesh}", layout="{self.layout}", lowering="{self.lowering}")'

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``); nothing runs, nothing is compiled.

        Raises:
          MeshparError: names, sizes or rules that do not fit; see :mod:`meshpar.errors`.
        """
        with self._flattened((*self._bound, *args), kwargs) as call:
            return self._plan(call)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, as ``jax.jit(f).lower`` does."""
        traced = self.trace(*args, **kwargs)
        with without_gc():
            return traced.lower()

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments, as ``jax.jit(f).trace`` does."""
        with self._flattened((*self._bound, *args), kwargs) as call:
            entry = self._entry(call)
        arrays = range(len(call.leaves)) if entry.arrays is None else entry.arrays
        placed: list[Any] = [None] * len(call.leaves)
        for i, aval, s in zip(arrays, entry.traced.avals, entry.in_shardings, strict=True):
            placed[i] = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s, weak_type=aval.weak_type)
        call_args, call_kwargs = jax.tree.unflatten(call.tree, placed)
        statics = {k for k, _ in call.statics}
        call_args = tuple(x for i, x in enumerate(call_args) if i not in statics)  # as jax.jit: statics are gone

        of = replace(entry.traced, fixed=dict.fromkeys(entry.traced.fixed))  # only arrays leave a program

        def step(*a: Any, **k: Any) -> Any:
            return of.result(entry.flat(*jax.tree.leaves((a, k))))

        step.__name__ = getattr(self, "__name__", "step")
        nums, names = _prefix_donation(call_args, call_kwargs, set(entry.donated))
        jitted = jax.jit(
            step, out_shardings=of.result(entry.out_shardings), donate_argnums=nums, donate_argnames=names,
            keep_unused=self._options.keep_unused, compiler_options=entry.plan.options.values or None,
        )  # fmt: skip
        with without_gc():
            return jitted.trace(*call_args, **call_kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct``, nnx objects as objects of these; nothing runs, nothing is updated."""
        args = (*self._bound, *args)
        if self._init or has_graph_nodes((args, kwargs)):
            call = self._call(args, kwargs)
            with capture_names(self.mesh.axis_names):

                def plain(args: Any, kwargs: Any) -> Any:
                    args, kwargs = with_statics(args, kwargs, call.statics)
                    return self._fn(*args, **kwargs)

                return nnx.eval_shape(plain, *call.dynamic)
        with self._flattened(args, kwargs) as call:
            traced = self._trace(call)
        avals = [v.aval for v in traced.program.outputs]
        return traced.result([jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals])

    def abstract(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct`` with their shardings, in the trees, boxes and modules that a call returns.

        Nothing is computed or compiled: what ``mp.init(create, …).abstract(key)`` gives is what a checkpoint is restored into.

        Raises:
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        args = (*self._bound, *args)
        if has_graph_nodes((args, kwargs)):  # which the results update
            args, kwargs = nnx.clone((args, kwargs))
        with self._flattened(args, kwargs) as call:
            entry = self._entry(call)
            out = entry.traced.result(
                [
                    jax.ShapeDtypeStruct(v.shape, v.aval.dtype, sharding=s)
                    for v, s in zip(entry.plan.program.outputs, entry.out_shardings, strict=True)
                ]
            )
            return self._unflattened(call, out)

    def shardings(self, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Where the arguments belong: for each, in the order given, a tree like it of ``jax.sharding.NamedSharding``.

        An nnx module's is a tree like its ``nnx.state``. Nothing runs; arguments may be ``jax.ShapeDtypeStruct``.

            state_at, batch_at = step.shardings(state, batch)

        Raises:
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        mesh = self._device_mesh("a sharding is one over devices")
        held = {h.path: h.spec for h in self.plan(*args, **kwargs).inputs}
        return tuple(
            _map_paths(lambda leaf: NamedSharding(mesh, held[leaf.path]), x, path)
            for path, x in self._arguments(args, kwargs)
        )

    def put(self, /, *args: Any, **kwargs: Any) -> Any:
        """Bring arguments to where the step wants them: the batch of the next step, weights that were read from a file.

            batch = step.put(batch=batch)

        All of the function's arguments may be given, as in a call; or some, each by its name. Of these, arrays go to where
        they were at the last call or plan, else to where their own names (``dims=``, Flax metadata) put them. Modules are
        updated, and returned.

        Returns:
          The arguments, on devices: one alone as it is, several as a tuple.

        Raises:
          UnsupportedError: an array of which neither an earlier plan nor a name says where it belongs.
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        mesh = self._device_mesh("arrays are put on devices")
        try:
            if self._signature is not None:
                self._signature.bind(*self._bound, *args, **kwargs)
            held = {h.path: h for h in self.plan(*args, **kwargs).inputs}
        except TypeError:  # some of the arguments
            plan = self._caches.plans.latest()
            held = {h.path: h for h in plan.inputs} if plan is not None else {}

        def placed(leaf: Leaf) -> Any:
            known = held.get(leaf.path)
            if known is not None and known.shape == np.shape(leaf.value):
                return place(leaf.value, NamedSharding(mesh, known.spec))
            dims = annotation_of(leaf, self._options.dims, set())
            if dims is None:
                raise UnsupportedError(
                    f"{leaf.path}: nothing says yet where it belongs",
                    path=leaf.path,
                    shape=np.shape(leaf.value),
                    fixes=[
                        "name its dims, dims={…}",
                        "or plan or call the step first, or give step.put all of its arguments",
                    ],
                )
            spec = self.layout.spec(dims, mesh, np.shape(leaf.value), scope=leaf.kind, path=leaf.path)
            return place(leaf.value, NamedSharding(mesh, spec))

        out = []
        for path, x in self._arguments(args, kwargs):
            y = _map_paths(placed, x, path)
            if is_graph_node(x):
                nnx.update(x, y)
            out.append(x if is_graph_node(x) else y)
        return out[0] if len(out) == 1 else tuple(out)

    def check(self, /, *args: Any, **kwargs: Any) -> Report:
        """Compare this layout with the unsharded run on these arguments; see :func:`meshpar.check`.

        Returns:
          A :class:`meshpar.types.Report`: print it.

        Raises:
          CheckError: a result differs, and rounding does not explain it.
          MeshError: an abstract mesh, which has no devices to run on.
        """
        here = self._device_mesh("a check runs the step")
        return check_layouts(
            lambda mesh, *_: self._with(mesh=mesh, **NO_DONATION)._check_subject(args, kwargs),
            layouts=[self.layout], meshes=here, lowerings=[self.lowering],
        )  # fmt: skip

    @options_apart
    def compile(
        self, /, *args: Any, mesh: MeshLike | None = None, topology: str | None = None, effort: Effort = "fast",
        timeout: float | None = None, cache: bool = True, progress: Progress = None,
        compiler_options: Mapping[str, Any] | None = None, kwargs: Mapping[str, Any] | None = None, **keywords: Any,
    ) -> Compiled:  # fmt: skip
        """Compile ahead of time with the real compiler, for devices that need not be here; see :func:`meshpar.compile`.

        Args:
          *args: of the function; arrays or ``jax.ShapeDtypeStruct``.
          **keywords: those by keyword.
          kwargs: those called as an option is.
          mesh, topology: what to compile for, if not for its own mesh.
          effort, timeout, cache, progress, compiler_options: as in :func:`meshpar.compile`.
        """
        given = {**keywords, **(kwargs or {})}
        if mesh is None:
            mesh, topology = self.mesh, topology or self.topology
        where = mesh_to_compile_for(mesh, topology)
        step = self if where is self.mesh else self.on(where)
        if compiler_options:
            step = step._with(compiler_options={**self._options.compiler_options, **compiler_options})
        return compile_lowered(
            step.lower(*args, **given), effort=effort, timeout=timeout, cache=cache, progress=progress,
            name=getattr(self, "__name__", "step"), plan=step.plan(*args, **given), mesh=step.mesh,
        )  # fmt: skip

    def on(
        self, mesh: MeshLike | None = None, *, layout: LayoutLike | None = None, lowering: Lowering | None = None,
    ) -> Jitted[P, R]:  # fmt: skip
        """The same function on another mesh, under another layout, or by another lowering; what is left out stays.

        What was traced is not traced again where the mesh has axes of the same names.

        Raises:
          MeshError, LayoutSyntaxError, UnsupportedError: as :func:`meshpar.jit`.
        """
        lowering = lowering or self.lowering
        return self._with(
            mesh=self.mesh if mesh is None else device_mesh(mesh), lowering=lowering,
            layout=self.layout if layout is None else Layout(layout),
            overlap=None if lowering == "jit" else self.overlap, topology=self.topology if mesh is None else None,
        )  # fmt: skip

    def _with(self, **changed: Any) -> Jitted[P, R]:
        """The same function on another ``mesh`` or ``topology``, under another ``layout``, or with other options of
        :class:`StepOptions`; it shares the cached programs if a program does not depend on what changed."""
        own = {"mesh": self.mesh, "layout": self.layout, "topology": self.topology}
        where = {k: changed.pop(k, v) for k, v in own.items()}
        other = Jitted(self._fn, options=self._options.changed(**changed), init=self._init, **where)
        axes = set(other.mesh.axis_names)
        if (other._options.dims, other._static, axes) == (self._options.dims, self._static, set(self.mesh.axis_names)):
            other._caches.programs = self._caches.programs
        return other.__get__(*self._bound) if self._bound else other

    def clear_cache(self) -> None:
        """Forget programs, plans and compiled code."""
        for cache in (self._caches.programs, self._caches.plans, self._caches.compiled):
            cache.clear()

    # -- arguments and results

    def _slow_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """A call for which nothing is compiled yet; of nnx objects, which are taken apart and updated; or without jit."""
        if jit_disabled():
            with self._no_names()():
                return self._fn(*args, **kwargs)
        with self._flattened(args, kwargs) as call:
            return self._unflattened(call, self._entry(call)(call.leaves))

    @contextlib.contextmanager
    def _flattened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Call]:
        """The call, while in this context: nnx objects are taken apart.

        Raises:
          UnsupportedError: a static argument, or a leaf that is no array, that cannot be told from others by a hash.
        """
        nodes = self._init or has_graph_nodes((args, dict(kwargs)))
        with contextlib.ExitStack() as stack:
            if in_explicit_mesh():
                mesh = self.mesh
                stack.enter_context(
                    jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
                )
            if nodes:
                self._caches.nodes = True
                stack.enter_context(nnx.update_context(self._caches))
                args, kwargs = nnx.to_tree(pure_states((args, dict(kwargs))), ctxtag=self._caches)
            call = self._call(args, kwargs, nodes)
            try:
                hash(call.key)
            except TypeError:
                raise unhashable(call, self._argument_path) from None
            yield call

    def _unflattened(self, call: Call, out: Any) -> Any:
        """A function's result; nnx objects are updated, and put together again."""
        return nnx.from_tree(out, ctxtag=self._caches, is_inner=False)[2] if call.nodes else out

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], nodes: bool = False) -> Call:
        statics: tuple[tuple[int | str, Any], ...] = ()
        if self._static:
            at = self._static if self._from_end is None else self._static | {len(args) + n for n in self._from_end}
            statics = (
                *((i, x) for i, x in enumerate(args) if i in at),
                *((k, kwargs[k]) for k in sorted(kwargs) if k in at),
            )
            args = [None if i in at else x for i, x in enumerate(args)]
            kwargs = {k: x for k, x in kwargs.items() if k not in at}
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        leaf_keys = tuple(map(leaf_key, leaves))
        types = tuple([type_key(x) for _, x in statics]) if statics else ()
        return Call(tree, leaves, leaf_keys, statics, (trace_context(), tree, statics, types, leaf_keys), nodes)

    def _argument_path(self, i: int) -> tuple[str, ...]:
        """The path of positional argument ``i``: its name, or (name, number) within ``*args``."""
        params = list(self._signature.parameters.values()) if self._signature else []
        for k, p in enumerate(params):
            if p.kind is p.VAR_POSITIONAL and i >= k:
                return p.name, str(i - k)
        return (params[i].name if i < len(params) else str(i),)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
        """(path, argument) of every one, as they are given."""
        first = len(self._bound)
        return [
            *((self._argument_path(i), x) for i, x in enumerate(args, first)),
            *(((k,), x) for k, x in kwargs.items()),
        ]

    def _donated_leaves(self, call: Call) -> frozenset[int]:
        """Positions, among the arrays of a call, of those that belong to donated arguments."""
        if not self._donated:
            return frozenset()
        args, kwargs = call.dynamic
        out: list[int] = []
        n = 0
        for ident, x in [*enumerate(args), *sorted(kwargs.items())]:
            size = len(jax.tree.leaves(x))
            out += range(n, n + size) if ident in self._donated else ()
            n += size
        place = {i: k for k, i in enumerate(i for i in range(n) if i not in call.fixed)}
        return frozenset(place[i] for i in out if i in place)

    # -- programs, plans, entries

    def _trace(self, call: Call) -> TracedStep:
        found = self._caches.programs.get(call.key)
        if found is None:
            made = trace_call(
                call, self._flat(call), self._argument_path, self._options.dims, self.mesh.axis_names, self._init
            )
            found = self._caches.programs.put(call.key, made)
        return found

    def _plan(self, call: Call) -> Plan:
        plan = self._caches.plans.get(call.key)
        if plan is None:
            program, step = self._trace(call).program, self._options
            with without_gc():
                made = make_plan(
                    program, self.layout, self.mesh, strict=step.strict, init=self._init, topology=self.topology,
                    donated=self._donated_leaves(call), lowering=step.lowering, overlap=step.overlap, options=step.options,
                    compiler_options=step.compiler_options, calibrations=step.calibration,
                )  # fmt: skip
            plan = self._caches.plans.put(call.key, Plan.of(made))
        return plan

    def _entry(self, call: Call) -> CompiledStep:
        entry = self._caches.compiled.get(call.key)
        if entry is None:
            entry = self._caches.compiled.put(call.key, self._lower(call, self._plan(call)))
        return entry

    def _lower(self, call: Call, plan: Plan) -> CompiledStep:
        step = self._options
        return lower_step(
            plan, self._trace(call), self._flat(call), self._device_mesh(), strict=step.strict, dims=step.dims,
            names_off=self._no_names(), keep_unused=step.keep_unused, compiler_options=step.compiler_options,
        )  # fmt: skip

    def _flat(self, call: Call) -> FlatFunction:
        return FlatFunction(self._fn, call.without_leaves(), self._caches if call.nodes else None)

    def _device_mesh(self, why: str = "") -> Mesh:
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                f"an abstract mesh has no devices to run on{why and f', and {why}'}",
                fixes=["plan with it, or give mp.mesh(…)"],
            )
        return self.mesh

    def _no_names(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes a context in which constraints over names and axes mean nothing, as on one device. It does not refer to this
        object, so that compiled code may hold it."""
        return functools.partial(
            capture_names, {*self.mesh.axis_names, *(a for r in self.layout.rules for a in r.axes)}
        )

    @contextlib.contextmanager
    def _check_subject(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Subject]:
        """What a check runs and compares, for these arguments."""
        with self._flattened((*self._bound, *args), kwargs) as call:
            entry = self._entry(call)
            function = self._flat(call)
            arrays = call.leaves if entry.arrays is None else [call.leaves[i] for i in entry.arrays]

            def alone(*xs: Any) -> list[Any]:
                with self._no_names()():
                    return jax.tree.leaves(function(*xs))

            yield Subject(entry.plan, arrays, alone, entry.on_arrays, entry.in_shardings)


# -- over the arguments


def _map_paths(f: Callable[[Leaf], Any], tree: Any, path: tuple[str, ...]) -> Any:
    """A tree, or the ``nnx.state`` of a module, with ``f`` of every array; what is no array becomes None."""
    tree = nnx.state(tree) if is_graph_node(tree) else tree
    leaves = flatten_named(tree, path)
    found = [None if isinstance(leaf_key(leaf.value), Fixed) else f(leaf) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def _prefix_donation(args: Sequence[Any], kwargs: Mapping[str, Any], donated: set[int]) -> tuple[list[int], list[str]]:
    """(positions, keywords) of the arguments all of whose leaves are among these."""
    nums: list[int] = []
    names: list[str] = []
    n = 0
    for ident, x in [*enumerate(args), *sorted(kwargs.items())]:
        size = len(jax.tree.leaves(x))
        if size and donated.issuperset(range(n, n + size)):
            if isinstance(ident, int):
                nums.append(ident)
            else:
                names.append(ident)
        n += size
    return nums, names
