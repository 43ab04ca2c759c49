"""Recurrences whose state is scaled and added to, computed for all steps at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from ...errors import UnsupportedError
from ..compat.jax import aval_of, default_promotion, interpret, source_line
from ..program.declare_kernel_rule import kernel_rule
from ..program.jaxprs import flatten
from ..program.kernels import KernelSend, ShardCounts
from ..rules.mesh_in_shard_map import axis_index

_LINEAR = frozenset({"add", "sub", "add_any", "neg", "convert_element_type", "copy", "name_dims"})
"""Ops that make sums of scaled states of these, elementwise."""


@default_promotion()
def recurrence(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, xs: Any) -> tuple[Any, Any]:
    """``jax.lax.scan(step, state, xs)`` for steps that scale the state and add to it, computed for all steps at the same time.

    With ``new_state = a(x) * state + b(x)``, elementwise, all states are an associative scan over pairs (a, b) (Blelloch, *Prefix
    Sums and Their Applications*, 1990), and the outputs follow from them in any way. This holds for linear attention, gated linear
    attention, RetNet, Mamba and RG-LRU, with a chunk of tokens for each x. A layout may split the leading dim of ``xs``: devices
    then exchange pairs, and no x. The states of all steps are in memory.

    Args:
      step: (state, x) → (new state, y), as for ``jax.lax.scan``. It is traced, and must not depend on the number of the step.
      state: the first state: a tree of floating-point arrays.
      xs: a tree of arrays with one leading dim, of which x is a slice.

    Returns:
      (the last state, the stacked ys), which differ from the results of ``scan`` by rounding.

    Raises:
      UnsupportedError: the new state is not the old one scaled elementwise plus values that do not depend on it, as in the delta
        rule, whose steps multiply the state by matrices; ``xs`` has no arrays or no steps.

    Example:
      >>> decay, x = jnp.array([0.5, 0.5, 0.5]), jnp.ones((3, 2))
      >>> last, ys = mp.layers.recurrence(lambda h, c: (c[0] * h + c[1], h), jnp.zeros(2), (decay, x))
      >>> last.tolist(), ys[:, 0].tolist()
      ([1.75, 1.75], [0.0, 1.0, 1.5])
    """
    state = jax.tree.map(jnp.asarray, state)
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        text = "mp.layers.recurrence: xs needs arrays with one leading dim of at least 1"
        raise UnsupportedError(text, fixes=["jax.lax.scan(step, state, None, length=…) for steps without x"])
    scales = _scale_dims(step, state, xs)

    def pair(x: Any) -> tuple[Any, Any]:
        """(a, b) of one step; the dims along which a is constant have size 1."""
        zeros, ones = (jax.tree.map(lambda s, n=n: jnp.full_like(s, n), state) for n in (0, 1))
        b, a = jax.jvp(lambda s: step(s, x)[0], (zeros,), (ones,))
        return jax.tree.map(_narrow, a, scales), b

    a, b = jax.vmap(pair)(xs)
    leaves, tree = jax.tree.flatten(state)
    rows = zip(jax.tree.leaves(a), jax.tree.leaves(b), leaves, strict=True)
    last, before = zip(*(_op(tuple(n > 1 for n in a.shape[1:]))(a, b, s) for a, b, s in rows), strict=True)
    ys = jax.vmap(lambda s, x: step(s, x)[1])(jax.tree.unflatten(tree, before), xs)
    return jax.tree.unflatten(tree, last), ys


@functools.cache
def _op(varies: tuple[bool, ...]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(a [steps, …], b [steps, …], the first state) → (the last state, the state before each step [steps, …]).

    Args:
      varies: whether a varies along each dim of the state; else it has size 1.
    """
    dims = [f"d{i}" for i in range(len(varies))]
    of_a = " ".join(d if v else "_" for d, v in zip(dims, varies, strict=True))
    state = " ".join(dims)
    text = f"steps~ {of_a}, steps~ {state}, {state} -> {state}, steps~ {state}"

    def linear_recurrence(a: jax.Array, b: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _local(a, b, state, axes={})

    return kernel_rule(text, local=_local, sends=_sends)(linear_recurrence)


@default_promotion()
def _local(
    a: jax.Array, b: jax.Array, state: jax.Array, *, axes: Mapping[str, tuple[str, ...]]
) -> tuple[jax.Array, jax.Array]:
    """This device's shards of the states: its steps from state 0, then from the state that the devices before it lead to."""

    def joined(first: tuple[Any, Any], then: tuple[Any, Any]) -> tuple[Any, Any]:
        (a1, b1), (a2, b2) = first, then
        return a1 * a2, a2 * b1 + b2

    a, b = lax.associative_scan(joined, (a, b))
    first, last = state, a[-1] * state + b[-1]
    if over := axes.get("steps", ()):
        totals = lax.all_gather((a[-1], b[-1]), over)
        last, firsts = lax.scan(lambda s, t: (t[0] * s + t[1], s), state, totals)
        first = firsts[axis_index(over)]
    return last, jnp.concatenate([first[None], a[:-1] * first + b[:-1]])


def _sends(avals: Sequence[Any], parts: ShardCounts) -> list[KernelSend]:
    """The collectives of :func:`_local`."""
    a, b, _ = avals
    why = "the effect of the steps of each device on a state"
    return [KernelSend("all-gather", ("steps",), (1, *x.shape[1:]), x.dtype, why) for x in (a, b)]


def _narrow(a: jax.Array, varies: tuple[bool, ...]) -> jax.Array:
    """The array with one element along the dims in which it does not vary."""
    return a[tuple(slice(None) if v else slice(1) for v in varies)]


def _scale_dims(step: Callable[..., Any], state: Any, xs: Any) -> Any:
    """For each array of the state, whether the factor by which a step multiplies it varies along each dim.

    Raises:
      UnsupportedError: the step does something else with it.
    """
    x = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), xs)
    leaves, tree = jax.tree.flatten(state)
    jaxpr, shape = jax.make_jaxpr(lambda s, x: step(s, x)[0], return_shape=True)(state, x)
    if jax.tree.structure(shape) != tree or [(v.shape, v.dtype) for v in jaxpr.out_avals] != [
        (s.shape, s.dtype) for s in leaves
    ]:
        raise _refused("the new state has another structure, other shapes or dtypes than the state")
    flat = flatten(jaxpr).jaxpr
    makers = {v: e for e in flat.eqns for v in e.outvars}
    first = [_Scaled(k, (False,) * s.ndim) for k, s in enumerate(leaves)]
    operands: list[_Scaled | None] = [*first, *[None] * (len(flat.invars) - len(first))]

    def apply(eqn: JaxprEqn, operands: list[_Scaled | None]) -> list[_Scaled | None]:
        return [_scaled(eqn, operands, makers)] * len(eqn.outvars)

    results = interpret(flat, [None] * len(flat.constvars), operands, apply, lambda literal: None)
    own = [before if x is None else x for x, before in zip(results, first, strict=True)]
    if any(x.array != k for k, x in enumerate(own)):
        raise _refused("an array of the new state has another array of the state in it")
    return jax.tree.unflatten(tree, [x.dims for x in own])


