"""A compiled step: the executable of a plan, for one structure and one set of shapes of the arguments."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from ...errors import RepeatedWarning, ReplicatedWarning, ReshardedWarning, UnsupportedError
from ..compat.coordination import BEFORE_CALL
from ..compat.jax import (
    PLACED,
    at_top_level,
    bound_axis_names,
    is_tracer,
    ordered_effect,
    source_line,
    user_stacklevel,
    with_auto_axes,
    with_auto_inside,
)
from ..compat.quirks import with_bounded_queue
from ..cost.flops import redundant_matmuls_despite_layout
from ..global_arrays import global_array
from ..lower import LOWERINGS
from ..plan.checks import dims_template
from ..plan.plan import Arrival
from ..plan_api import Plan
from ..program.ir import Value
from ..report import arrivals_text
from ..units import format_memory
from .arguments import Fixed
from .options import StepOptions
from .tracing import FlatFunction, TracedStep

MAX_HELD_RATIO = 1.25
"""Bytes of the state on a device relative to the plan, above which the first call warns."""


@dataclass(eq=False, slots=True)
class CompiledStep:
    """A program lowered for one structure and one set of shapes of the arguments.

    Attributes:
      flat: function from flat arguments to flat results, for tracing.
      run: the same, compiled by ``jax.jit``.
      arrays: positions of the call's leaves that are arguments of the program; None: all of them.
      donated: positions of the donated arguments.
      checks: of a step of several processes, which compare their programs and plans before its first run (:data:`BEFORE_CALL`);
        None: a step of one process.
      narrowed: position → dtype of arguments that have 64 bits, in a program that was traced without x64.
      calls: the number of its calls, up to 2: the first two look for arguments that they reshard.
      resharded: the arguments that its first call resharded.
    """

    plan: Plan
    traced: TracedStep
    flat: Callable[..., list[Any]]
    run: Any
    arrays: list[int] | None
    in_shardings: list[NamedSharding]
    out_shardings: list[NamedSharding]
    donated: tuple[int, ...]
    checks: Sequence[Callable[[Sequence[Any]], None]] | None = field(default=None, kw_only=True)
    narrowed: Mapping[int, Any] = field(default_factory=dict, kw_only=True)
    calls: int = field(default=0, kw_only=True)
    resharded: tuple[Arrival, ...] = field(default=(), kw_only=True)

    def __call__(self, leaves: list[Any]) -> Any:
        """The function's result for the leaves of a call."""
        arrays = leaves if self.arrays is None else [leaves[i] for i in self.arrays]
        if self.calls < 2:
            self._check_arguments(arrays)
        outs = self.on_arrays(arrays)
        for o, i in self.traced.unchanged.items():
            if i not in self.donated and _is_placed(arrays[i], self.in_shardings[i]):
                outs[o] = arrays[i]  # an evaluation under another layout leaves a module as it is
        return self.traced.result(outs)

    def _check_arguments(self, arrays: list[Any]) -> None:
        """Warn of arrays that the first call, or each call, reshards, and of repeated matmuls."""
        self.calls += 1
        resharded = arrivals(self.plan, arrays, self.in_shardings)
        if self.calls == 1:
            self.resharded = resharded
            _warn_of_repeated(self.plan)
            _warn_of_resharded(self.plan, arrays, self.in_shardings)
            return
        before = {a.path for a in self.resharded}
        if again := [a for a in resharded if a.path in before]:
            warnings.warn(arrivals_text(again), ReshardedWarning, stacklevel=user_stacklevel())

    def on_arrays(self, arrays: list[Any]) -> list[Any]:
        """The flat results for flat arguments; arguments with another sharding are resharded first.

        Raises:
          UnsupportedError: an array that was donated to an earlier call, or deleted.
        """
        live = (not is_tracer(x) and not (isinstance(x, jax.Array) and x.is_deleted()) for x in arrays)
        if self.checks is not None and all(live):
            for check in self.checks:
                check(arrays)
            arrays = [global_array(x, s) for x, s in zip(arrays, self.in_shardings, strict=True)]
        if self.narrowed:
            arrays = [x.astype(self.narrowed[i]) if i in self.narrowed else x for i, x in enumerate(arrays)]
        placed = [
            x if type(x) not in PLACED or (x.sharding == s and not x.is_deleted()) else self._put(x, s, arrays)
            for x, s in zip(arrays, self.in_shardings, strict=True)
        ]
        if not self.donated:
            return self.run(*placed)
        copied = []
        for i in self.donated:
            x = arrays[i]
            if type(x) in PLACED and placed[i] is x and not x.committed and x.sharding != self.in_shardings[i]:
                placed[i] = jax.device_put(x, self.in_shardings[i])
            if placed[i] is not x and type(x) in PLACED:
                copied.append((x, placed[i]))
        out = self.run(*placed)
        for x, copy in copied:  # the copy was donated in place of the argument
            if copy.is_deleted():
                x.delete()
        return out

    def _put(self, x: Any, sharding: NamedSharding, arrays: list[Any]) -> Any:
        """An argument, of ``arrays``, in a sharding. An uncommitted array is not changed, since ``jax.jit`` places it.

        Raises:
          UnsupportedError: the array is deleted.
        """
        if x.is_deleted():
            path = next(h.path for h, array in zip(self.plan.inputs, arrays, strict=True) if x is array)
            raise UnsupportedError(
                f"{path}: this array was donated to an earlier call, which took its memory, or was deleted",
                path=path,
                shape=x.shape,
                dtype=x.dtype,
                fixes=[
                    "use the result of that call: state, loss = step(state, batch)",
                    "or do not donate an array that is used again: leave it out of donate_argnames, or pass a copy",
                ],
            )
        return x if not x.committed or _same_place(x.sharding, sharding, x.ndim) else jax.device_put(x, sharding)


