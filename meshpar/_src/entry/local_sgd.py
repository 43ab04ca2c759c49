"""Local SGD over slices (DiLoCo): replicas of the state that train independently and are averaged every H steps.

Every leaf of the state has a leading dim ``replica``, which is sharded over the slow axis, and the step is
vmapped. So the inner step sends nothing over that axis, and a replica is sharded within its slice by the layout.
Douillard et al., *DiLoCo* (2023): every H steps, the initial weights minus the mean of the replicas' weights
are the gradient of an outer optimizer (SGD with Nesterov momentum). Douillard et al., *Streaming DiLoCo* (2025):
the weights are divided into fragments, each with its own outer step at another time; the changes are exchanged in few
bits; replicas blend the outer weights into their own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from ...errors import AxisConflictError, DivisibilityError, MeshError, UnsupportedError
from ..dims import DimsLike, format_dims
from ..flax import flatten_named
from ..global_arrays import is_key
from ..keywords_and_flags import options_of, takes_options
from ..layout import Layout, Rule
from ..mesh import MeshLike, auto_mesh, device_mesh
from ..pods.state_by_name import by_name, flat, nested
from ..replicas.trees import wide
from .jitted import Jitted, LayoutLike
from .options import StepKeywords, StepOptions
from .tracing import state_dims

API = "mp.train.local_sgd"
REPLICA = "replica"

OWN_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
"""Options of a step that local SGD sets itself."""


@takes_options(StepOptions)
def local_sgd(
    step: Callable[..., Any],
    *,
    over: str,
    every: int,
    outer: optax.GradientTransformation,
    mesh: MeshLike,
    layout: LayoutLike,
    exchange: optax.GradientTransformation | None = None,
    fragments: int = 1,
    blend: float = 1.0,
    **options: Unpack[StepKeywords],
) -> LocalSgd:
    """Train one replica per index of a mesh axis independently, and average the replicas every ``every`` steps (DiLoCo).

    The change of a replica is the last outer parameters minus its own; the outer optimizer takes the mean change as its gradient.
    Streaming DiLoCo is ``exchange=mp.replicas.coded(...), fragments=8, blend=0.5``: the parameters are divided into fragments,
    which have their outer steps at different times, so that the bytes of one exchange are fewer.

    Args:
      step: ``state, … → state, anything``: a train step of plain trees, its weights under ``params``.
      over: the mesh axis of the replicas, with the slow links: ``slice``. No rule of the layout may use it.
      every: number of inner steps between two outer steps (DiLoCo: 500).
      outer: the outer optimizer; DiLoCo's is ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      exchange: how the replicas' changes become one: a transformation of :mod:`meshpar.replicas`, such as
        ``mp.replicas.coded("int8")``. None: their mean in float32.
      fragments: number of parts of the parameters (groups of arrays of about the same size), each exchanged every ``every`` steps.
      blend: weight of the outer parameters in those from which a replica continues: 1 replaces its own (DiLoCo), 0.5 is the mean of
        both (Streaming DiLoCo).
      mesh, layout, dims, lowering, …: as in :func:`meshpar.jit`, for one replica; dims name the arguments of ``step``. The state
        is donated.

    Returns:
      :class:`LocalSgd`: ``state = run.init(create)(key)``; ``state, loss = run(n, state, batch)``.

    Raises:
      MeshError, AxisConflictError: the mesh lacks the axis or devices, or the layout uses the axis.
      UnsupportedError: a value of ``every``, ``fragments`` or ``blend`` that makes no sense; static or donated arguments.

    Example:
      >>> import optax
      >>> run = mp.train.local_sgd(
      ...     train_step, over="slice", every=2, outer=optax.sgd(0.7), mesh=mp.mesh("slice=2, data=4"),
      ...     layout="batch: data", dims=dims,
      ... )
      >>> run.replicas
      2
    """
    where, rules, settings = auto_mesh(device_mesh(mesh)), Layout(layout), options_of(StepOptions, options)
    if not isinstance(where, Mesh):
        raise MeshError(f"{API} trains on devices, and an abstract mesh has none", fixes=['mesh="slice=2, data=4"'])
    if over not in where.shape:
        raise MeshError(
            f"{API}: the mesh has no axis `{over}`",
            axis=over,
            fixes=[f"over= one of {', '.join(where.shape)}, or a mesh with the axis `{over}`"],
        )
    taken = next((r for r in rules.rules if over in r.axes), None)
    if taken is not None:
        raise AxisConflictError(
            f"{API} takes the axis `{over}` for its replicas, but the rule `{taken}` asks for it as well",
            axis=over,
            rule=str(taken),
            fixes=[f"leave `{over}` out of the layout: replicas are independent"],
        )
    if every < 1:
        raise UnsupportedError(f"{API}: every={every}, which must be at least 1", fixes=["every=500, as DiLoCo has it"])
    if not 1 <= fragments <= every:
        raise UnsupportedError(
            f"{API}: fragments={fragments} with every={every}: each fragment has one outer step in every {every} steps",
            fixes=[f"fragments from 1 to {every}"],
        )
    if not 0 < blend <= 1:
        mean = "blend=1.0: replicas continue from the outer parameters; blend=0.5: from the mean of these and their own"
        raise UnsupportedError(f"{API}: blend={blend}, which must be above 0 and at most 1", fixes=[mean])
    if own := [name for name in OWN_OPTIONS if getattr(settings, name) is not None]:
        text = f"{API} donates the state, and has no static arguments: {', '.join(own)}"
        raise UnsupportedError(text, fixes=["leave it out"])
    rules = Layout(rules, optional=True).with_first([Rule(REPLICA, (over,))])
    combine = None if exchange is None else optax.with_extra_args_support(exchange)
    return LocalSgd(step, where, rules, settings, where.shape[over], every, outer, combine, fragments, blend)


@dataclass(eq=False)
class LocalSgd:
    """A training step compiled for independent replicas, and the outer step that averages them; made by
    :func:`meshpar.train.local_sgd`, which describes the arguments.

    Attributes:
      layout: the layout of one replica, after a rule that the replica dim is sharded over the axis of the replicas.
      replicas: the number of replicas, which is the size of the mesh axis ``over``.
      tx: the outer optimizer.
      inner: the compiled inner step, of stacked states and batches; ``inner.plan(…)`` shows that it sends nothing over
          the axis. None before the first call.
      outer: the compiled outer step; None before the first call.
    """

    step: Callable[..., Any]
    mesh: Mesh
    layout: Layout
    options: StepOptions
    replicas: int
    every: int
    tx: optax.GradientTransformation
    exchange: optax.GradientTransformationExtraArgs | None
    fragments: int
    blend: float
    inner: Any = field(default=None, init=False)
    outer: Any = field(default=None, init=False)

    @functools.cached_property
    def _names(self) -> list[str]:
        """The names of the step's arguments."""
        return list(inspect.signature(self.step).parameters)

    def _jitted(self, fn: Callable[..., Any], dims: Mapping[str, DimsLike], init: bool = False, **options: Any) -> Any:
        """A function of the replicated state on the mesh of the replicas."""
        return Jitted(fn, self.mesh, self.layout, self.options.changed(dims=dims, **options), init=init)

    # -- the state

    def init(self, create: Callable[..., Any]) -> Any:
        """A :func:`meshpar.init` of the replicated state: ``{"inner": …, "anchor": …, "outer": …}``.

        Args:
          create: makes the state of one replica, as for the step alone; plain trees, with ``params`` among their paths.

        Returns:
          A function with the arguments of ``create``. ``inner`` is the state with a first dim ``replica``; ``anchor`` the weights
          after the last outer step, ``outer`` the outer optimizer's state; neither has that dim. With an exchange,
          ``exchange`` is its state. With several fragments, ``outer`` and ``exchange`` are tuples of a state per fragment.
        """

        @functools.wraps(create)
        def make(*args: Any) -> dict[str, Any]:
            state = create(*args)
            anchor = nested(self._params(state))
            inner = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), state)
            made = {"inner": inner, "anchor": anchor, "outer": self._per_fragment(self.tx.init, flat(anchor))}
            if self.exchange is not None:
                stacked = {p: jnp.broadcast_to(x, (self.replicas, *x.shape)) for p, x in flat(anchor).items()}
                made["exchange"] = self._per_fragment(self.exchange.init, stacked)
            return made

        def jitted(*args: Any) -> Any:
            leaves, _ = by_name(jax.eval_shape(create, *args))
            return self._jitted(make, self._all_dims(leaves), init=True)

        @functools.wraps(create)
        def made(*args: Any) -> Any:
            return jitted(*args)(*args)

        made.abstract = lambda *args: jitted(*args).abstract(*args)  # type: ignore[attr-defined]
        return made

    def _per_fragment(self, init: Callable[[Any], Any], params: dict[str, Any]) -> Any:
        """The state that ``init`` makes for parameters (path → value); with several fragments, a tuple of a state for each."""
        states = [init(nested({p: params[p] for p in paths})) for paths in self._fragments(params)]
        return states[0] if self.fragments == 1 else tuple(states)

    def _fragments(self, params: Mapping[str, Any]) -> list[list[str]]:
        """The paths of the parameters of each fragment: consecutive leaves, with about the same number of elements.

        Raises:
          UnsupportedError: there are fewer leaves than fragments.
        """
        if len(params) < self.fragments:
            raise UnsupportedError(
                f"{API}: {len(params)} arrays of parameters do not divide into fragments={self.fragments}",
                fixes=[f"fragments={len(params)} or less"],
            )
        paths = sorted(params)
        total, done = sum(math.prod(x.shape) for x in params.values()), 0
        found: list[list[str]] = [[]]
        for i, path in enumerate(paths):
            size, left = math.prod(params[path].shape), self.fragments - len(found)
            is_full = done + size / 2 > len(found) * total / self.fragments
            if found[-1] and left and (is_full or len(paths) - i <= left):
                found.append([])
            found[-1].append(path)
            done += size
        return found

    def _params(self, state: Any) -> dict[str, Any]:
        """path → value of the leaves of a state that are parameters.

        Raises:
          UnsupportedError: no leaf is a parameter.
        """
        found = {leaf.path: leaf.value for leaf in flatten_named(state) if leaf.kind == "params"}
        if not found:
            raise UnsupportedError(
                f"{API}: no leaf of the state is a parameter",
                fixes=['keep them under `params`: {"params": …, "opt_state": …}'],
            )
        return found

    def _state_dims(self, leaves: Mapping[str, Any], inner: str, anchor: str | None = None) -> dict[str, DimsLike]:
        """path → dims for ``jit(dims=)``: of the stacked leaves under the prefix ``inner``, with the replica dim first.

        Args:
          leaves: path → array of one replica.
          anchor: prefix of the parameters of the outer step, which have no replica dim; None: they are left out.
        """
        found = flatten_named({self._names[0]: nested(leaves)})
        out: dict[str, DimsLike] = {}
        for leaf, names in zip(found, state_dims(found, self.options.dims, set()), strict=True):
            path = leaf.path.partition("/")[2]
            dims = format_dims(names or [...] * (len(leaf.value.shape) > 0))
            out[f"{inner}{path}"] = f"{REPLICA} {dims}"
            if anchor is not None and leaf.kind == "params":
                out[f"{anchor}{path}"] = dims
        return out

    def _all_dims(self, leaves: Mapping[str, Any]) -> dict[str, DimsLike]:
        """path → dims of the leaves of a replicated state.

        In the states of the outer optimizer and of the exchange, an array of a parameter has its dims, in the latter after the
        replica dim. The outer step of a fragment does not read the states of the others, so that it cannot infer them.

        Args:
          leaves: path → array of one replica's state.
        """
        params = self._params(nested(leaves))
        out = self._state_dims(leaves, "inner/", "anchor/")
        for name, like_of, tx, stack in (
            ("outer", "anchor", self.tx, ()),
            ("exchange", "inner", self.exchange, (self.replicas,)),
        ):
            like = {p: jax.ShapeDtypeStruct((*stack, *x.shape), x.dtype) for p, x in params.items()}
            states = {} if tx is None else {name: jax.eval_shape(functools.partial(self._per_fragment, tx.init), like)}
            for path, x in by_name(states)[0].items():
                for p in params:
                    if path.endswith(f"/{p}") and x.shape == like[p].shape:
                        out[path] = out[f"{like_of}/{p}"]
        return out

    # -- steps

    def __call__(self, n: int, state: dict[str, Any], *batch: Any) -> tuple[dict[str, Any], Any]:
        """One inner step of every replica; after every ``every`` of them, the outer step of each fragment, at different times.

        Args:
          n: the number of the batch, from 0.
          state: the result of :meth:`init` or of the last call.
          *batch: the other arguments of the step: arrays of the global batch, whose first dim is divided among the replicas; random
            keys are split, scalars are the same for all replicas.

        Returns:
          The state, and the other results of the step, with a leading dim ``replica``.
        """
        shares = [self._share(x, name) for x, name in zip(batch, self._names[1:], strict=True)]
        if self.inner is None:
            self._compile(state, shares)
        assert self.inner is not None
        inner, rest = self.inner(state["inner"], *shares)
        state = {**state, "inner": inner}
        for fragment in range(self.fragments):
            if (n + 1 + fragment * self.every // self.fragments) % self.every == 0:
                state = self.outer(**state, fragment=fragment)
        return state, rest

    def _share(self, x: Any, name: str) -> Any:
        """An argument of the step with a leading replica dim: rows are divided among replicas, keys are split, scalars
        are repeated."""
        if is_key(x):
            return jax.random.split(x, self.replicas)
        if not np.ndim(x):
            return np.broadcast_to(np.asarray(x), (self.replicas,))
        rows = x.shape[0]
        if rows % self.replicas:
            raise DivisibilityError(
                f"{API}: {rows} rows of `{name}` do not divide among {self.replicas} replicas",
                path=name,
                fixes=[f"a batch of a multiple of {self.replicas} rows"],
            )
        shape = (self.replicas, rows // self.replicas, *x.shape[1:])
        if not isinstance(x, jax.Array):
            return np.reshape(x, shape)
        spec = self.layout.spec(f"{REPLICA} {self._batch_dims(name)}", self.mesh, shape, path=name)
        # not a function that is made here: each would be compiled again
        return jax.jit(jnp.reshape, static_argnums=1, out_shardings=NamedSharding(self.mesh, spec))(x, shape)

    def _batch_dims(self, name: str) -> str:
        found = self.options.dims.match(name)
        return "..." if found is None else format_dims(found[1])

    def _compile(self, state: dict[str, Any], batch: list[Any]) -> None:
        """Define ``inner`` and ``outer`` for the shapes of a stacked state and a batch.

        Args:
          state: ``{"inner": stacked state, …}``.
          batch: arguments of the step after the state, each with a leading replica dim.
        """
        leaves, _ = by_name(state["inner"])
        one = {p: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for p, x in leaves.items()}
        dims = self._state_dims(one, f"{self._names[0]}/")
        for x, name in zip(batch, self._names[1:], strict=True):
            if np.ndim(x) > 1 and not is_key(x):
                dims[name] = f"{REPLICA} {self._batch_dims(name)}"

        inner = functools.wraps(self.step)(lambda *args: jax.vmap(self.step)(*args))
        self.inner = self._jitted(inner, dims, donate_argnums=0)

        donated = ("inner", "anchor", "outer", *(["exchange"] if self.exchange else []))
        how = {"donate_argnames": donated, "static_argnames": "fragment"}
        self.outer = self._jitted(self._outer_step, self._all_dims(one), **how)

    def _outer_step(
        self, inner: Any, anchor: Any, outer: Any, exchange: Any = None, fragment: int = 0
    ) -> dict[str, Any]:
        """One outer step of a fragment: the outer optimizer receives the anchor minus the replicas' mean, and every
        replica continues from the new anchor, or from a mean of it and its own parameters.

        Args:
          inner: the state, every leaf [replica, …].
          anchor: the parameters after the previous outer step.
          outer, exchange: the states of the outer optimizer and of the exchange.
          fragment: index of the fragment.

        Returns:
          ``{"inner": …, "anchor": …, "outer": …}`` (and ``exchange``), with the structure of the arguments.
        """
        replicas, back = by_name(inner)
        anchors, to_anchor = by_name(anchor)
        began = {p: anchors[p] for p in self._fragments(anchors)[fragment]}
        states = {"outer": outer} if self.exchange is None else {"outer": outer, "exchange": exchange}
        own = {name: state if self.fragments == 1 else state[fragment] for name, state in states.items()}
        if self.exchange is None:
            moved = {p: x - wide(replicas[p]).mean(0).astype(x.dtype) for p, x in began.items()}
        else:
            changes = nested({p: x - replicas[p] for p, x in began.items()})
            mean: Any
            mean, own["exchange"] = self.exchange.update(changes, own["exchange"], nested(began))
            moved = flat(mean)
        updates, own["outer"] = self.tx.update(nested(moved), own["outer"], nested(began))
        ends: Any = optax.apply_updates(nested(began), updates)
        ends = flat(ends)
        if self.fragments > 1:
            own = {name: (*x[:fragment], own[name], *x[fragment + 1 :]) for name, x in states.items()}
        new = {p: self._blended(replicas[p], x) for p, x in ends.items()}
        return {"inner": back({**replicas, **new}), "anchor": to_anchor({**anchors, **ends}), **own}

    def _blended(self, own: jax.Array, outer: jax.Array) -> jax.Array:
        """Parameters [replica, …] from which replicas continue: a mean of their own and the outer ones."""
        outer = jnp.broadcast_to(outer, own.shape)
        return outer if self.blend == 1 else (self.blend * outer + (1 - self.blend) * own).astype(own.dtype)
