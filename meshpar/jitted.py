"""The function that ``mp.jit`` returns: it traces, names, plans, lowers and runs, once for every set of shapes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .compat.jax import (
    DeviceArray,
    abstract_array,
    at_top_level,
    in_explicit_mesh,
    is_graph_node,
    is_tracer,
    jit_disabled,
    on_host,
    user_line,
    user_stacklevel,
    without_gc,
)
from .compat.quirks import not_far_ahead
from .cost.flops import repeated_against_the_layout
from .dims import Dims, PathDims, did_you_mean, fit_dims, near, path_matches
from .errors import MeshError, PatternError, RepeatedWarning, UnsupportedError
from .flax import Leaf, capture_names, flatten_named, key_text, pure_states, with_states
from .global_arrays import global_array, place
from .hardware.options import OptionsMode
from .keywords import options_apart
from .layout import AnyMesh, Layout
from .lower import LOWERINGS
from .mesh import mesh as make_mesh
from .passes import make_plan
from .passes.overlap import MODES
from .planned import Plan
from .pods.agree import Sheet, before_call
from .program import Program, infer, trace
from .verify.aot import Compiled, Effort, compile_lowered, mesh_to_compile_for
from .verify.check import Report, Subject, check_layouts
from .verify.jobs import Progress

KEEP: dict[str, Any] = {"donate_argnums": None, "donate_argnames": None}
"""Options of a step that leaves its arguments alone."""

P = ParamSpec("P")
R = TypeVar("R")

Lowering = Literal["jit", "shard_map"]
Mode = Literal["auto", "xla", "ring", "pallas", "off"]
LayoutLike = Layout | str | Mapping[str, Any] | Sequence[Any]


# -- what users hand in


def check_lowering(lowering: Any, overlap: Any) -> None:
    if lowering not in LOWERINGS:
        raise UnsupportedError(
            f"there is no lowering {lowering!r}", fixes=did_you_mean(str(lowering), LOWERINGS, "lowerings")
        )
    if overlap is not None and overlap not in MODES:
        raise UnsupportedError(f"there is no overlap {overlap!r}", fixes=did_you_mean(str(overlap), MODES, "modes"))
    if lowering == "jit" and overlap in ("ring", "pallas"):
        raise UnsupportedError(
            f'overlap={overlap!r} belongs to lowering="shard_map": in lowering="jit" XLA partitions, and overlaps as it likes',
            fixes=['add lowering="shard_map"', "or leave overlap out"],
        )


def device_mesh(mesh: AnyMesh | str) -> AnyMesh:
    """A mesh as users give it; text is one over the devices that are here."""
    return make_mesh(mesh) if isinstance(mesh, str) else auto_mesh(mesh)


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The mesh with Auto axes; those of ``jax.make_mesh``, Explicit by default, are the same devices.

    Raises:
      MeshError: no mesh, or one with Manual axes.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            f"mesh={mesh!r} is no mesh", fixes=['mp.mesh("data=4, model=2"), or the text alone: "data=4, model=2"']
        )
    kinds = getattr(mesh, "axis_types", ())
    if AxisType.Manual in kinds:
        raise MeshError(
            "a mesh with Manual axes is one inside a shard_map, where everything is placed by hand",
            fixes=["call mp.jit's function outside of the shard_map"],
        )
    if AxisType.Explicit not in kinds:
        return mesh
    auto = (AxisType.Auto,) * len(kinds)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


# -- the arguments of one call


@dataclass(eq=False, slots=True)
class _Call:
    """The arguments of one call, taken apart once; all that names, plans, lowers or runs them reads this.

    Attributes:
      tree: of (args, kwargs) without the static ones, in whose places positional ones leave a None.
      leaves: of that tree; arrays, numbers, ``ShapeDtypeStruct``, and the static leaves of modules.
      statics: (position or keyword, value) of the static arguments.
      key: tells programs apart: tree, statics, and :func:`_leaf_key` of every leaf.
    """

    tree: Any
    leaves: list[Any]
    statics: tuple[tuple[int | str, Any], ...]
    key: tuple[Any, ...]

    @property
    def fixed(self) -> dict[int, Any]:
        """The leaves that are no arrays, by position."""
        return {i: k.value for i, k in enumerate(self.key[2]) if isinstance(k, _Fixed)}

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) as the tree has them."""
        return jax.tree.unflatten(self.tree, self.leaves)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A leaf that is no array: part of the program."""

    value: Any


def _joined(arrays: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
    """All leaves of a tree: the arrays, with those that are none in their positions."""
    rest = iter(arrays)
    return [fixed[i] if i in fixed else next(rest) for i in range(len(arrays) + len(fixed))]


def _with_statics(
    args: Sequence[Any], kwargs: Mapping[str, Any], statics: Sequence[tuple[int | str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with the static arguments in their places."""
    places = {k: v for k, v in statics if isinstance(k, int)}
    names = {k: v for k, v in statics if isinstance(k, str)}
    return tuple(places.get(i, x) for i, x in enumerate(args)), {**kwargs, **names}