def _is_placed(x: Any, sharding: NamedSharding) -> bool:
    """Whether an argument is an array that its user placed on the devices of ``sharding``, under this or another sharding."""
    return type(x) in PLACED and x.committed and x.sharding.device_set == sharding.device_set


@functools.lru_cache(4096)
def _same_place(current: Any, sharding: NamedSharding, ndim: int) -> bool:
    """Whether ``current`` is a sharding over the same mesh that places an array of rank ``ndim`` as ``sharding`` does."""
    return (
        isinstance(current, NamedSharding)
        and current.mesh == sharding.mesh
        and current.is_equivalent_to(sharding, ndim)
    )


def arrivals(plan: Plan, arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[Arrival, ...]:
    """The arguments of a plan whose arrays a call reshards, so that devices receive data; not the numbers, tracers and host arrays
    among them, and not the uncommitted arrays, which their user has put on no device."""
    out = []
    for x, s, h in zip(arrays, shardings, plan.inputs, strict=True):
        if type(x) not in PLACED or x.sharding == s or x.is_deleted() or not x.committed or h.on_host:
            continue
        if x.is_fully_addressable != s.is_fully_addressable:  # in several processes, this one's copy of the value
            continue
        size = _received(x.sharding, s, x.shape) * x.dtype.itemsize
        if size:
            spec = getattr(x.sharding, "spec", None)
            source = f"{len(x.sharding.device_set)} device" if spec is None else str(spec)
            other = x.sharding.device_set != s.device_set and spec is not None
            out.append(Arrival(h.path, source + " on other devices" * other, h.spec, size))
    return tuple(out)


@functools.lru_cache(4096)
def _received(current: Any, sharding: NamedSharding, shape: tuple[int, ...]) -> int:
    """The largest number of elements of an array that a device lacks under its current sharding and has under another one."""

    def box(index: tuple[slice, ...]) -> list[range]:
        return [range(*i.indices(n)) for i, n in zip(index, shape, strict=True)]

    has, most = current.devices_indices_map(shape), 0
    for device, index in sharding.devices_indices_map(shape).items():
        needed, own = box(index), 0
        if device in has:
            pairs = zip(needed, box(has[device]), strict=True)
            own = math.prod(len(range(max(a.start, b.start), min(a.stop, b.stop))) for a, b in pairs)
        most = max(most, math.prod(map(len, needed)) - own)
    return most


def _warn_of_repeated(plan: Plan) -> None:
    """Warn (RepeatedWarning) if devices repeat a considerable part of the matmul FLOPs of a plan."""
    repeated = redundant_matmuls_despite_layout(plan)
    if repeated:
        share = sum(r.share for r in repeated)
        text = f"{100 * share:.0f} % of the matmul FLOPs of this step are repeated on several devices: {repeated[0]}"
        more = f"; {len(repeated) - 1} more such matmuls: print(step.plan(…)) lists them" if repeated[1:] else ""
        warnings.warn(text + more, RepeatedWarning, stacklevel=user_stacklevel())


def _warn_of_resharded(plan: Plan, arrays: list[Any], shardings: list[NamedSharding]) -> None:
    """Warn (ReplicatedWarning) if a device has more of the parameters and optimizer state than the plan stores on it.

    The call reshards them, but until then they take more memory than the plan says. A usual cause is an initializer without the
    names of the step: :func:`meshpar.init` does not know names that the step infers.
    """
    excess, held, planned = list[tuple[int, Value]](), 0, 0
    for x, s, value in zip(arrays, shardings, plan.program.inputs, strict=True):
        if value.kind and _is_placed(x, s):
            now, then = (math.prod(of.shard_shape(x.shape)) * x.dtype.itemsize for of in (x.sharding, s))
            held, planned = held + now, planned + then
            if now > then:
                excess.append((then - now, value))
    if held <= MAX_HELD_RATIO * planned:
        return
    values = [value for _, value in sorted(excess, key=lambda pair: pair[0])]
    params = [value for value in values if value.kind == "params"]  # optimizer state takes the names of parameters
    text = (
        f"parameters and optimizer state take {format_memory(held)} of each device before this call, and {format_memory(planned)} "
        "under the plan: the call reshards them. Give mp.init the layout and the names of the step:\n"
    )
    text += "\n".join(dims_template(plan.program, params or values, any_root=True))
    warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())


