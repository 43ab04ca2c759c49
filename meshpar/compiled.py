"""A compiled step: what runs a plan for one structure and one set of shapes of the arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding

from .arguments import Fixed
from .compat.jax import (
    PLACED,
    at_top_level,
    bound_axis_names,
    is_tracer,
    ordered_effect,
    source_line,
    user_stacklevel,
    without_gc,
)
from .compat.quirks import with_bounded_queue
from .cost.flops import redundant_matmuls_despite_layout
from .dims import PathDims
from .errors import RepeatedWarning, UnsupportedError
from .global_arrays import global_array
from .lower import LOWERINGS
from .plan_api import Plan
from .pods.agree import Sheet, before_call
from .tracing import FlatFunction, TracedStep


@dataclass(eq=False, slots=True)
class CompiledStep:
    """A program lowered for one structure and one set of shapes of the arguments.

    Attributes:
      flat: flat arguments → flat results, to be traced.
      run: the same, compiled.
      arrays: positions of the call's leaves that are arguments of the program; None: all are.
      donated: positions of the donated ones among these.
      narrowed: position → dtype of the arrays of 64 bits that were made under x64, for a program that was traced without.
      called: it has been.
    """

    plan: Plan
    traced: TracedStep
    flat: Callable[..., list[Any]]
    run: Any
    arrays: list[int] | None
    in_shardings: list[NamedSharding]
    out_shardings: list[NamedSharding]
    donated: tuple[int, ...]
    narrowed: Mapping[int, Any] = field(default_factory=dict, kw_only=True)
    called: bool = field(default=False, kw_only=True)

    def __call__(self, leaves: list[Any]) -> Any:
        """The function's result for the leaves of a call."""
        if not self.called:
            self.called = True
            _warn_of_repeated(self.plan)
        return self.traced.result(self.on_arrays(leaves if self.arrays is None else [leaves[i] for i in self.arrays]))

    def on_arrays(self, arrays: list[Any]) -> list[Any]:
        """FlatFunction results for flat arguments; those that lie elsewhere are brought into place first.

        Raises:
          UnsupportedError: an array whose memory an earlier call took.
        """
        if self.narrowed:
            arrays = [x.astype(self.narrowed[i]) if i in self.narrowed else x for i, x in enumerate(arrays)]
        try:
            placed = [
                x if type(x) not in PLACED or (x.sharding == s and not x.is_deleted()) else _put(x, s)
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
        for x, copy in copied:  # what was donated is the copy in place
            if copy.is_deleted() and not x.is_deleted():
                x.delete()
        return out


@dataclass(eq=False, slots=True)
class MultiProcessStep(CompiledStep):
    """One over several processes, which compare what they are about to run before they run it the first time."""

    sheet: Sheet

    def on_arrays(self, arrays: list[Any]) -> list[Any]:
        if not any(is_tracer(x) or (isinstance(x, jax.Array) and x.is_deleted()) for x in arrays):
            before_call(self.sheet, arrays)
            arrays = [global_array(x, s) for x, s in zip(arrays, self.in_shardings, strict=True)]
        return CompiledStep.on_arrays(self, arrays)


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
    found = redundant_matmuls_despite_layout(plan)
    if found:
        share = sum(r.share for r in found)
        text = f"{100 * share:.0f} % of the products' FLOPs of this step are done more than once: {found[0]}"
        more = f"; {len(found) - 1} more such products: print(step.plan(…)) has them" if found[1:] else ""
        warnings.warn(text + more, RepeatedWarning, stacklevel=user_stacklevel())


def lower_step(
    plan: Plan, traced: TracedStep, flat: FlatFunction, mesh: Mesh, *, strict: bool, dims: PathDims,
    names_off: Callable[[], AbstractContextManager[None]], keep_unused: bool, compiler_options: Mapping[str, Any],
) -> CompiledStep:  # fmt: skip
    """What runs a plan.

    Args:
      flat: the function, which is run as it is written where JAX runs op by op (``jax.debug_nans``), for its own lines.
      strict, dims: as in :func:`meshpar.jit`.
      names_off: makes a context in which constraints over names and axes mean nothing, as on one device.
      keep_unused, compiler_options: as in ``jax.jit``; the plan's own options of the compiler are those that a call uses.
    """
    ordered = None if mesh.size == 1 else ordered_effect(plan.program.closed)
    if ordered is not None:
        raise UnsupportedError(
            f"{ordered.primitive.name}(ordered=True) needs one device, and the mesh has {mesh.size}",
            source=source_line(ordered),
            fixes=["leave ordered=True out", "or call it outside of the step, with what the step returns"],
        )
    with without_gc():
        on_arrays, ins, outs = LOWERINGS[plan.lowering](plan, mesh, bound=bound_axis_names())
    same: dict[NamedSharding, NamedSharding] = {}  # one object for equal ones: results go in again, told by `is`
    ins, outs = ([same.setdefault(s, s) for s in side] for side in (ins, outs))
    donated = tuple(sorted(plan.donated))

    def step(*xs: Any) -> list[Any]:
        if at_top_level():  # JAX runs op by op: under disable_jit, or to find the op that made a NaN
            with names_off():
                return jax.tree.leaves(flat(*xs))
        return on_arrays(*xs)

    step.__name__ = getattr(flat.fn, "__name__", "step")
    jitted = functools.partial(
        jax.jit,
        step,
        in_shardings=tuple(ins),
        out_shardings=list(outs),
        donate_argnums=donated,
        keep_unused=keep_unused,
    )
    run = _runner(jitted, plan, compiler_options)
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        run = with_bounded_queue(run)
    fixed = flat.call.fixed
    arrays = [i for i in range(len(flat.call.leaves)) if i not in fixed] if fixed else None
    made = plan, traced, on_arrays, run, arrays, ins, outs, donated
    keys = [k for k in flat.call.leaf_keys if not isinstance(k, Fixed)]
    narrowed = {
        i: a.dtype for i, (a, k) in enumerate(zip(traced.avals, keys, strict=True)) if a.dtype != cast(tuple, k)[1]
    }
    if len({d.process_index for d in mesh.devices.flat}) == 1:
        return CompiledStep(*made, narrowed=narrowed)
    statics = [x for _, x in flat.call.statics]
    sheet = Sheet(flat.fn, plan, plan.lowering, strict, dims, statics, plan.options.values)
    return MultiProcessStep(*made, sheet, narrowed=narrowed)


def _runner(jitted: Callable[..., Any], plan: Plan, compiler_options: Mapping[str, Any]) -> Callable[..., Any]:
    """The program with its options of the compiler; within another ``jit``, which refuses options, with the user's alone."""
    run = jitted(compiler_options=plan.options.values or None)
    if not plan.options.groups:
        return run
    inner = jitted(compiler_options=compiler_options or None)
    return lambda *xs: (run if at_top_level() else inner)(*xs)