_NOT_NUMBERS = tuple("OUSMm")
"""NumPy's kinds of dtypes for objects, texts and dates."""


def _leaf_key(x: Any) -> Hashable:
    """What a program depends on of a leaf: (shape, dtype, weak type, whether it is on the host); the type of a Python number;
    anything else whole."""
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type, on_host(aval)
    if isinstance(x, bool | int | float | complex):
        return type(x), jax.dtypes.canonicalize_dtype(type(x))
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape") or getattr(dtype, "kind", None) in _NOT_NUMBERS:
        return _Fixed(x)
    return (
        tuple(x.shape),
        jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True),
        getattr(x, "weak_type", False),
        on_host(x),
    )


def _abstract(x: Any, key: Any) -> Any:
    """What a leaf is traced as: its shape, dtype and memory, and nothing of how it is split."""
    return x if isinstance(key[0], type) else abstract_array(*key)


def _selected_arguments(nums: Any, names: Any, params: list[str], what: str, variadic: bool) -> frozenset[int | str]:
    """The positions and the names of the arguments that ``<what>_argnums`` and ``<what>_argnames`` choose.

    Raises:
      UnsupportedError: an argument that the function does not have.
    """
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


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _described(x: Any) -> str:
    if isinstance(x, str):
        return f"the text {x!r}"
    if isinstance(x, np.ndarray):
        return f"an array of {x.dtype}"
    return f"a {type(x).__name__}"


def _no_array(path: str, value: Any) -> UnsupportedError:
    name, _, rest = path.partition("/")
    fix = (
        f"make `{name}` static: static_argnames={name!r}"
        if not rest
        else "take it out of the tree, and pass it as a static argument"
    )
    return UnsupportedError(f"{path}: {_described(value)} is no JAX array", path=path, fixes=[fix])


def _check_fixed(tree: Any, argument_path: Callable[[int], tuple[str, ...]] | None = None) -> None:
    """Leaves that are no arrays belong to modules (nodes with attributes), of which they are a part as static ones are.

    Raises:
      UnsupportedError: one in a plain container.
    """
    for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(_leaf_key(x), _Fixed) and not any(isinstance(k, jax.tree_util.GetAttrKey) for k in keys):
            names = [key_text(k) for k in keys]
            if argument_path is not None:
                names = [*(argument_path(int(names[1])) if names[0] == "0" else names[1:2]), *names[2:]]
            path = "/".join(names) or "the result"
            if argument_path is None:
                raise UnsupportedError(f"{path}: a function returns JAX arrays, and {_described(x)} is none", path=path)
            raise _no_array(path, x)


@contextlib.contextmanager
def _axis_names_refused() -> Iterator[None]:
    """Say what a ``pmean`` over an axis means here: nothing, since sums over devices are the layout's."""
    try:
        yield
    except NameError as e:
        if "unbound axis name" not in str(e):
            raise
        axis = str(e).partition("unbound axis name:")[2].split(".")[0].split()[0]
        raise UnsupportedError(
            f"`{axis}` is no axis inside a step: it is written for whole arrays, and a mean over the batch is one over all devices",
            axis=axis,
            source=user_line(e),
            fixes=["delete the pmean, psum, axis_index, …: what crosses devices follows from the layout"],
        ) from e