def lower_step(
    plan: Plan,
    traced: TracedStep,
    flat: FlatFunction,
    mesh: Mesh,
    options: StepOptions,
    names_off: Callable[[], AbstractContextManager[None]],
) -> CompiledStep:
    """The compiled step of a plan.

    Args:
      flat: the function, which runs unsharded where JAX runs op by op (``jax.debug_nans``), so that errors have the user's lines.
      names_off: returns a context in which constraints over dim and axis names have no effect, as on one device.

    Raises:
      UnsupportedError: ordered effects on several devices, or an op without a local form.
    """
    ordered = None if mesh.size == 1 else ordered_effect(plan.program.closed)
    if ordered is not None:
        raise UnsupportedError(
            f"{ordered.primitive.name}(ordered=True) needs one device, and the mesh has {mesh.size}",
            source=source_line(ordered),
            fixes=["leave ordered=True out", "or call it outside of the step, with a result of the step"],
        )
    on_arrays, ins, outs = LOWERINGS[plan.lowering](plan, with_auto_axes(mesh), bound=bound_axis_names())
    if AxisType.Explicit in mesh.axis_types:
        ins, outs = ([NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in side] for side in (ins, outs))
        on_arrays = with_auto_inside(on_arrays, outs)
    # equal shardings become one object, so that results passed in again compare by `is`
    same: dict[NamedSharding, NamedSharding] = {}
    ins, outs = ([same.setdefault(s, s) for s in side] for side in (ins, outs))
    donated = tuple(sorted(plan.donated))

    def step(*xs: Any) -> list[Any]:
        if at_top_level():  # JAX runs op by op: under disable_jit, or to find the op that made a NaN
            with names_off():
                return jax.tree.leaves(flat(*xs))
        return on_arrays(*xs)

    step.__name__ = getattr(flat.fn, "__name__", "step")
    how = {"in_shardings": tuple(ins), "out_shardings": list(outs), "donate_argnums": donated}
    run = _runner(functools.partial(jax.jit, step, **how, keep_unused=options.keep_unused), plan)
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        run = with_bounded_queue(run)
    fixed = flat.call.fixed
    arrays = [i for i in range(len(flat.call.leaves)) if i not in fixed] if fixed else None
    dtypes = [cast(tuple, k)[1] for k in flat.call.leaf_keys if not isinstance(k, Fixed)]
    narrowed = {i: a.dtype for i, (a, given) in enumerate(zip(traced.avals, dtypes, strict=True)) if a.dtype != given}
    checks = None
    if len({d.process_index for d in mesh.devices.flat}) > 1:
        statics = [x for _, x in flat.call.statics]
        checks = [check(flat.fn, plan, options.dims, statics) for check in BEFORE_CALL]
    return CompiledStep(plan, traced, on_arrays, run, arrays, ins, outs, donated, checks=checks, narrowed=narrowed)


def _runner(jitted: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """The function under ``jax.jit`` with the plan's compiler options; within another ``jit``, with the user's options only."""
    run = jitted(compiler_options=plan.options.values)
    if not plan.options.groups:
        return run
    inner = jitted(compiler_options=dict(plan.options.given))
    return lambda *xs: (run if at_top_level() else inner)(*xs)