class _Scaled(NamedTuple):
    """A value ``a * s + b``: the position of the array s of the state, and whether a varies along each dim."""

    array: int
    dims: tuple[bool, ...]


def _scaled(eqn: JaxprEqn, operands: Sequence[_Scaled | None], makers: Mapping[Var, JaxprEqn]) -> _Scaled | None:
    """The result of an op; None: it does not depend on the state, as operands that are None.

    Raises:
      UnsupportedError: it is another function of the state.
    """
    of_state = [x for x in operands if x is not None]
    if not of_state:
        return None
    name, (k, dims) = eqn.primitive.name, of_state[0]
    varies: list[tuple[bool, ...]] = []
    linear = all(x.array == k for x in of_state) and jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating)
    if name in ("mul", "div") and len(of_state) == 1 and (name == "mul" or operands[0]):
        varies = [_varies(eqn.invars[operands.index(None)], len(dims), makers)]
    elif name == "select_n" and operands[0] is None:
        varies = [_varies(eqn.invars[0], len(dims), makers)]
    elif name not in _LINEAR:
        linear = False
    if not linear:
        raise _refused(f"`{name}` at {source_line(eqn)} does something else")
    return _Scaled(k, tuple(map(any, zip(*(x.dims for x in of_state), *varies, strict=True))))


def _varies(factor: Any, ndim: int, makers: Mapping[Var, JaxprEqn]) -> tuple[bool, ...]:
    """Whether a factor varies along each of ``ndim`` dims, as far as the op that makes it tells."""
    shape: Mapping[int, int] = dict(enumerate(factor.aval.shape))
    maker = None if isinstance(factor, Literal) else makers.get(factor)
    if maker is not None and maker.primitive.name == "broadcast_in_dim":
        source: Any = maker.invars[0].aval
        shape = dict(zip(maker.params["broadcast_dimensions"], source.shape, strict=True))
    return tuple(shape.get(d, 1) > 1 for d in range(ndim))


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"mp.layers.recurrence: a step may scale each array of the state elementwise and add to it, but {why}",
        fixes=["jax.lax.scan, which computes one step after another"],
    )
