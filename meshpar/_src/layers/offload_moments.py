"""``mp.train.offload``: an optax transformation whose moments are stored in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ...errors import UnsupportedError
from ..compat.jax import aval_of, interpret, make_jaxpr, source_line
from ..program.jaxprs import flatten
from ..rules import primitive

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offload(tx: optax.GradientTransformation, *, layers: int | None = None) -> optax.GradientTransformation:
    """An optax transformation with the moments of ``tx`` in host memory; a step copies a few at a time to the device.

    ``opt = mp.train.offload(optax.adamw(1e-3), layers=32)``: updates and state equal the ones of ``tx``, up to the rounding of
    another program. Parameters with a leading dim of ``layers`` (stacked, for ``jax.lax.scan``) are updated in a loop over it: the
    moments of the next layer are copied to the device while the new moments of this one are copied back, so that a device needs
    memory for the moments of two layers. The other parameters are updated one after the other, each while the moments of the next
    one are copied. The TPU compiler (libtpu 0.0.42) starts these copies before the backward pass: all their moments are on the
    device then. ``plan.transfers`` has the copies, and ``plan.time.to_host`` and ``to_device`` their seconds. Create the state
    with :func:`meshpar.init`, which leaves the moments in host memory. Under ``jax.vmap``, leave ``layers`` out: JAX cannot select
    layers of batched arrays in host memory.

    Args:
      tx: updates every parameter independently of the others, with ``layers`` also every element (``optax.adamw``,
        ``scale_by_adam``, ``lion``, ``sgd`` with momentum). Chain others around it:
        ``optax.chain(optax.clip_by_global_norm(1.0), mp.train.offload(optax.adamw(1e-3)))``.
      layers: leading size of the stacked parameters. None: every parameter is updated at once. Leave it out where the layout shards
        the stacked dim (a pipeline), and where it shards the moments otherwise than the gradients (``opt.embed: data``).

    Returns:
      A transformation whose state has the structure of the state of ``tx``. Scalars, and leaves that belong to no parameter (step
      counts) are in device memory.

    Raises:
      UnsupportedError: (when called) ``tx`` mixes parameters or stacked elements; no parameter has ``layers`` layers.

    Example:
      >>> import optax
      >>> opt = mp.train.offload(optax.adam(1e-3))
      >>> state = opt.init(params)
      >>> state[0].mu["up"].sharding.memory_kind
      'pinned_host'
      >>> updates, state = jax.jit(opt.update)(jax.grad(loss_of)(params, x), state, params)
    """

    def init(params: Any) -> Any:
        """The state of ``tx``, with the moments in host memory."""
        state = tx.init(params)
        leaves, tree = jax.tree.flatten(state)
        owned = zip(leaves, _owners(tx, state, params), strict=True)
        return tree.unflatten([jax.device_put(x, _HOST) if k >= 0 and jnp.ndim(x) else x for x, k in owned])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The updates and the new state of ``tx``."""
        step = _Step(tx, _owners(tx, state, updates), updates, state, params)
        stacked = [k for k, x in enumerate(step.updates) if layers is not None and jnp.ndim(x) > 1 and len(x) == layers]
        if layers is not None and not stacked:
            text = f"mp.train.offload: no parameter has {layers} layers: none has this leading size"
            fixes = ["layers= is the number of layers of stacked parameters; leave it out where none are stacked"]
            raise UnsupportedError(text, fixes=fixes)
        step.check(stacked)
        if stacked:
            step.in_loop(stacked, layers or 0)
        step.sequentially([k for k in range(len(step.updates)) if k not in set(stacked)])
        return step.result()

    return optax.GradientTransformation(init, update)


def _owners(tx: optax.GradientTransformation, state: Any, params: Any) -> list[int]:
    """For each leaf of an optimizer state, the index of the parameter that it belongs to; -1: to none."""
    leaves, tree = jax.tree.flatten(params)
    indices = tree.unflatten(range(len(leaves)))
    owners = optax.tree_utils.tree_map_params(
        tx,
        lambda x, k: jax.tree.map(lambda _: k, x),
        state,
        indices,
        transform_non_params=lambda x: jax.tree.map(lambda _: -1, x),
    )
    return jax.tree.leaves(owners)


