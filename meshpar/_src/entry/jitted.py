"""``Jitted``, the callable that ``mp.jit`` returns."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ...errors import MeshError, UnsupportedError
from ..compat import lazy_nnx as nnx
from ..compat.jax import (
    at_top_level,
    in_mesh,
    jit_disabled,
    mesh_in_context,
    with_auto_axes,
    without_gc,
)
from ..flax import Leaf, capture_names, flatten_named, pure_states, variables
from ..global_arrays import place
from ..keywords_and_flags import takes_options
from ..layout import AnyMesh, Layout
from ..lru_cache import LRUCache
from ..mesh import MeshLike, auto_mesh, device_mesh, is_context
from ..passes import make_plan
from ..plan.request import PlanRequest
from ..plan_api import Plan
from ..progress import Progress
from ..units import mesh_text
from ..verify.aot import Compiled, Effort, compile_lowered, mesh_to_compile_for
from ..verify.check import Report, Subject, check_layouts
from .arguments import ArgumentRoles, Call, fully_donated, is_static, unhashable
from .compiled import CompiledStep, arrivals, lower_step
from .exported import Exported, export_step
from .options import Lowering, Mode, StepOptions
from .tracing import FlatFunction, TracedStep, annotation_of, metadata_names, rename_leaves, trace_call

NO_DONATION: dict[str, Any] = {"donate_argnums": None, "donate_argnames": None}
"""Options of a step that donates no argument."""

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

LayoutLike = Layout | str | Mapping[str, Any] | Sequence[Any]


MAX_CALLS = 2048
"""Number of calls of one function with different keys (tree, shapes, static arguments) whose programs, plans and compiled code are
cached; ``jax.jit`` caches as many traces."""


@dataclass(eq=False, slots=True)
class _Caches:
    """Programs, plans and compiled steps by :attr:`Call.key`; one object for a method of all instances. It is also the context tag
    under which nnx objects are split into trees.

    Attributes:
      twins: mesh with Explicit axes → the same step on it.
      nodes: some call had nnx objects.
    """

    programs: LRUCache[Any, TracedStep] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    plans: LRUCache[Any, Plan] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    compiled: LRUCache[Any, CompiledStep] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    twins: LRUCache[Any, Any] = field(default_factory=lambda: LRUCache(MAX_CALLS))
    nodes: bool = False


class Jitted(Generic[P, R]):
    """A function that runs sharded, from :func:`meshpar.jit`; it is called as the result of ``jax.jit`` is.

    A method may be decorated: ``self`` is the function's first argument, an nnx module or another tree of arrays, or static.
    ``trainer.step`` is then a ``Jitted`` of the other arguments.

    Attributes:
      mesh, layout: those given to :func:`meshpar.jit`.
      lowering, overlap: as given; the plan of a call has the resolved values.
      topology: the topology of an abstract mesh, as text, or None.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        mesh: AnyMesh,
        layout: Layout,
        options: StepOptions,
        *,
        topology: str | None = None,
        init: bool = False,
    ):
        """Wrap ``fn`` for a mesh and a layout; it is traced by the first call or plan.

        Args:
          topology: the topology of an abstract mesh, as text, or None.
          init: the function makes the state, so it need not have the dims of the batch.
        """
        functools.update_wrapper(self, fn, updated=())
        attributes = getattr(fn, "__dict__", {})
        self.__dict__.update({k: x for k, x in attributes.items() if not hasattr(Jitted, k) and k != "__wrapped__"})
        self.mesh, self.layout, self.topology = mesh, layout, topology
        self._auto = auto_mesh(mesh)
        self.lowering: Lowering = options.lowering
        self.overlap: Mode | None = options.overlap
        self._fn: Callable[..., Any] = fn
        self._options, self._init = options, init
        self._roles = ArgumentRoles(fn, options)
        self._bound: tuple[Any, ...] = ()
        self._caches = _Caches()

    # -- what users call

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...
    @overload
    def __get__(self: Jitted[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Jitted[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The ``Jitted`` with ``instance`` bound as its first argument; accessed through the class, the ``Jitted``
        itself."""
        if instance is None:
            return self
        bound = object.__new__(Jitted)
        bound.__dict__ = {**self.__dict__, "_bound": (instance,), "__wrapped__": MethodType(self._fn, instance)}
        return bound

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function sharded; the first call with these shapes, dtypes and static values traces, plans and
        compiles it."""
        all_args = (*self._bound, *args)
        caches = self._caches
        if caches.compiled and not (caches.nodes or self._init or jit_disabled()) and is_context(self.mesh):
            call = self._roles.flatten(all_args, kwargs)
            try:
                compiled = caches.compiled.get(call.key)
            except TypeError:  # a value without a hash, which the slow path names
                compiled = None
            if compiled is not None:
                return compiled(call.leaves)
        return self._slow_call(all_args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted[P, R]:
        """A copy of the function with the same options and empty caches."""
        fn = copy.deepcopy(self._fn, memo)
        other = Jitted(fn, self.mesh, self.layout, self._options, topology=self.topology, init=self._init)
        return other.__get__(*copy.deepcopy(self._bound, memo)) if self._bound else other

    def __repr__(self) -> str:
        """The call that makes it: function, mesh, layout and lowering."""
        call = f"mp.{'init' if self._init else 'jit'}({getattr(self, '__name__', 'step')}"
        return f'{call}, mesh="{mesh_text(self.mesh.shape)}", layout="{self.layout}", lowering="{self.lowering}")'

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``); nothing runs, nothing is compiled.

        Given arrays on devices, ``arrivals`` of the plan lists those that a call would reshard.

        Raises:
          MeshparError: names, sizes or rules that do not fit; see :mod:`meshpar.errors`.
        """
        with self._flattened((*self._bound, *args), kwargs) as call:
            plan, fixed = self._plan(call), call.fixed
        if not isinstance(self.mesh, Mesh):  # the plan is for devices that are not attached
            return plan
        arrays = [x for i, x in enumerate(call.leaves) if i not in fixed]
        found = arrivals(plan, arrays, [NamedSharding(self.mesh, h.spec) for h in plan.inputs])
        return replace(plan, arrivals=found) if found else plan

    @without_gc(cached=True)
    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, as ``jax.jit(f).lower`` does."""
        return self.trace(*args, **kwargs).lower()

    @without_gc(cached=True)
    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments, as ``jax.jit(f).trace`` does."""
        with self._flattened((*self._bound, *args), kwargs) as call:
            compiled = self._compiled(call)
        return trace_compiled(compiled, call, getattr(self, "__name__", "step"), self._options.keep_unused)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct``, nnx objects as objects of them; nothing is computed or updated."""
        with self._flattened_copies(args, kwargs) as call:
            traced = self._trace(call)
            avals = (v.aval for v in traced.program.outputs)
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
            return self._unflattened(call, traced.result(shapes))

    def abstract(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct`` with their shardings, in the trees, boxes and modules that a call returns.

        Nothing is computed or compiled. A checkpoint is restored into the result of ``mp.init(create, …).abstract(key)``.

        Raises:
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        with self._flattened_copies(args, kwargs) as call:
            compiled = self._compiled(call)
            outputs = zip(compiled.plan.program.outputs, compiled.out_shardings, strict=True)
            arrays = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype, sharding=s) for v, s in outputs]
            return self._unflattened(call, compiled.traced.result(arrays))

    def shardings(self, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The shardings of the arguments: for each, in the order given, a tree with a ``NamedSharding`` per array.

        For an nnx module: a tree like its ``nnx.state``. Nothing runs; arguments may be ``jax.ShapeDtypeStruct``.

            state_shardings, batch_shardings = step.shardings(state, batch)

        Raises:
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        mesh = with_devices(self.mesh, "a sharding needs devices")
        specs = {h.path: h.spec for h in self.plan(*args, **kwargs).inputs}
        return tuple(
            _map_paths(lambda leaf: NamedSharding(mesh, specs[leaf.path]), x, path)
            for path, x in self._arguments(args, kwargs)
        )

    @takes_options()
    def put(self, /, *args: Any, in_place: bool = False, kwargs: Mapping[str, Any] | None = None, **_: Any) -> Any:
        """Move arguments to the devices, sharded as the step needs them: the next batch, weights that were read from a file.

            batch = step.put(batch=batch)

        Either all arguments of the function are given, as in a call, or some by name. Each array of the latter gets its sharding
        of the last call or plan, else the sharding of its own dims (``dims=``, Flax metadata). An nnx module is copied, and
        shares no array with its copy: a trainer's updates do not change a sampler.

        Args:
          *args: arguments of the function, as in a call.
          **_: some of them by name.
          in_place: move the arrays of nnx modules into the modules themselves, instead of copies.
          kwargs: keyword arguments of the function with the names of options of this method.

        Returns:
          The arguments as sharded arrays: a single one without a tuple, several as a tuple.

        Raises:
          UnsupportedError: an array whose sharding neither an earlier plan nor a name determines.
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        kwargs = kwargs or {}
        mesh = with_devices(self.mesh, "arrays are put on devices")
        try:
            if self._roles.signature is not None:
                self._roles.signature.bind(*self._bound, *args, **kwargs)
            plan: Plan | None = self.plan(*args, **kwargs)
        except TypeError:  # some of the arguments
            plan = self._caches.plans.latest()
        inputs = {} if plan is None else {h.path: h for h in plan.inputs}

        def placed(leaf: Leaf, copy: bool) -> Any:
            """A leaf on the devices: in its sharding of the last plan, else by the layout from its own dims.

            Raises:
              UnsupportedError: neither determines its sharding.
            """
            known = inputs.get(leaf.path)
            if known is not None and known.shape == np.shape(leaf.value):
                return place(leaf.value, NamedSharding(mesh, known.spec), copy)
            rename_leaves([leaf], self._options.dims)
            dims = annotation_of(leaf, self._options.dims, set())
            if dims is None and np.ndim(leaf.value):
                raise UnsupportedError(
                    f"{leaf.path}: nothing determines its sharding yet",
                    path=leaf.path,
                    shape=np.shape(leaf.value),
                    fixes=[
                        "name its dims, dims={…}",
                        "or plan or call the step first, or give step.put all of its arguments",
                    ],
                )
            layout = self.layout.with_axis_names(metadata_names([leaf], self._options.dims), mesh)
            spec = layout.spec(dims or (), mesh, np.shape(leaf.value), scope=leaf.kind, path=leaf.path)
            return place(leaf.value, NamedSharding(mesh, spec), copy)

        out = []
        for path, x in self._arguments(args, kwargs):
            module = nnx.is_graph_node(x)
            y = _map_paths(functools.partial(placed, copy=module and not in_place), x, path)
            if module:
                x = x if in_place else nnx.clone(x)
                nnx.update(x, y)
            out.append(x if module else y)
        return out[0] if len(out) == 1 else tuple(out)

    def check(self, /, *args: Any, **kwargs: Any) -> Report:
        """Compare this layout with the unsharded run on these arguments; see :func:`meshpar.check`.

        Returns:
          A :class:`meshpar.types.Report`: print it.

        Raises:
          CheckError: a result differs by more than rounding.
          MeshError: an abstract mesh, which has no devices to run on.
        """
        mesh = with_devices(self.mesh, "a check runs the step")

        def subject(mesh: Mesh, *_: Any) -> contextlib.AbstractContextManager[Subject]:
            return self._with(mesh=mesh, **NO_DONATION)._check_subject(args, kwargs)

        return check_layouts(subject, layouts=[self.layout], meshes=mesh, lowerings=[self.lowering])

    @takes_options()
    def compile(
        self,
        /,
        *args: Any,
        mesh: MeshLike | None = None,
        topology: str | None = None,
        effort: Effort = "fast",
        timeout: float | None = None,
        cache: bool = True,
        progress: Progress = "auto",
        compiler_options: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Compiled:
        """Compile ahead of time with the real compiler, for devices that need not be attached; see :func:`meshpar.compile`.

        Args:
          *args: arguments of the function; arrays or ``jax.ShapeDtypeStruct``.
          **_: its keyword arguments.
          kwargs: its keyword arguments with the names of options of this method.
          mesh, topology: the target; default: the mesh and topology of this object.
          effort, timeout, cache, progress, compiler_options: as in :func:`meshpar.compile`.
        """
        kwargs = kwargs or {}
        if mesh is None:
            mesh, topology = self.mesh, topology or self.topology
        target = mesh_to_compile_for(mesh, topology)
        step = self if target is self.mesh else self.on(target)
        if compiler_options:
            step = step._with(compiler_options={**self._options.compiler_options, **compiler_options})
        lowered, plan = step.lower(*args, **kwargs), step.plan(*args, **kwargs)
        return compile_lowered(
            lowered,
            effort=effort,
            timeout=timeout,
            cache=cache,
            progress=progress,
            name=getattr(self, "__name__", "step"),
            plan=plan,
            mesh=step.mesh,
        )

    def export(
        self, /, *args: Any, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = (), **kwargs: Any
    ) -> Exported:
        """Export the step for these arguments: StableHLO with the shardings inside, which runs without the step's code.

        Args:
          *args: arguments of the function; arrays or ``jax.ShapeDtypeStruct``. Static arguments become part of the program.
          platforms: to lower for, ``["tpu"]``; default: the platform of the mesh's devices.
          disabled_checks: as in ``jax.export.export``: custom calls to allow.

        Returns:
          A :class:`meshpar.types.Exported`: call it, or ``save`` it for :meth:`meshpar.types.Exported.load`.

        Raises:
          MeshError: an abstract mesh.
          UnsupportedError: a custom call that JAX does not export, or an argument or result in host memory.
          MeshparError: as :meth:`plan`.

        Example:
          >>> exported = step.export(params, x)
          >>> exported.outputs[-1].path
          '1'
        """
        with self._flattened((*self._bound, *args), kwargs) as call:
            compiled = self._compiled(call)
        names = ["/".join(self._roles.path(i)) for i in range(len(self._bound) + len(args))]
        return export_step(compiled, call, getattr(self, "__name__", "step"), names, platforms, disabled_checks)

    def on(
        self, mesh: MeshLike | None = None, *, layout: LayoutLike | None = None, lowering: Lowering | None = None
    ) -> Jitted[P, R]:
        """The same function with another mesh, layout or lowering; arguments that are left out do not change.

        Cached traces are reused if the mesh has the same axis names.

        Raises:
          MeshError, LayoutSyntaxError, UnsupportedError: as :func:`meshpar.jit`.
        """
        return self._with(
            mesh=self.mesh if mesh is None else device_mesh(mesh),
            topology=self.topology if mesh is None else None,
            layout=self.layout if layout is None else Layout(layout),
            lowering=lowering or self.lowering,
        )

    def _with(self, **changed: Any) -> Jitted[P, R]:
        """The same function with another ``mesh``, ``topology``, ``layout`` or other options of :class:`StepOptions`. It shares the
        cached programs if these do not depend on the changes."""
        own = {"mesh": self.mesh, "layout": self.layout, "topology": self.topology}
        own = {k: changed.pop(k, v) for k, v in own.items()}
        other = Jitted(self._fn, options=self._options.changed(**changed), init=self._init, **own)
        ours, theirs = ((j._options.dims, j._roles.static, set(j.mesh.axis_names)) for j in (self, other))
        if ours == theirs:
            other._caches.programs = self._caches.programs
        return other.__get__(*self._bound) if self._bound else other

    def clear_cache(self) -> None:
        """Delete all cached programs, plans and compiled code."""
        for cache in (self._caches.programs, self._caches.plans, self._caches.compiled, self._caches.twins):
            cache.clear()

    # -- arguments and results

    def _slow_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """A call that is not compiled yet, has nnx objects (split into trees, then updated), or is under ``disable_jit``."""
        if jit_disabled():
            with self._no_names(self.mesh if self.mesh is not self._auto else None)():
                return self._fn(*args, **kwargs)
        step = self._on_context()
        if step is not self:
            return step._slow_call(args, kwargs)
        with self._flattened(args, kwargs) as call:
            compiled = self._compiled(call)
            out = self._unflattened(call, compiled(call.leaves))
        if not call.nodes:  # the key depends on the mesh in context
            self._caches.compiled.put(self._roles.flatten(args, kwargs).key, compiled)
        return out

    def _on_context(self) -> Jitted[P, R]:
        """This step, or the same step on the mesh of ``jax.set_mesh`` if that differs only in that its axes are Explicit: the
        results are arrays of that mesh.

        Raises:
          MeshError: inside a ``jax.jit`` whose mesh cannot be replaced by the mesh of the step.
        """
        context, own = mesh_in_context(), self._auto
        explicit = AxisType.Explicit in context.axis_types
        equal = with_auto_axes(context) in (own, own.abstract_mesh)
        if explicit and equal and self.mesh is own and isinstance(own, Mesh):
            mesh = Mesh(own.devices, own.axis_names, axis_types=context.axis_types)
            return self._caches.twins.setdefault(mesh, lambda: self._with(mesh=mesh))
        if context.empty or at_top_level() or AxisType.Manual in context.axis_types:
            return self
        if context.size != own.size or (explicit and not equal):
            raise MeshError(
                f"this step is on the mesh ({mesh_text(own.shape)}), and is called inside a jax.jit or another transformation "
                f"under jax.set_mesh of ({mesh_text(context.shape)})",
                fixes=[
                    "leave mesh= out: the step then takes the mesh of jax.set_mesh",
                    "or call the step outside of the jax.jit, or under jax.set_mesh of its own mesh",
                ],
            )
        return self

    @contextlib.contextmanager
    def _flattened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Call]:
        """A context with the flattened call, in which nnx objects are split into trees.

        Raises:
          UnsupportedError: a static argument, or a leaf that is not an array, without a hash.
        """
        nodes = self._init or nnx.has_graph_nodes((args, dict(kwargs)))
        with contextlib.ExitStack() as stack:
            if not is_context(self._auto):
                stack.enter_context(in_mesh(self._auto))
            if nodes:
                self._caches.nodes = True
                stack.enter_context(nnx.update_context(self._caches))
                args, kwargs = nnx.to_tree(pure_states((args, dict(kwargs))), ctxtag=self._caches)
            call = self._roles.flatten(args, kwargs, nodes)
            try:
                hash(call.key)
            except TypeError:
                raise unhashable(call, self._roles.path) from None
            yield call

    def _flattened_copies(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Call]:
        """:meth:`_flattened`, with copies of nnx objects: the caller's are not updated."""
        args = (*self._bound, *args)
        if nnx.has_graph_nodes((args, kwargs)):
            args, kwargs = nnx.clone((args, kwargs))
        return self._flattened(args, kwargs)

    def _unflattened(self, call: Call, out: Any) -> Any:
        """The result of a call from its tree; nnx objects are updated and rebuilt."""
        return nnx.from_tree(out, ctxtag=self._caches, is_inner=False)[2] if call.nodes else out

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
        """(tree path, argument) of all arguments, in the order given."""
        positional = ((self._roles.path(i), x) for i, x in enumerate(args, len(self._bound)))
        return [*positional, *(((k,), x) for k, x in kwargs.items())]

    # -- programs, plans, compiled steps

    def _trace(self, call: Call) -> TracedStep:
        """The traced program of a call, with the names of all dims, cached by the key of the call."""

        def traced() -> TracedStep:
            return trace_call(call, self._flat(call), self._roles.path, self._options.dims, self.mesh, self._init)

        return self._caches.programs.setdefault(call.key, traced)

    def _plan(self, call: Call) -> Plan:
        """The plan of a call, after all passes, cached by the key of the call."""

        def plan() -> Plan:
            how = {"init": self._init, "donated": self._roles.donated_arrays(call), **self._options.of_plan}
            request = PlanRequest(self.layout, self._auto, self.topology, **how)
            with without_gc(cached=True):
                return Plan.of(make_plan(self._trace(call).program, request))

        return self._caches.plans.setdefault(call.key, plan)

    def _compiled(self, call: Call) -> CompiledStep:
        """The compiled step for a call, cached by its key.

        The order of all stages of meshpar, from the function to the executable:

        1. *trace*: the function becomes a jaxpr; *names*: the names of some dims spread to all values (:mod:`entry.tracing`,
           :mod:`program`);
        2. *rewrite*: the forms in which the program can be planned (:mod:`plan.program_variants`); *assign*: axes to the dims of
           every value and the factors of every op (:mod:`plan.assignment`); *emit*: the steps of every device, the best
           plan of all forms (:mod:`plan.planner`); *passes*: the lowering, compiler options, rings, barriers
           (:mod:`passes`);
        3. *lower*: the steps become a function of arrays, which ``jax.jit`` compiles (:mod:`lower`).
        """
        compiled = self._caches.compiled.get(call.key)
        if compiled is None:
            with without_gc(cached=True):
                traced, plan = self._trace(call), self._plan(call)
                flat, mesh, names_off = self._flat(call), with_devices(self.mesh), self._no_names(traced.explicit)
                compiled = lower_step(plan, traced, flat, mesh, self._options, names_off)
            self._caches.compiled.put(call.key, compiled)
        return compiled

    def _flat(self, call: Call) -> FlatFunction:
        return FlatFunction(self._fn, call.without_leaves(), self._caches if call.nodes else None)

    def _no_names(self, explicit: AnyMesh | None = None) -> Callable[[], AbstractContextManager[Any]]:
        """A function that returns a context in which sharding constraints over dim and axis names have no effect, as on one device.
        It does not refer to this object, so that compiled steps may refer to it.

        Args:
          explicit: :attr:`TracedStep.explicit`.
        """
        axes = {*self.mesh.axis_names, *self.layout.axes}
        return functools.partial(capture_names, axes, explicit)

    @contextlib.contextmanager
    def _check_subject(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Subject]:
        """The sharded and the unsharded function of these arguments, which a check compares."""
        with self._flattened((*self._bound, *args), kwargs) as call:
            compiled = self._compiled(call)
            function = self._flat(call)
            arrays = call.leaves if compiled.arrays is None else [call.leaves[i] for i in compiled.arrays]

            def unsharded(*xs: Any) -> list[Any]:
                with self._no_names(compiled.traced.explicit)():
                    return jax.tree.leaves(function(*xs))

            yield Subject(compiled.plan, arrays, unsharded, compiled.on_arrays, compiled.in_shardings)


def with_devices(mesh: AnyMesh, why: str = "") -> Mesh:
    """The mesh, which must have devices.

    Args:
      why: a clause for the error text, such as "arrays are put on devices".

    Raises:
      MeshError: the mesh is abstract.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"an abstract mesh has no devices to run on{why and f', and {why}'}",
            fixes=["plan with it, or give mp.mesh(…)"],
        )
    return mesh


def trace_compiled(compiled: CompiledStep, call: Call, name: str, keep_unused: bool) -> jax.stages.Traced:
    """The ``jax.stages.Traced`` of a compiled step as a function of the call's own tree of arguments, without its static ones.

    Args:
      name: of the function that JAX sees.
      keep_unused: as in ``jax.jit``.
    """
    arrays = range(len(call.leaves)) if compiled.arrays is None else compiled.arrays
    leaves: list[Any] = [None] * len(call.leaves)
    for i, aval, s in zip(arrays, compiled.traced.avals, compiled.in_shardings, strict=True):
        leaves[i] = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s, weak_type=aval.weak_type)
    args, kwargs = jax.tree.unflatten(call.tree, leaves)
    statics = {k for k, _ in call.statics}
    args = tuple(x for i, x in enumerate(args) if i not in statics)  # jax.jit removes static arguments as well
    results = replace(compiled.traced, fixed=dict.fromkeys(compiled.traced.fixed))  # JAX's programs return arrays only

    def step(*a: Any, **k: Any) -> Any:
        return results.result(compiled.flat(*jax.tree.leaves((a, k))))

    step.__name__ = name
    nums, names = fully_donated(args, kwargs, set(compiled.donated))
    how: Any = {"donate_argnums": nums, "donate_argnames": names, "keep_unused": keep_unused}
    how.update(out_shardings=results.result(compiled.out_shardings), compiler_options=compiled.plan.options.values)
    return jax.jit(step, **how).trace(*args, **kwargs)


def _map_paths(f: Callable[[Leaf], Any], tree: Any, path: tuple[str, ...]) -> Any:
    """A tree, or the ``nnx.state`` of a module, with ``f`` applied to every array and None in place of other leaves."""
    tree = variables(tree)
    results = [None if is_static(leaf.value) else f(leaf) for leaf in flatten_named(tree, path)]
    return jax.tree.unflatten(jax.tree.structure(tree), results)
