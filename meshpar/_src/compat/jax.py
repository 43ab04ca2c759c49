"""Differences between JAX versions (0.10.2 to 0.12), and uses of JAX's private APIs (:mod:`.devices` has those for compilers)."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import api_util, config, core, dispatch, effects, pjit, shard_map, source_info_util
from jax._src import mesh as mesh_lib
from jax._src.array import ArrayImpl
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal
from jax._src.lax import utils as lax_utils
from jax._src.random.prng import PRNGKeyArray
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.source_info_util import SourceInfo
from jax._src.state import discharge
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...errors import UnsupportedError

Atom = Var | Literal

T = TypeVar("T")

trace_context: Callable[[], Hashable] = config.trace_context
"""Returns the context that a trace depends on besides the function: settings (x64, matmul precision, PRNG, promotion, …), meshes in
context and named axes. JAX's own trace caches have it in their keys."""


@functools.cache
def compilations() -> list[float]:
    """The seconds of each compilation in this process since the first call of this function, which begins to record them."""
    seconds: list[float] = []

    def record(event: str, duration_secs: float, **_: str | int) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(record)
    return seconds


def bound_axis_names() -> tuple[Any, ...]:
    """The names of the axes over which this thread may run collectives: of each ``jax.vmap(axis_name=…)`` around it."""
    return tuple(core.trace_ctx.axis_env.axis_sizes)


PLACED = frozenset({ArrayImpl, PRNGKeyArray})
"""The classes of concrete arrays: ``type(x) in PLACED`` takes a tenth of the time of ``isinstance(x, jax.Array)``."""