class _Leaves(NamedTuple):
    """Arrays of some parameters by number: their updates, their values (empty: ``tx`` is called without parameters), and the leaves
    of the state that belong to them."""

    updates: dict[int, Any]
    params: dict[int, Any]
    state: dict[int, Any]


class _Step:
    """One update of an offloaded transformation, a few parameters at a time.

    Attributes:
      owners: as :func:`_owners`.
      updates, params, state: the leaves before the update.
      new_updates, new_state: the computed leaves by number; of the state, also those that belong to no parameter.
    """

    def __init__(self, tx: optax.GradientTransformation, owners: list[int], updates: Any, state: Any, params: Any):
        """An update without computed parts."""
        self.tx, self.owners = tx, owners
        self.updates, self.tree = jax.tree.flatten(updates)
        self.params = [] if params is None else self.tree.flatten_up_to(params)
        self.state, self.state_tree = jax.tree.flatten(state)
        self.paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
        self.new_updates: dict[int, Any] = {}
        self.new_state: dict[int, Any] = {}

    def leaves(self, some: Sequence[int]) -> _Leaves:
        """The arrays of some parameters."""
        params = {k: self.params[k] for k in some} if self.params else {}
        state = {i: x for i, (x, k) in enumerate(zip(self.state, self.owners, strict=True)) if k in set(some)}
        return _Leaves({k: self.updates[k] for k in some}, params, state)

    def part(self, leaves: _Leaves) -> tuple[dict[int, Any], dict[int, Any]]:
        """``tx.update`` for some parameters: updates, and leaves of the state, with the ones that belong to no parameter."""
        absent = optax.MaskedNode()

        def tree(arrays: dict[int, Any]) -> Any:
            return self.tree.unflatten([arrays.get(k, absent) for k in range(len(self.updates))])

        before = {i: x for i, (x, k) in enumerate(zip(self.state, self.owners, strict=True)) if k < 0} | leaves.state
        state = self.state_tree.unflatten([before.get(i, absent) for i in range(len(self.state))])
        updates, state = self.tx.update(tree(leaves.updates), state, tree(leaves.params) if leaves.params else None)
        new = jax.tree.leaves(updates), jax.tree.leaves(state)
        return dict(zip(leaves.updates, new[0], strict=True)), dict(zip(sorted(before), new[1], strict=True))

    def in_loop(self, some: Sequence[int], layers: int) -> None:
        """Update stacked parameters in a loop over their layers; the moments of the next layer are copied meanwhile."""
        arrays = self.leaves(some)

        def at(stacks: dict[int, Any], i: Any) -> dict[int, Any]:
            """Layer i of each stack."""
            return {k: lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for k, x in stacks.items()}

        def put(stacks: dict[int, Any], layer: dict[int, Any], i: Any) -> dict[int, Any]:
            """The stacks with another layer i."""
            return {k: lax.dynamic_update_index_in_dim(x, layer[k], i, 0) for k, x in stacks.items()}

        def updated(i: Any, updates: Any, state: Any, current: Any) -> tuple[Any, Any, Any]:
            """(the stacks with layer i updated, from its moments on the device; the leaves that belong to no parameter)."""
            new, leaves = self.part(_Leaves(at(updates, i), at(arrays.params, i), current))
            moments = {k: leaves.pop(k) for k in state}
            return put(updates, new, i), put(state, jax.device_put(moments, _HOST), i), leaves

        def body(i: Any, carry: Any) -> Any:
            """Update layer i while the moments of the next layer are copied to the device."""
            updates, state, current, _ = carry
            following = jax.device_put(at(state, i + 1), _DEVICE)
            updates, state, shared = updated(i, updates, state, current)
            return updates, state, following, shared

        first = jax.device_put(at(arrays.state, 0), _DEVICE)
        shared = {i: x for i, (x, k) in enumerate(zip(self.state, self.owners, strict=True)) if k < 0}
        updates, state, last, _ = lax.fori_loop(0, layers - 1, body, (arrays.updates, arrays.state, first, shared))
        updates, state, shared = updated(layers - 1, updates, state, last)
        self.new_updates |= updates
        self.new_state |= state | shared

    def sequentially(self, some: Sequence[int]) -> None:
        """Update parameters one after the other; the moments of the next one are copied meanwhile."""
        before: dict[int, Any] = {}  # the update before the last one: the next copy starts after it
        last: dict[int, Any] = {}
        for k in some:
            arrays = self.leaves([k])
            stored = {i: x for i, x in arrays.state.items() if jnp.ndim(x)}
            if before and stored:
                stored, _ = lax.optimization_barrier((stored, before))
            moments = {i: jax.device_put(x, _DEVICE) for i, x in stored.items()}
            new, state = self.part(arrays._replace(state=arrays.state | moments))
            before, last = last, new
            self.new_updates |= new
            self.new_state |= {i: jax.device_put(x, _HOST) if i in stored else x for i, x in state.items()}

    def result(self) -> tuple[Any, Any]:
        """The updates and the new state."""
        state = [self.new_state.get(i, x) for i, x in enumerate(self.state)]
        updates = [self.new_updates[k] for k in range(len(self.updates))]
        return self.tree.unflatten(updates), self.state_tree.unflatten(state)

    def check(self, stacked: Sequence[int]) -> None:
        """Trace the update of all parameters at once, and refuse one that mixes them.

        Raises:
          UnsupportedError: a result depends on several parameters, or on several layers of a stacked one.
        """
        every = range(len(self.updates))
        flat, tree = jax.tree.flatten(self.leaves(every))
        avals = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x) if hasattr(x, "dtype") else None) for x in flat]
        closed = make_jaxpr(lambda *xs: self.part(tree.unflatten(xs)), *avals)
        of_state = [k for k in self.owners if k >= 0]
        marks = [_Mark(frozenset({k})) for k in (*every, *(every if self.params else ()), *of_state)]
        for mark, k in zip(_marks(closed, marks), (*every, *self.owners), strict=True):
            others, source = sorted(mark.owners - {k}), None
            if others:
                names = ", ".join(self.paths[j] for j in others[:2])
                of = f"the update of {self.paths[k]}" if k >= 0 else "a leaf of its state that belongs to no parameter"
                text = f"{of} depends on other parameters ({names}), which are updated separately"
                chain = "optax.chain(optax.clip_by_global_norm(1.0), mp.train.offload(optax.adam(1e-3)))"
                fix = f"offload the rest: {chain}"
            elif k in stacked and mark.mixed is not None:
                text = f"{mark.mixed.primitive.name} is not elementwise: it may mix the layers of {self.paths[k]}"
                fix, source = "leave out layers=, so that every parameter is updated at once", source_line(mark.mixed)
            else:
                continue
            raise UnsupportedError(f"mp.train.offload: {text}", source=source, fixes=[fix])


class _Mark(NamedTuple):
    """The dependencies of a value: indices of parameters, and an op that is not elementwise, if one is on the way."""

    owners: frozenset[int] = frozenset()
    mixed: JaxprEqn | None = None


def _marks(closed: ClosedJaxpr, marks: Sequence[_Mark]) -> list[_Mark]:
    """The marks of the results of a jaxpr, from the marks of its operands; results of control flow depend on all operands."""
    jaxpr = flatten(closed).jaxpr

    def apply(eqn: JaxprEqn, ins: list[_Mark]) -> list[_Mark]:
        owners = frozenset().union(*(m.owners for m in ins))
        owned = [aval_of(v).shape for v, m in zip(eqn.invars, ins, strict=True) if m.owners]
        elementwise = primitive(eqn.primitive.name).elementwise and all(
            aval_of(out).shape == shape for out in eqn.outvars for shape in owned
        )
        mixed = next((m.mixed for m in ins if m.mixed is not None), None)
        mixed = eqn if mixed is None and owners and not elementwise else mixed
        return [_Mark(owners, mixed)] * len(eqn.outvars)

    return interpret(jaxpr, [_Mark()] * len(jaxpr.constvars), marks, apply, lambda literal: _Mark())