def _has_graph_nodes(tree: Any) -> bool:
    """Whether nnx objects with identity, modules and optimizers, are in a tree; an ``nnx.State`` is a tree of arrays."""
    stop = lambda x: is_graph_node(x) or isinstance(x, nnx.State)  # noqa: E731
    return any(map(is_graph_node, jax.tree.leaves(tree, is_leaf=stop)))


# -- what is kept of a call


@dataclass(eq=False, slots=True)
class _Traced:
    """A program with its trees, before any layout.

    Attributes:
      out_tree: of the results.
      fixed: the static leaves of the results, by position; the program has the others.
      avals: of the program's arguments.
    """

    program: Program
    out_tree: Any
    fixed: dict[int, Any]
    avals: tuple[Any, ...]

    def result(self, outs: Sequence[Any]) -> Any:
        """The results as the function returns them."""
        return jax.tree.unflatten(self.out_tree, _joined(outs, self.fixed) if self.fixed else outs)


@dataclass(eq=False, slots=True)
class _Entry:
    """A program lowered for one structure and one set of shapes of the arguments.

    Attributes:
      flat: flat arguments → flat results, to be traced.
      run: the same, compiled.
      arrays: positions of the call's leaves that are arguments of the program; None: all are.
      donated: positions of the donated ones among these.
    """

    plan: Plan
    traced: _Traced
    flat: Callable[..., list[Any]]
    run: Any
    arrays: list[int] | None
    in_shardings: list[NamedSharding]
    out_shardings: list[NamedSharding]
    donated: tuple[int, ...]

    def __call__(self, leaves: list[Any]) -> Any:
        """The function's result for the leaves of a call."""
        return self.traced.result(self.on_arrays(leaves if self.arrays is None else [leaves[i] for i in self.arrays]))

    def on_arrays(self, arrays: list[Any]) -> list[Any]:
        """Flat results for flat arguments; those that lie elsewhere are brought into place first.

        Raises:
          UnsupportedError: an array whose memory an earlier call took.
        """
        try:
            placed = [
                x if type(x) is not DeviceArray or (x.sharding == s and not x.is_deleted()) else _put(x, s)
                for x, s in zip(arrays, self.in_shardings, strict=True)
            ]
        except _Deleted as deleted:
            path = next(h.path for h, x in zip(self.plan.inputs, arrays, strict=True) if x is deleted.array)
            raise UnsupportedError(
                f"{path}: this array was donated to an earlier call, which took its memory, or was deleted",
                path=path,
                shape=deleted.array.shape,
                dtype=deleted.array.dtype,
                fixes=[
                    "go on with what that call returned: state, loss = step(state, batch)",
                    "or donate nothing that is needed again: leave it out of donate_argnames, or give a copy",
                ],
            ) from None
        return self.run(*placed)


@dataclass(eq=False, slots=True)
class _SpanningEntry(_Entry):
    """One over several processes, which compare what they are about to run before they run it the first time."""

    sheet: Sheet

    def on_arrays(self, arrays: list[Any]) -> list[Any]:
        if not any(is_tracer(x) or (isinstance(x, jax.Array) and x.is_deleted()) for x in arrays):
            before_call(self.sheet, arrays)
            arrays = [global_array(x, s) for x, s in zip(arrays, self.in_shardings, strict=True)]
        return _Entry.on_arrays(self, arrays)


class _Deleted(Exception):
    def __init__(self, array: Any):
        self.array = array


def _put(x: Any, sharding: NamedSharding) -> Any:
    """An array where jit wants it; what no one put anywhere is left to jit."""
    if x.is_deleted():
        raise _Deleted(x)
    return x if not x.committed or _same_place(x.sharding, sharding, x.ndim) else jax.device_put(x, sharding)


@functools.lru_cache(4096)
def _same_place(mine: Any, sharding: NamedSharding, ndim: int) -> bool:
    return isinstance(mine, NamedSharding) and mine.mesh == sharding.mesh and mine.is_equivalent_to(sharding, ndim)