def closed_parts(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of a Jaxpr or ClosedJaxpr: parameters of primitives may be either."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def make_jaxpr(fn: Any, *args: Any, **options: Any) -> Any:
    """``jax.make_jaxpr(fn, **options)(*args)``, in which high-level primitives of JAX 0.12 (``searchsorted``) are lowered.

    Binding such an equation again would fail: its primitive has no evaluation rule.
    """
    with without_gc(), one_trace_context():
        traced = jax.make_jaxpr(fn, **options)(*args)
    closed, *rest = traced if options.get("return_shape") else (traced,)
    if closed.jaxpr.is_high:
        closed = partial_eval.lower_jaxpr2(closed)
    return (closed, *rest) if rest else closed


def traced_as(wrapper: Any, fn: Any, names: Sequence[str]) -> None:
    """Make JAX's tracing errors for ``wrapper`` name the user's function and its arguments.

    Args:
      wrapper: the traced function of flat arguments.
      fn: the user's function, which it calls.
      names: the names of the flat arguments.
    """
    source = api_util.fun_sourceinfo(fn) or getattr(fn, "__name__", type(fn).__name__)
    wrapper.__fun_debug_info__ = core.DebugInfo("jit", source, tuple(names), core.initial_result_paths)


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """A context (or decorator) with JAX's default promotion of ranks and dtypes, for meshpar's own code.

    ``jax_numpy_rank_promotion="raise"`` and ``jax_numpy_dtype_promotion="strict"`` shall check the user's code only.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@default_promotion()
def make_generated_jaxpr(fn: Any, *args: Any) -> Any:
    """:func:`make_jaxpr` of a function that meshpar wrote: local forms, rewritten equations."""
    return make_jaxpr(fn, *args)


def one_trace_context() -> AbstractContextManager[Any]:
    """A context in which repeated traces of a function hit JAX's trace cache.

    JAX 0.10 replays the equations of a jaxpr under an empty mesh, which has another cache key than no mesh.
    """
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())


PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
FRAMEWORKS = tuple(f"{name}{os.sep}" for name in ("flax", "equinox", "haiku"))
"""Packages of layers, whose lines do not tell one use of a layer from another."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = tuple(_PACKAGE + end for end in (os.sep, f"_kernels{os.sep}"))
_STDLIB = sysconfig.get_path("stdlib")


def source_line(eqn: JaxprEqn, libraries: bool = True) -> str:
    """``file.py:12 (function)`` of the user's line that made an equation; "" if JAX has none (within its own jitted functions).

    Args:
      libraries: if there is no line outside installed packages, the innermost line of a package.
    """
    own, anyone, _ = _lines(eqn.source_info.traceback)
    return own or (anyone if libraries else "")


def package_line(eqn: JaxprEqn) -> str:
    """``transformers/models/vit/modeling_flax_vit.py:192 (__call__)`` of the line of an installed package that made an equation.

    It is the innermost line outside JAX, :data:`FRAMEWORKS` and meshpar. "" if that is the user's own line.
    """
    return _lines(eqn.source_info.traceback)[2]


def has_user_line(eqn: JaxprEqn) -> bool:
    """Whether an equation has a line of the user's."""
    return bool(_lines(eqn.source_info.traceback)[0])


@functools.lru_cache(2**13)
def _lines(traceback: Any) -> tuple[str, str, str]:
    """The innermost line outside installed packages, the innermost one outside meshpar, and the line of :func:`package_line`."""
    own = anyone = of_package = ""
    for f in source_info_util.user_frames(traceback):
        file, end = f.file_name, f":{f.start_line} ({f.function_name.rsplit('.', 1)[-1]})"
        package = next((file.rpartition(p)[2] for p in PACKAGES if p in file), None)
        if file.startswith(OURS) or (package is None and file.startswith(_STDLIB)):
            continue
        if package is None:
            own = _relative(file) + end
            break
        anyone = anyone or _relative(file) + end
        if not package.startswith(FRAMEWORKS):
            of_package = of_package or package + end
    return own, anyone, of_package


def _relative(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd()) else file


def user_line(error: BaseException) -> str | None:
    """``file.py:12 (function)`` of the innermost line of the user in an error's traceback; None: no such line."""
    for f in reversed(traceback.extract_tb(error.__traceback__)):
        if not f.filename.startswith((*OURS, _STDLIB)) and not any(p in f.filename for p in PACKAGES):
            return f"{f.filename}:{f.lineno} ({f.name})"
    return None


def user_stacklevel() -> int:
    """The ``stacklevel`` with which the caller's warning points at the first line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith((_PACKAGE, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    return level


def jit_disabled() -> bool:
    """Whether this thread is in ``jax.disable_jit()``."""
    return config.disable_jit.value


def mesh_in_context() -> Mesh | AbstractMesh:
    """The mesh of the innermost ``jax.set_mesh``, also inside ``jax.jit``, or the abstract mesh of
    ``jax.sharding.use_abstract_mesh``; empty without both."""
    abstract, concrete = jax.sharding.get_abstract_mesh(), mesh_lib.get_concrete_mesh()
    return concrete if concrete.abstract_mesh == abstract else abstract


@contextlib.contextmanager
def in_mesh(mesh: Any) -> Iterator[None]:
    """A context with ``mesh`` as JAX's mesh, in place of the mesh of ``jax.set_mesh`` around it; with its axes only, inside
    ``jax.jit`` and if its devices are not attached."""
    abstract, clean = jax.sharding.use_abstract_mesh, core.trace_state_clean()
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(None) if clean else abstract(AbstractMesh((), ())))
        stack.enter_context(jax.set_mesh(mesh) if clean and _attached(mesh) else abstract(mesh.abstract_mesh))
        yield


def _attached(mesh: Any) -> bool:
    """Whether the devices of a mesh belong to this program, in which JAX can run on them."""
    if not isinstance(mesh, Mesh):
        return False
    try:
        return mesh.devices.flat[0] in jax.devices(mesh.devices.flat[0].platform)
    except RuntimeError:  # no such platform
        return False


MAX_UNVISITED_OBJECTS = 8_000_000
"""Objects that :func:`without_gc` moves to the oldest generation between two full collections."""


MAX_STARTUP_OBJECTS = 1000
"""Most objects that Python freezes by itself when it starts: 375 in 3.12, none in 3.11."""


class _OldestGeneration:
    """Moves objects to the oldest generation of the garbage collector without visiting them.

    Attributes:
      collections: the number of full collections when objects were last moved.
      moved: objects that were moved since the last full collection.
    """

    collections = moved = 0

    def add_all(self) -> None:
        """Move all objects, or run a full collection if too many were moved since the last one."""
        collections = gc.get_stats()[2]["collections"]
        self.moved = gc.get_count()[0] + (self.moved if collections == self.collections else 0)
        self.collections = collections
        if self.moved > MAX_UNVISITED_OBJECTS:
            gc.collect()
        elif gc.get_freeze_count() <= MAX_STARTUP_OBJECTS:  # else the caller's frozen objects would be unfrozen
            # all objects move to the permanent generation, and from there to the oldest one, without a visit
            gc.freeze()
            gc.unfreeze()


_OLDEST = _OldestGeneration()


@contextlib.contextmanager
def without_gc(*, cached: bool = False) -> Iterator[None]:
    """Pause the garbage collector, while many small long-lived objects are created.

    Args:
      cached: they belong to a cached result, and few become garbage soon: they are collected by full collections only, so that no
        collection of young objects visits all of them when the context ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if cached:
                _OLDEST.add_all()
            gc.enable()


_HOST = jax.memory.Space.Host
HOST_MEMORY = "pinned_host"
"""The memory kind of arrays in host memory."""


def on_host(x: Any) -> bool:
    """Whether an array, aval or ``ShapeDtypeStruct`` is in host memory."""
    space = x.memory_space if type(x) is core.ShapedArray else getattr(getattr(x, "aval", x), "memory_space", None)
    if space is None:
        return getattr(getattr(x, "sharding", None), "memory_kind", None) in (HOST_MEMORY, "unpinned_host")
    return space is _HOST


def abstract_array(shape: Sequence[int], dtype: Any, weak_type: bool = False, host: bool = False) -> Any:
    """The abstract array for tracing: shape, dtype, weak type, and host memory if ``host``."""
    if not host:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)