def _warn_of_repeated(plan: Plan) -> None:
    found = repeated_against_the_layout(plan)
    if found:
        share = sum(r.share for r in found)
        text = f"{100 * share:.0f} % of the products' FLOPs of this step are done more than once: {found[0]}"
        more = f"; {len(found) - 1} more such products: print(step.plan(…)) has them" if found[1:] else ""
        warnings.warn(text + more, RepeatedWarning, stacklevel=user_stacklevel())


class Jitted(Generic[P, R]):
    """What :func:`meshpar.jit` returns: call it; it behaves as what ``jax.jit`` returns does.

    Attributes:
      mesh, layout: what it was made with.
      lowering: ``"jit"`` or ``"shard_map"``.
      overlap: as in :func:`meshpar.jit`, the default filled in.
      topology: the slice that an abstract mesh lies on, as text, or None.
    """

    def __init__(
        self, fn: Callable[P, R], mesh: AnyMesh, layout: Layout, dims: PathDims, *, lowering: Lowering = "jit",
        overlap: Mode | None = None, strict: bool = False, topology: str | None = None, init: bool = False,
        static_argnums: int | Sequence[int] | None = None, static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None, donate_argnames: str | Iterable[str] | None = None,
        keep_unused: bool = False, options: OptionsMode = "auto", compiler_options: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        functools.update_wrapper(self, fn, updated=())
        self._options = {
            "mesh": mesh, "layout": layout, "dims": dims, "lowering": lowering, "overlap": overlap, "strict": strict,
            "topology": topology, "init": init, "static_argnums": static_argnums, "static_argnames": static_argnames,
            "donate_argnums": donate_argnums, "donate_argnames": donate_argnames, "keep_unused": keep_unused,
            "options": options, "compiler_options": compiler_options,
        }  # fmt: skip
        self.mesh, self.layout, self.topology = mesh, layout, topology
        self.lowering: Lowering = lowering
        self.overlap: Mode = overlap or ("auto" if lowering == "shard_map" else "off")
        self._fn: Callable[..., Any] = fn
        self._dims, self._strict, self._init = dims, strict, init
        self._keep_unused, self._compiler_options = keep_unused, dict(compiler_options or {})
        self._options_mode: OptionsMode = options
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self._signature = None
        params = self._signature.parameters if self._signature else {}
        variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params.values())
        self._static = _selected_arguments(static_argnums, static_argnames, list(params), "static", variadic)
        self._donated = _selected_arguments(donate_argnums, donate_argnames, list(params), "donate", variadic)
        self._graph = False
        self.clear_cache()

    # -- what users call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._entries and not (self._graph or self._init or jit_disabled() or in_explicit_mesh()):
            call = self._call(args, kwargs)
            try:
                entry = self._entries.get(call.key)
            except TypeError:  # a value without a hash, which the slow path names
                entry = None
            if entry is not None:
                return entry(call.leaves)
        return self._slow_call(args, kwargs)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.shape.items())
        made = "init" if self._init else "jit"
        name = getattr(self, "__name__", "step")
        return f'mp.{made}({name}, mesh="{mesh}", layout="{self.layout}", lowering="{self.lowering}")'

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``); nothing runs, nothing is compiled.

        Raises:
          MeshparError: names, sizes or rules that do not fit; see :mod:`meshpar.errors`.
        """
        with self._opened(args, kwargs) as call:
            return self._plan(call)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, as ``jax.jit(f).lower`` does."""
        traced = self.trace(*args, **kwargs)
        with without_gc():
            return traced.lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments, as ``jax.jit(f).trace`` does."""
        with self._opened(args, kwargs) as call:
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
            keep_unused=self._keep_unused, compiler_options=entry.plan.options.values or None,
        )  # fmt: skip
        with without_gc():
            return jitted.trace(*call_args, **call_kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct``, nnx objects as objects of these; nothing runs, nothing is updated."""
        call = self._call(args, kwargs)
        if self._init or _has_graph_nodes((args, kwargs)):
            with capture_names(self.mesh.axis_names):

                def plain(args: Any, kwargs: Any) -> Any:
                    args, kwargs = _with_statics(args, kwargs, call.statics)
                    return self._fn(*args, **kwargs)

                return nnx.eval_shape(plain, *call.dynamic)
        traced = self._trace(call)
        return traced.result([jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in traced.program.outputs])

    def abstract(self, *args: Any, **kwargs: Any) -> Any:
        """The results as ``jax.ShapeDtypeStruct`` with their shardings, in the trees, boxes and modules that a call returns.

        Nothing is computed or compiled: what ``mp.init(create, …).abstract(key)`` gives is what a checkpoint is restored into.

        Raises:
          MeshError: an abstract mesh.
          MeshparError: as :meth:`plan`.
        """
        if _has_graph_nodes((args, kwargs)):  # which the results update
            args, kwargs = nnx.clone((args, kwargs))
        with self._opened(args, kwargs) as call:
            entry = self._entry(call)
            out = entry.traced.result(
                [
                    jax.ShapeDtypeStruct(v.shape, v.aval.dtype, sharding=s)
                    for v, s in zip(entry.plan.program.outputs, entry.out_shardings, strict=True)
                ]
            )
            if self._graph or self._init:
                _, _, out = nnx.from_tree(out, ctxtag=self, is_inner=False)
            return out

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
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

    def put(self, *args: Any, **kwargs: Any) -> Any:
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
                self._signature.bind(*args, **kwargs)
            held = {h.path: h for h in self.plan(*args, **kwargs).inputs}
        except TypeError:  # some of the arguments
            plans = list(self._plans.values())
            held = {h.path: h for h in plans[-1].inputs} if plans else {}

        def placed(leaf: Leaf) -> Any:
            known = held.get(leaf.path)
            if known is not None and known.shape == np.shape(leaf.value):
                return place(leaf.value, NamedSharding(mesh, known.spec))
            dims = _annotation_of(leaf, self._dims, set())
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

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """Compare this layout with the unsharded run on these arguments; see :func:`meshpar.check`.

        Returns:
          A :class:`meshpar.verify.check.Report`: print it.

        Raises:
          CheckError: a result differs, and rounding does not explain it.
          MeshError: an abstract mesh, which has no devices to run on.
        """
        here = self._device_mesh("a check runs the step")
        return check_layouts(
            lambda mesh, *_: self._other(mesh=mesh, **KEEP)._subject(args, kwargs),
            layouts=[self.layout], meshes=[here], lowerings=[self.lowering],
        )  # fmt: skip

    @options_apart
    def compile(
        self, *args: Any, mesh: AnyMesh | str | None = None, topology: str | None = None, effort: Effort = "fast",
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
            step = step._other(compiler_options={**self._compiler_options, **compiler_options})
        return compile_lowered(
            step.lower(*args, **given), effort=effort, timeout=timeout, cache=cache, progress=progress,
            name=getattr(self, "__name__", "step"), plan=step.plan(*args, **given), mesh=step.mesh,
        )  # fmt: skip

    def on(
        self, mesh: AnyMesh | str | None = None, *, layout: LayoutLike | None = None, lowering: Lowering | None = None,
    ) -> Jitted[P, R]:  # fmt: skip
        """The same function on another mesh, under another layout, or by another lowering; what is left out stays.

        What was traced is not traced again where the mesh has axes of the same names.

        Raises:
          MeshError, LayoutSyntaxError, UnsupportedError: as :func:`meshpar.jit`.
        """
        lowering = lowering or self.lowering
        return self._other(
            mesh=self.mesh if mesh is None else device_mesh(mesh), lowering=lowering,
            layout=self.layout if layout is None else Layout(layout),
            overlap=self.overlap if lowering == self.lowering else None, topology=self.topology if mesh is None else None,
        )  # fmt: skip

    def _other(self, **changed: Any) -> Jitted[P, R]:
        """The same function with other options of ``__init__``; it shares the programs where these are the same."""
        check_lowering(changed.get("lowering", self.lowering), None)
        other = Jitted(self._fn, **{**self._options, **changed})
        axes = set(other.mesh.axis_names)
        if (other._dims, other._static, axes) == (self._dims, self._static, set(self.mesh.axis_names)):
            other._traced = self._traced
        return other

    def clear_cache(self) -> None:
        """Forget programs, plans and compiled code."""
        self._entries: dict[Any, _Entry] = {}
        self._plans: dict[Any, Plan] = {}
        self._traced: dict[Any, _Traced] = {}
        self._called: set[Any] = set()

    # -- arguments and results

    def _slow_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """A call for which nothing is compiled yet; of nnx objects, which are taken apart and updated; or without jit."""
        if jit_disabled():
            with self._no_names():
                return self._fn(*args, **kwargs)
        with self._opened(args, kwargs) as call:
            entry = self._entry(call)
            if call.key not in self._called:
                self._called.add(call.key)
                _warn_of_repeated(entry.plan)
            out = entry(call.leaves)
            if self._graph or self._init:
                _, _, out = nnx.from_tree(out, ctxtag=self, is_inner=False)
            return out

    @contextlib.contextmanager
    def _opened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[_Call]:
        """The call, while in this context: nnx objects are taken apart.

        Raises:
          UnsupportedError: a static argument, or a leaf that is no array, that cannot be told from others by a hash.
        """
        self._graph = self._graph or _has_graph_nodes((args, dict(kwargs)))
        with contextlib.ExitStack() as stack:
            if in_explicit_mesh():
                mesh = self.mesh
                stack.enter_context(
                    jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
                )
            if self._graph or self._init:
                stack.enter_context(nnx.update_context(self))
                args, kwargs = nnx.to_tree(pure_states((args, dict(kwargs))), ctxtag=self)
            call = self._call(args, kwargs)
            try:
                hash(call.key)
            except TypeError:
                raise self._unhashable(call) from None
            yield call

    def _unhashable(self, call: _Call) -> UnsupportedError:
        for ident, value in call.statics:
            if not _hashable(value):
                name = ident if isinstance(ident, str) else "/".join(self._argument_path(ident))
                return UnsupportedError(
                    f"{name}: a static argument must have a hash, and {_described(value)} has none",
                    path=name,
                    fixes=[
                        "a tuple, a frozenset or a frozen dataclass has one",
                        "or pass arrays, and leave it out of static_argnames",
                    ],
                )
        leaves = zip(self._named(call), call.key[2], strict=True)
        leaf = next(leaf for leaf, key in leaves if not _hashable(key))
        return _no_array(leaf.path, leaf.value)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        statics: tuple[tuple[int | str, Any], ...] = ()
        if self._static:
            statics = (
                *((i, x) for i, x in enumerate(args) if i in self._static),
                *((k, x) for k, x in kwargs.items() if k in self._static),
            )
            args = [None if i in self._static else x for i, x in enumerate(args)]
            kwargs = {k: x for k, x in kwargs.items() if k not in self._static}
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        return _Call(tree, leaves, statics, (tree, statics, tuple(map(_leaf_key, leaves))))

    def _named(self, call: _Call) -> list[Leaf]:
        """The leaves with their tree paths, names and kinds."""
        return self._named_arguments(*call.dynamic)

    def _named_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
        out: list[Leaf] = []
        for i, x in enumerate(args):
            out += flatten_named(x, self._argument_path(i))
        for k in sorted(kwargs):
            out += flatten_named(kwargs[k], (k,))
        return out

    def _argument_path(self, i: int) -> tuple[str, ...]:
        """The path of positional argument ``i``: its name, or (name, number) within ``*args``."""
        params = list(self._signature.parameters.values()) if self._signature else []
        for k, p in enumerate(params):
            if p.kind is p.VAR_POSITIONAL and i >= k:
                return p.name, str(i - k)
        return (params[i].name if i < len(params) else str(i),)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
        """(path, argument) of every one, as they are given."""
        return [*((self._argument_path(i), x) for i, x in enumerate(args)), *(((k,), x) for k, x in kwargs.items())]

    def _donated_leaves(self, call: _Call) -> frozenset[int]:
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

    def _function(self, call: _Call, told: dict[str, Any]) -> Callable[..., Any]:
        """The function over the arrays of a call: it puts its arguments together, and takes apart what it updates and returns.

        Its result has None for the leaves that are no arrays. ``told`` gets the ``tree`` of all, and these leaves, ``fixed``.
        """
        tree, statics, fixed = call.tree, call.statics, call.fixed

        def flat(*xs: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, _joined(xs, fixed))
            args, kwargs = _with_statics(args, kwargs, statics)
            if self._graph or self._init:
                opened = nnx.from_tree((args, kwargs), ctxtag=self, is_inner=True)
                args, kwargs = with_states(opened)
                out = self._fn(*args, **kwargs)
                kept = jax.tree.map(lambda x: x if is_graph_node(x) else None, opened, is_leaf=is_graph_node)
                out = nnx.to_tree((*kept, out), ctxtag=self)
            else:
                out = self._fn(*args, **kwargs)
            leaves, out_tree = jax.tree.flatten(out)
            told.update(tree=out_tree, fixed={i: x for i, x in enumerate(leaves) if isinstance(_leaf_key(x), _Fixed)})
            if not told["fixed"]:
                return out
            _check_fixed(out)
            return jax.tree.unflatten(out_tree, [None if i in told["fixed"] else x for i, x in enumerate(leaves)])

        return flat

    # -- programs, plans, entries

    def _trace(self, call: _Call) -> _Traced:
        found = self._traced.get(call.key)
        if found is None:
            found = self._traced[call.key] = self._make_program(call)
        return found

    def _make_program(self, call: _Call) -> _Traced:
        keys = call.key[2]
        named = self._named(call)
        if len(named) != len(keys):
            raise AssertionError("paths and leaves do not match")
        arrays = [
            (_abstract(leaf.value, key), leaf)
            for leaf, key in zip(named, keys, strict=True)
            if not isinstance(key, _Fixed)
        ]
        named = [leaf for _, leaf in arrays]
        used: set[str] = set()
        annotations = [_annotation_of(leaf, self._dims, used) for leaf in named]

        if call.fixed:
            _check_fixed(call.dynamic, self._argument_path)
        told: dict[str, Any] = {}
        with capture_names(self.mesh.axis_names), _axis_names_refused():
            closed, shapes, out_leaves = trace(self._function(call, told), [x for x, _ in arrays])
        results = self._results(shapes)
        if len(results) != len(out_leaves):
            raise AssertionError("paths and results do not match")
        twin_of = _twins(named, annotations)
        out_annotations: list[Dims | None] = []
        for leaf in results:
            mine = _annotation_of(leaf, self._dims, used) if self._init else leaf.dims
            twin = twin_of(leaf)
            if twin is not None:
                mine = mine or twin[1]
                leaf.kind = leaf.kind or twin[0].kind
            out_annotations.append(mine)
        if self._init:
            _name_state(results, out_annotations)
        _check_patterns(self._dims, used, [leaf.path for leaf in (*named, *(results if self._init else ()))])
        with without_gc():
            program = infer(
                closed, annotations, [leaf.path for leaf in named], out_annotations, [leaf.path for leaf in results]
            )
        for value, leaf in zip(program.inputs, named, strict=True):
            value.kind = leaf.kind
        for value, leaf in zip(program.outputs, results, strict=True):
            value.kind = value.kind or leaf.kind
        return _Traced(program, told["tree"], told["fixed"], tuple(closed.in_avals))

    def _results(self, shapes: Any) -> list[Leaf]:
        """The leaves of the results; updated arguments keep their own paths."""
        if not (self._graph or self._init):
            return flatten_named(shapes)
        args, kwargs, out = shapes
        return [*self._named_arguments(args, kwargs), *flatten_named(out)]

    def _plan(self, call: _Call) -> Plan:
        plan = self._plans.get(call.key)
        if plan is None:
            program = self._trace(call).program
            with without_gc():
                made = make_plan(
                    program, self.layout, self.mesh, strict=self._strict, init=self._init, topology=self.topology,
                    donated=self._donated_leaves(call), overlap=self.overlap, options=self._options_mode,
                    compiler_options=self._compiler_options,
                )  # fmt: skip
            plan = self._plans[call.key] = Plan.of(made)
        return plan

    def _entry(self, call: _Call) -> _Entry:
        entry = self._entries.get(call.key)
        if entry is None:
            entry = self._entries[call.key] = self._lower(call, self._plan(call))
        return entry

    def _lower(self, call: _Call, plan: Plan) -> _Entry:
        mesh = self._device_mesh()
        with without_gc():
            flat, ins, outs = LOWERINGS[self.lowering](plan, mesh)
        same: dict[NamedSharding, NamedSharding] = {}  # one object for equal ones: results go in again, told by `is`
        ins, outs = ([same.setdefault(s, s) for s in side] for side in (ins, outs))
        donated = tuple(sorted(plan.donated))

        function = self._function(call, {})

        def step(*xs: Any) -> list[Any]:
            if xs and not any(map(is_tracer, xs)):  # jax.debug_nans runs it op by op: as it is written, for its lines
                with self._no_names():
                    return jax.tree.leaves(function(*xs))
            return flat(*xs)

        step.__name__ = getattr(self, "__name__", "step")
        run = self._runner(functools.partial(
            jax.jit, step, in_shardings=tuple(ins), out_shardings=list(outs), donate_argnums=donated,
            keep_unused=self._keep_unused,
        ), plan)  # fmt: skip
        if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
            run = not_far_ahead(run)
        fixed = call.fixed
        arrays = [i for i in range(len(call.leaves)) if i not in fixed] if fixed else None
        made = plan, self._trace(call), flat, run, arrays, ins, outs, donated
        if len({d.process_index for d in mesh.devices.flat}) == 1:
            return _Entry(*made)
        sheet = Sheet(
            self._fn,
            plan,
            self.lowering,
            self._strict,
            self._dims,
            [x for _, x in call.statics],
            plan.options.values,
        )
        return _SpanningEntry(*made, sheet)

    def _runner(self, jitted: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """The program with its options of the compiler; within another ``jit``, which refuses options, with the user's alone."""
        run = jitted(compiler_options=plan.options.values or None)
        if not plan.options.groups:
            return run
        inner = jitted(compiler_options=self._compiler_options or None)
        return lambda *xs: (run if at_top_level() else inner)(*xs)

    def _device_mesh(self, why: str = "") -> Mesh:
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                f"an abstract mesh has no devices to run on{why and f', and {why}'}",
                fixes=["plan with it, or give mp.mesh(…)"],
            )
        return self.mesh

    def _no_names(self) -> AbstractContextManager[None]:
        """A context in which constraints over names and axes mean nothing, as on one device."""
        return capture_names({*self.mesh.axis_names, *(a for r in self.layout.rules for a in r.axes)})

    @contextlib.contextmanager
    def _subject(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Subject]:
        """What a check runs and compares, for these arguments."""
        with self._opened(args, kwargs) as call:
            entry = self._entry(call)
            function = self._function(call, {})
            arrays = call.leaves if entry.arrays is None else [call.leaves[i] for i in entry.arrays]

            def alone(*xs: Any) -> list[Any]:
                with self._no_names():
                    return jax.tree.leaves(function(*xs))

            yield Subject(entry.plan, arrays, alone, entry.on_arrays)


# -- what arguments and results are called


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


def _annotation_of(leaf: Leaf, patterns: PathDims, used: set[str]) -> Dims | None:
    """The dims that a pattern gives a leaf, else its own; the pattern goes among those used."""
    found = patterns.match(leaf.path)
    if found is None:
        return leaf.dims
    pattern, dims = found
    used.add(pattern)
    return fit_dims(dims, np.shape(leaf.value), path=leaf.path, origin=f"the pattern {pattern!r}")


def _check_patterns(patterns: PathDims, used: set[str], paths: list[str]) -> None:
    """Every pattern is used.

    Raises:
      PatternError: one matches nothing, or only what an earlier one matches.
    """
    for pattern, _ in patterns.items:
        if pattern in used:
            continue
        shadow = next((p for p in paths if path_matches(pattern, p)), None)
        if shadow is not None:
            earlier = patterns.match(shadow)
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


def _map_paths(f: Callable[[Leaf], Any], tree: Any, path: tuple[str, ...]) -> Any:
    """A tree, or the ``nnx.state`` of a module, with ``f`` of every array; what is no array becomes None."""
    tree = nnx.state(tree) if is_graph_node(tree) else tree
    leaves = flatten_named(tree, path)
    found = [None if isinstance(_leaf_key(leaf.value), _Fixed) else f(leaf) for leaf in leaves]
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