def literal_array(var: Any) -> np.ndarray:
    """The array of a literal operand."""
    return np.asarray(var.val, var.aval.dtype)


def scan_counts(params: Any) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan: parameters until JAX 0.11, a tree with three branches since."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def axes_of_spec(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each of ``rank`` dims: ``PartitionSpec("a", None, ("b", "c"))`` → ``(("a",), (), ("b", "c"))``."""
    entries = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return entries + ((),) * (rank - len(entries))


def constraint_spec(eqn: Any) -> tuple[tuple[str, ...], ...] | None:
    """The spec of a ``sharding_constraint`` equation; None if a dim is unconstrained."""
    sharding = eqn.params["sharding"]
    spec = getattr(sharding, "spec", None)
    if spec is None or eqn.params.get("unconstrained_dims"):
        return None
    return axes_of_spec(spec, eqn.outvars[0].aval.ndim)


def in_auto_mesh(eqn: JaxprEqn) -> Any:
    """The equation, traced as on a mesh with Auto axes; the same object if it was not traced with Explicit ones."""
    mesh = eqn.ctx.cur_abstract_mesh
    if AxisType.Explicit not in mesh.axis_types:
        return eqn
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(with_auto_axes(mesh)):
        return eqn.replace(ctx=core.current_jaxpr_eqn_context())


class Shardings(NamedTuple):
    """The shardings that an equation has as parameters: of each operand and result, or None, and the parameters without them."""

    operands: list[Any]
    results: list[Any]
    params: dict[str, Any]


def shardings_of(eqn: JaxprEqn) -> Shardings | None:
    """The shardings over a mesh of ``out_sharding=`` of an op, of ``jax.device_put``, and of ``in_shardings`` and ``out_shardings``
    of ``jax.jit``.

    Of an op, a sharding over no axis is no constraint: derivatives and ``jnp.zeros_like`` take it from the types of arrays.
    """
    params, none = eqn.params, [None] * len(eqn.invars)
    if "out_shardings" in params:
        ins, outs = ([_constraint(s) for s in params[key]] for key in ("in_shardings", "out_shardings"))
        if not any((*ins, *outs)):
            return None
        plain = {key: (UNSPECIFIED,) * len(params[key]) for key in ("in_shardings", "out_shardings")}
        return Shardings(ins, outs, {**params, **plain})
    if eqn.primitive is dispatch.device_put_p:  # its devices are also a memory
        given = [_constraint(s) for s in params["devices"]]
        return Shardings(none, given, params) if any(given) else None
    if eqn.primitive is sharding_constraint_p:
        return None
    key = next((k for k in ("out_sharding", "sharding") if isinstance(params.get(k), NamedSharding)), None)
    if key is None:
        return None
    given = _constraint(params[key])
    return Shardings(none, [given if given is not None and any(given.spec) else None], {**params, key: None})


def _constraint(sharding: Any) -> Any:
    """A sharding over a mesh if all dims are constrained, and the value is reduced; else None."""
    if not isinstance(sharding, NamedSharding) or getattr(sharding.spec, "unreduced", None):
        return None
    return None if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec) else sharding


_tracing = threading.local()
_patch_lock = threading.Lock()
_patch_users = 0
_unpatched: list[Any] = []


def _patch_constraints() -> None:
    """Redirect sharding constraints in threads that trace with :func:`patched_constraints`; other threads are not affected."""
    import flax.linen.spmd as linen_spmd

    def constraint(plain: Any, x: Any, shardings: Any, *args: Any, **kwargs: Any) -> Any:
        result = _tracing.hooks[1](x, shardings)
        return plain(x, shardings, *args, **kwargs) if result is None else result

    def logical(plain: Any, axes: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return _tracing.hooks[0](axes, x)

    patches: list[tuple[Any, str, str, Any]] = [
        (jax.lax, "with_sharding_constraint", "hooks", constraint),
        (linen_spmd, "_with_sharding_constraint_one_fallback", "hooks", logical),
        *((module, name, "untyped", ours) for module, name, ours in _UNTYPED),
    ]
    for module, name, mode, ours in patches:
        plain = getattr(module, name)
        hooked = _redirected(plain, ours, mode)
        _unpatched.append((module, name, hooked, plain))
        setattr(module, name, hooked)


def _redirected(plain: Any, ours: Any, mode: str) -> Any:
    """A function that calls ``ours(plain, …)`` in threads whose ``mode`` is set, and ``plain(…)`` in others."""

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(plain, *args, **kwargs) if getattr(_tracing, mode, None) else plain(*args, **kwargs)

    return function


def _unpatch_constraints() -> None:
    for module, name, ours, before in _unpatched:
        if getattr(module, name) is ours:  # else another library has wrapped it since: leave its wrapper
            setattr(module, name, before)
    _unpatched.clear()


def _reshard(plain: Any, x: Any, *, dst_sharding: Any, **kwargs: Any) -> Any:
    """``jax.sharding.reshard`` as a sharding constraint; the value itself where ``auto_axes`` and ``explicit_axes`` cast with it,
    and for a partial value, which the plan reduces where it has to be."""
    unreduced = getattr(dst_sharding.spec, "unreduced", None)
    explicit = AxisType.Explicit in dst_sharding.mesh.axis_types
    cast = getattr(_tracing, "casts", False) and not any(dst_sharding.spec)
    return x if unreduced or cast or not explicit else _tracing.hooks[1](x, dst_sharding)


def _cast(plain: Any, xs: Any, shardings: Any) -> Any:
    """The ``reshard`` that JAX's own functions call."""
    _tracing.casts = True
    try:
        return plain(xs, shardings)
    finally:
        _tracing.casts = False


def _shard_map_checks(plain: Any, mesh: Any, axis_names: Any, in_specs: Any, *args: Any) -> Any:
    """JAX's checks of a ``shard_map``, on the mesh with Auto axes, where ``in_specs`` need not be the types of the operands."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if in_specs is shard_map.Infer:
        raise UnsupportedError(
            "shard_map without in_specs takes them from the types of its operands, and in a step types have no sharding",
            fixes=["give it in_specs=, as on a mesh with Auto axes"],
        )
    auto = with_auto_axes(mesh)
    with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
        return plain(auto, axis_names, in_specs, *args)


def _no_rule(plain: Any, prim: Any, rule: Any, other: Any, count: int | None, *avals: Any, **params: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return plain(prim, rule, other, count, *avals, **params)
    none = NamedSharding(mesh, PartitionSpec())
    return none if count is None else [none] * count


def _no_sharding(plain: Any, sharding: Any, shape: Any) -> Any:
    """The sharding in the type of an array: that inside a ``shard_map``, else none."""
    return plain(sharding if sharding is not None and sharding.mesh.manual_axes else None, shape)


_UNTYPED: list[tuple[Any, str, Any]] = [
    (core, "get_sharding", _no_sharding),
    (core, "check_avals_context_mesh", lambda plain, *args: None),
    (lax_utils, "call_sharding_rule", _no_rule),
    (shard_map, "_shmap_checks", _shard_map_checks),
    (pjit, "assert_shardings_equal", lambda plain, *args: None),
    (pjit, "reshard", _cast),
    (pjit.reshard_p, "bind", _reshard),
]
"""Functions of JAX, and their behaviour while a step is traced with Explicit axes: arrays have no sharding in their type, no op
requires one, and what asks for a sharding is a constraint."""


_UNTYPED_TRACE = jax.make_user_context(False)
"""Part of the key of JAX's trace caches: a function that is also traced outside of the step has shardings in its types there."""


def with_auto_axes(mesh: Any) -> Any:
    """The mesh with Auto axes in place of Explicit ones, over the same devices."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def with_auto_inside(function: Callable[..., list[Any]], outs: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function of flat arrays on a mesh with Auto axes as one of arrays with shardings in their type.

    Args:
      outs: the shardings of the results, over a mesh with Explicit axes.
    """
    if not outs:
        return function

    def run(*xs: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(with_auto_axes(outs[0].mesh.abstract_mesh)):
            results = function(*(jax.sharding.reshard(x, PartitionSpec()) for x in xs))
        types = [NamedSharding(s.mesh, core.modify_spec_for_auto_manual(s.spec, s.mesh.abstract_mesh)) for s in outs]
        return [jax.sharding.reshard(y, s) for y, s in zip(results, types, strict=True)]

    return run


def explicit_mesh(mesh: Any) -> Any:
    """The mesh itself if it has Explicit axes, else an abstract mesh with the same axes, all Explicit."""
    if AxisType.Explicit in mesh.axis_types:
        return mesh
    return mesh.abstract_mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def needs_explicit_axes(error: ValueError) -> bool:
    """Whether JAX raised an error because of ``reshard`` or ``out_sharding=`` without a mesh with Explicit axes."""
    texts = ("of type Auto or Manual", "Using PartitionSpec when you are not under a mesh", "Context mesh")
    return any(text in str(error) for text in texts)


def is_of_memories(error: Exception) -> bool:
    """Whether JAX raised an error because an op has operands in the memory of the host and of the device."""
    return isinstance(error, ValueError) and "memory_space of all inputs" in str(error)


@contextlib.contextmanager
def patched_constraints(logical: Any, constraint: Any, explicit: Any = None) -> Iterator[None]:
    """A context in which linen's logical constraints and ``with_sharding_constraint`` of this thread call these functions.

    Args:
      explicit: a mesh with Explicit axes, which is then JAX's mesh: ``reshard`` calls ``constraint``, and arrays have no sharding
        in their type (:data:`_UNTYPED`).
    """
    import flax.linen as nn

    global _patch_users
    with _patch_lock:
        if not _patch_users:
            _patch_constraints()
        _patch_users += 1
    before = getattr(_tracing, "hooks", None), getattr(_tracing, "untyped", False)
    _tracing.hooks, _tracing.untyped = (logical, constraint), explicit is not None
    # linen ignores constraints if no rule is set
    rules = nn.get_logical_axis_rules() or (("_", None),)
    try:
        with nn.logical_axis_rules(rules), contextlib.ExitStack() as stack:
            if explicit is not None:
                stack.enter_context(in_mesh(explicit))
                stack.enter_context(_UNTYPED_TRACE(True))
            yield
    finally:
        _tracing.hooks, _tracing.untyped = before
        with _patch_lock:
            _patch_users -= 1
            if not _patch_users:
                _unpatch_constraints()


def used_inputs(closed: ClosedJaxpr) -> list[bool]:
    """For each input of a closed jaxpr, whether a result or an effect depends on it."""
    return list(partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[1])


def ordered_effect(closed: ClosedJaxpr) -> Any:
    """The first equation with an ordered effect, such as ``jax.debug.print(ordered=True)``; None: no such equation."""
    ordered = effects.ordered_effects.contains
    if not any(map(ordered, closed.effects)):
        return None
    return next((e for e in equations(closed) if any(map(ordered, e.effects))), None)


def key_impl(dtype: Any) -> str:
    """The name of the PRNG of a key dtype, for ``jax.random.key(impl=)``."""
    return dtype._impl.name


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """An array of zeros; of PRNG keys, the keys of zero words."""
    return jax.lax.full(shape, 0, dtype)


def is_ref(x: Any) -> bool:
    """Whether a value or aval is a mutable array (``jax.Ref``)."""
    return isinstance(getattr(x, "aval", x), AbstractRef)


def without_refs(closed: ClosedJaxpr) -> Any:
    """The closed jaxpr, with mutable arrays (``jax.new_ref``) that it creates itself replaced by values.

    Unchanged if JAX would inline functions with custom derivatives, as in loops that write to such an array.
    """
    if getattr(core, "internal_mutable_array_effect", None) not in closed.effects:
        return closed
    pure = discharge.discharge_state(closed, lower=False)
    return pure if _custom_derivatives(pure) == _custom_derivatives(closed) else closed


def _custom_derivatives(closed: ClosedJaxpr) -> int:
    return sum(e.primitive.name.startswith("custom_") for e in equations(closed))


def requires_devices(primitive: Any) -> None:
    """Let ``jax.jit`` lower a primitive with known devices, as ops with custom partitioning need (cuDNN's attention).

    JAX looks for such ops in jaxprs; it cannot see those inside a primitive whose lowering traces a function.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def constraint_params(sharding: Any, rank: int) -> dict[str, Any]:
    """The parameters of a ``sharding_constraint`` equation in the installed JAX version."""
    sizes = sharding.mesh.shape
    shape = tuple(math.prod(sizes[a] for a in axes) for axes in axes_of_spec(sharding.spec, rank))
    jaxpr = jax.make_jaxpr(lambda x: plain_constraint(x, sharding))(jax.ShapeDtypeStruct(shape, np.float32))
    return jaxpr.eqns[0].params


def plain_constraint(x: Any, sharding: Any) -> Any:
    """``jax.lax.with_sharding_constraint``, not redirected by :func:`patched_constraints`."""
    before, _tracing.hooks = getattr(_tracing, "hooks", None), None
    try:
        return jax.lax.with_sharding_constraint(x, sharding)
    finally:
        _tracing.hooks = before


_BODIES = ("cond_jaxpr", "body_jaxpr", "jaxpr", "call_jaxpr")
"""Parameters of loops and calls that have their bodies."""


def _bodies(eqn: JaxprEqn) -> Sequence[Jaxpr | ClosedJaxpr]:
    """The bodies of a loop, branch or call, in the order of ``Op.frames``.

    A ``custom_linear_solve`` runs ``solve``; its other jaxprs are for derivatives.
    """
    p = eqn.params
    if "branches" in p:
        return p["branches"]
    return [p["jaxprs"].solve] if "jaxprs" in p else [p[k] for k in _BODIES if k in p]


def bodies_of(eqn: JaxprEqn) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """(jaxpr, consts) of each body of a loop, branch or call, in the order of ``Op.frames``."""
    return list(map(closed_parts, _bodies(eqn)))


def body_consts(eqn: JaxprEqn) -> list[Sequence[Any]]:
    """The constants of an equation's bodies, in the order of ``Op.frames``."""
    return [consts for _, consts in bodies_of(eqn)]


def body_operands(eqn: JaxprEqn, operands: Sequence[T]) -> Sequence[T]:
    """The operands of a call that its body takes, in order: of ``custom_linear_solve``, the constants of ``solve`` and the
    right-hand sides."""
    lengths = eqn.params.get("const_lengths")
    if lengths is None:
        ((body, _),) = bodies_of(eqn)
        return operands[len(operands) - len(body.invars) :]
    first = lengths.matvec + lengths.vecmat
    return [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def replace_body(eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> JaxprEqn:
    """The equation with other bodies: jaxprs in the order of ``Op.frames``."""
    params, olds = dict(eqn.params), _bodies(eqn)
    new = [
        ClosedJaxpr(body, old.consts) if isinstance(old, ClosedJaxpr) else body
        for body, old in zip(bodies, olds, strict=True)
    ]
    if "branches" in params:
        params["branches"] = tuple(new)
    elif "jaxprs" in params:
        params["jaxprs"] = params["jaxprs"]._replace(solve=new[0])
    else:
        params.update(zip((k for k in _BODIES if k in params), new, strict=True))
    return eqn.replace(params=params)


def close_over(closed: ClosedJaxpr) -> Any:
    """A function that runs a closed jaxpr as one ``jit`` call, so that tracing it is cheap."""
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    body = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=_no_debug(jaxpr))
    template = jax.make_jaxpr(jax.jit(lambda x: x))(np.float32(0)).eqns[0]
    n, m = len(body.invars), len(body.outvars)
    params = dict(template.params)
    params.update(
        jaxpr=ClosedJaxpr(body, ()),
        in_shardings=params["in_shardings"][:1] * n,
        in_layouts=params["in_layouts"][:1] * n,
        donated_invars=(False,) * n,
        out_shardings=params["out_shardings"][:1] * m,
        out_layouts=params["out_layouts"][:1] * m,
        name="step",
    )

    def run(*args: Any) -> list[Any]:
        return template.primitive.bind(*consts, *args, **params)

    return run


def _no_debug(jaxpr: Jaxpr) -> Any:
    """The debug info of a jaxpr, with an unnamed argument for each constant in front of its arguments."""
    info = jaxpr.debug_info
    names = info.arg_names
    return info if names is None else info._replace(arg_names=("",) * len(jaxpr.constvars) + tuple(names))


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without equations, also in loops and calls, whose results are not read; without such equations the same object.

    XLA removes them as well. Arguments and results do not change; equations with effects stay. Nothing is read for an array
    without elements, which is a constant.
    """
    pruned = _without_unread_operands(closed.jaxpr)
    jaxpr, _ = partial_eval.dce_jaxpr(pruned, [True] * len(pruned.outvars), instantiate=True)
    live = ClosedJaxpr(jaxpr, closed.consts)
    return closed if pruned is closed.jaxpr and number_of_equations(live) == number_of_equations(closed) else live


def _without_unread_operands(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with fewer operands of equations of which JAX has no rule that drops them: constants that no carry of a ``while``
    depends on, and operands of arrays without elements. Without such equations the same object."""

    def of_equation(eqn: JaxprEqn) -> JaxprEqn:
        name, avals = eqn.primitive.name, [aval_of(v) for v in eqn.outvars]
        if eqn.effects or name == "pallas_call":
            return eqn
        extended = any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
        if eqn.invars and len(avals) == 1 and 0 in avals[0].shape and not extended and name != "broadcast_in_dim":
            zeros = jax.make_jaxpr(lambda: jax.lax.full(avals[0].shape, 0, avals[0].dtype))().eqns[-1]
            return eqn.replace(primitive=zeros.primitive, params=zeros.params, invars=zeros.invars)
        olds = [body for body, _ in bodies_of(eqn)]
        news = list(map(_without_unread_operands, olds))
        if any(new is not old for new, old in zip(news, olds, strict=True)):
            eqn = replace_body(eqn, news)
        return _without_unread_constants(eqn) if name == "while" else eqn

    eqns = list(map(of_equation, jaxpr.eqns))
    return jaxpr if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr.replace(eqns=eqns)


def _without_unread_constants(eqn: JaxprEqn) -> JaxprEqn:
    """A ``while`` without the constants that neither a carry nor the condition depends on."""
    p, bodies, parts, counts, kept, first = eqn.params, [body for body, _ in bodies_of(eqn)], [], [], [], 0
    for body, count in zip(bodies, (p["cond_nconsts"], p["body_nconsts"]), strict=True):
        keep = [False] * count + [True] * (len(body.invars) - count)
        part, used = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=keep)
        parts.append(part)
        counts.append(sum(used[:count]))
        kept += [v for v, u in zip(eqn.invars[first : first + count], used, strict=False) if u]
        first += count
    if all(len(part.eqns) == len(body.eqns) for part, body in zip(parts, bodies, strict=True)) and len(kept) == first:
        return eqn
    pruned = replace_body(eqn, parts)
    params = {**pruned.params, "cond_nconsts": counts[0], "body_nconsts": counts[1]}
    return pruned.replace(params=params, invars=[*kept, *eqn.invars[first:]])


def on_platform(closed: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """The jaxpr as it is compiled for a platform (``tpu``, ``cuda``, ``cpu``), without dead code: each
    ``jax.lax.platform_dependent`` has its branch in place of all branches."""

    def chosen(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=list(map(of_equation, jaxpr.eqns)))

    def of_equation(eqn: JaxprEqn) -> JaxprEqn:
        platforms, bodies = eqn.params.get("branches_platforms"), [chosen(body) for body, _ in bodies_of(eqn)]
        if platforms is not None:
            own = next((k for k, names in enumerate(platforms) if names is None or platform in names), None)
            if own is not None:
                return eqn.replace(params={**eqn.params, "branches": (eqn.params["branches"][own],) * len(platforms)})
        return replace_body(eqn, bodies) if bodies else eqn

    return without_dead_code(ClosedJaxpr(chosen(closed.jaxpr), closed.consts))


def is_tracer(x: Any) -> bool:
    """Whether a value is being traced (inside ``jax.jit``, ``jax.grad``)."""
    return isinstance(x, core.Tracer)


def at_top_level() -> bool:
    """Whether this thread is not tracing (not in a function under ``jax.jit``, ``jax.grad``, …)."""
    return core.trace_ctx.is_top_level()


def source_of(eqn: JaxprEqn | None, where: JaxprEqn | None = None, scope: str = "") -> SourceInfo:
    """The name stack of ``eqn``, with a name scope, and the source line of ``where`` (default: ``eqn``); without an equation those
    of the code that JAX is tracing."""
    source = source_info_util.current() if eqn is None else eqn.source_info
    if not scope and where in (None, eqn):
        return source
    stack = source.name_stack.extend(scope) if scope else source.name_stack
    return SourceInfo((source if where is None else where.source_info).traceback, stack)


def at_source(source: SourceInfo) -> AbstractContextManager[Any]:
    """A context in which traced equations have a name stack and a source line."""
    return source_info_util.user_context(source.traceback, name_stack=source.name_stack)


def at_line_of(eqn: JaxprEqn, where: JaxprEqn | None = None) -> AbstractContextManager[Any]:
    """A context in which traced equations have the name stack of ``eqn`` and the source line of ``where`` (default: ``eqn``)."""
    return at_source(source_of(eqn, where))


def bind(eqn: JaxprEqn, args: Sequence[Any], params: Any) -> list[Any]:
    """The list of results of the equation's primitive, applied to ``args`` with ``params``."""
    bound = eqn.primitive.get_bind_params(params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def with_weak_type(x: Any, weak: bool) -> Any:
    """The array with a weak type if ``weak``, else without."""
    return x if x.aval.weak_type == weak else lax_internal._convert_element_type(x, x.dtype, weak_type=weak)


@functools.lru_cache(2**12)
def _text(name_stack: Any) -> str:
    return str(name_stack)


def module_of(eqn: JaxprEqn) -> str:
    """The path of the Flax modules and named scopes that made an equation: ``ViT/encoder/layer_0/attention``.

    A rematerialized module of Flax has its complete path after the path of the module that calls it, which is left out.
    """
    scopes = (re.sub(r"^(?:\w+\()+|\)+$", "", scope) for scope in _text(eqn.source_info.name_stack).split("/"))
    path = [s for s in scopes if s and "->" not in s and s not in _CONTROL_FLOW_SCOPES]  # without einsums
    for i in range(len(path) - 1, 0, -1):
        if path[:i] == path[i : 2 * i]:
            return "/".join(path[i:])
    return "/".join(path)


_CONTROL_FLOW_SCOPES = frozenset({"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"})


def pass_of(eqn: JaxprEqn) -> str | None:
    """``"forward"`` or ``"backward"`` for equations of a differentiated function, by their name stack; None for others."""
    stack = _text(eqn.source_info.name_stack)
    return "backward" if "transpose(" in stack else "forward" if "jvp(" in stack else None


def function_name(closed: ClosedJaxpr) -> str:
    """The name of the function that was traced, ``train_step``; "" of a lambda."""
    name = closed.jaxpr.debug_info.func_src_info.partition(" ")[0]
    return name if name.isidentifier() else ""


def in_recomputation(eqn: JaxprEqn) -> bool:
    """Whether an equation recomputes part of the forward pass for a backward pass (``jax.checkpoint``)."""
    return "rematted_computation" in _text(eqn.source_info.name_stack)


def jaxprs_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation, also those that it does not run, such as derivatives."""
    found: list[Jaxpr] = []
    for value in eqn.params.values():  # of every equation of a program, several times: without generators
        if isinstance(value, _JAXPRS):
            found.append(closed_parts(value)[0])
        elif isinstance(value, tuple | list):
            found += [closed_parts(x)[0] for x in value if isinstance(x, _JAXPRS)]
    return found


_JAXPRS = (Jaxpr, ClosedJaxpr)


def aval_of(atom: Atom) -> Any:
    """The abstract array of an atom, whose shape and dtype the type ``AbstractValue`` does not have."""
    return atom.aval


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[T],
    operands: Sequence[T],
    apply: Callable[[JaxprEqn, list[T]], Sequence[T]],
    of_literal: Callable[[Literal], T],
) -> list[T]:
    """The knowledge of an interpreter about the results of a jaxpr, from its knowledge about constants and operands.

    Args:
      apply: (equation, of each operand) → of each result.
      of_literal: of a literal.
    """
    env: dict[Var, T] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Atom) -> T:
        return of_literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, apply(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def equations(jaxpr: Jaxpr | ClosedJaxpr, seen: set[int] | None = None) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, nested jaxprs included, each jaxpr once: functions of ``jax.numpy`` share theirs.

    Args:
      seen: the ids of nested jaxprs that are left out; the others are added.
    """
    seen = set() if seen is None else seen
    for eqn in closed_parts(jaxpr)[0].eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from equations(inner, seen)


def number_of_equations(closed: ClosedJaxpr) -> int:
    """The number of equations of a closed jaxpr, nested jaxprs included."""

    @functools.cache
    def number(jaxpr: Jaxpr) -> int:
        return len(jaxpr.eqns) + sum(number(inner) for eqn in jaxpr.eqns for inner in jaxprs_in(eqn))

    return number(closed.jaxpr)


def parts_by_result(jaxpr: Jaxpr) -> list[tuple[Any, list[int]]]:
    """For every result of a jaxpr, (jaxpr that computes only this result, indices of the inputs that it reads)."""
    parts = []
    for k in range(len(jaxpr.outvars)):
        part, used = partial_eval.dce_jaxpr(jaxpr, [i == k for i in range(len(jaxpr.outvars))])
        parts.append((part, [i for i, u in enumerate(used) if u]))
    return parts


def may_be_differentiated(closed: ClosedJaxpr) -> bool:
    """Whether JAX allows a custom derivative for a function of this jaxpr: not if it has other than a few kinds of effects."""
    return not effects.custom_derivatives_allowed_effects.filter_not_in(closed.effects)
