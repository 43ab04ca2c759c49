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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from ...errors import AxisConflictError, DivisibilityError, MeshError, UnsupportedError
from ..dims import DimsLike, PathDims, format_dims
from ..flax import flatten_named
from ..global_arrays import is_key
from ..layout import Layout, Rule
from ..replicas.trees import wide
from .names import by_name, flat, nested

REPLICA = "replica"

Jit = Callable[..., Any]


class LocalSgd:
    """A training step compiled for independent replicas, and the outer step that averages them; made by
    :func:`meshpar.train.local_sgd`.

    Attributes:
      inner: the compiled inner step, of stacked states and batches; ``inner.plan(…)`` shows that it sends nothing over
          the axis. None before the first call.
      outer: the compiled outer step; None before the first call.
      replicas: the number of replicas, which is the size of the mesh axis ``over``.
    """

    def __init__(
        self, step: Callable[..., Any], *, over: str, every: int, outer: optax.GradientTransformation, mesh: Mesh,
        exchange: optax.GradientTransformation | None, fragments: int, blend: float, layout: Layout, dims: PathDims,
        lowering: str, jit: Jit, init: Jit, state_names: Jit,
    ):  # fmt: skip
        """Check the arguments, and add to the layout that the replica dim is sharded over the mesh axis ``over``;
        nothing is compiled yet.

        Args:
          step: (state, *batch) → (state, …), of one replica.
          over: the mesh axis with one replica per index.
          every: number of inner steps between two outer steps.
          outer: the outer optimizer, applied to the mean change of the parameters.
          exchange: makes one change of the replicas' changes [replica, …]; None: the mean.
          fragments: the number of parts of the parameters, of which each has its own outer step.
          blend: weight of the outer parameters in those from which replicas continue.
          jit, init: ``meshpar.jit`` and ``meshpar.init``, passed in because this module cannot import them.
          state_names: :func:`tracing.state_dims`, likewise.

        Raises:
          MeshError: the mesh has no such axis.
          AxisConflictError: a rule of the layout uses the axis.
          UnsupportedError: ``every`` is below 1, ``fragments`` is not in 1..``every``, or ``blend`` is not above 0 and at most 1.
        """
        if over not in mesh.shape:
            raise MeshError(
                f"local_sgd: the mesh has no axis `{over}`",
                axis=over,
                fixes=[f"over= one of {', '.join(mesh.shape)}, or a mesh with the axis `{over}`"],
            )
        taken = next((r for r in layout.rules if over in r.axes), None)
        if taken is not None:
            raise AxisConflictError(
                f"local_sgd takes the axis `{over}` for its replicas, but the rule `{taken}` asks for it as well",
                axis=over, rule=str(taken), fixes=[f"leave `{over}` out of the layout: replicas are independent"],
            )  # fmt: skip
        if every < 1:
            raise UnsupportedError(
                f"local_sgd: every={every}, which must be at least 1", fixes=["every=500, as DiLoCo has it"]
            )
        if not 1 <= fragments <= every:
            raise UnsupportedError(
                f"local_sgd: fragments={fragments} with every={every}: each fragment has one outer step in every {every} steps",
                fixes=[f"fragments from 1 to {every}"],
            )
        if not 0 < blend <= 1:
            fix = "blend=1.0: replicas continue from the outer parameters; blend=0.5: from the mean of these and their own"
            raise UnsupportedError(f"local_sgd: blend={blend}, which must be above 0 and at most 1", fixes=[fix])
        self.step, self.every, self.tx, self.mesh, self.dims = step, every, outer, mesh, dims
        self.exchange = None if exchange is None else optax.with_extra_args_support(exchange)
        self.fragments, self.blend = fragments, blend
        self.replicas = mesh.shape[over]
        self.layout = Layout(layout, optional=True).with_first([Rule(REPLICA, (over,))])
        self._jit = functools.partial(jit, mesh=mesh, layout=self.layout, lowering=lowering)
        self._make_init = functools.partial(init, mesh=mesh, layout=self.layout)
        self._state_names = state_names
        self._names = list(inspect.signature(step).parameters)
        self.inner: Any = None
        self.outer: Any = None

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

        @functools.wraps(create)
        def made(*args: Any) -> Any:
            return self._init_of(create, make, args)(*args)

        made.abstract = lambda *args: self._init_of(create, make, args).abstract(*args)  # type: ignore[attr-defined]
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
                f"local_sgd: {len(params)} arrays of parameters do not divide into fragments={self.fragments}",
                fixes=[f"fragments={len(params)} or less"],
            )
        paths = sorted(params)
        total, done, k = sum(math.prod(x.shape) for x in params.values()), 0, 0
        found: list[list[str]] = [[] for _ in range(self.fragments)]
        for i, path in enumerate(paths):
            size = math.prod(params[path].shape)
            is_full = done + size / 2 > (k + 1) * total / self.fragments
            if found[k] and k + 1 < self.fragments and (is_full or len(paths) - i <= self.fragments - 1 - k):
                k += 1
            found[k].append(path)
            done += size
        return found

    def _init_of(self, create: Callable[..., Any], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        leaves, _ = by_name(jax.eval_shape(create, *args))
        return self._make_init(make, dims=self._all_dims(leaves))

    def _params(self, state: Any) -> dict[str, Any]:
        """path → value of the leaves of a state that are parameters.

        Raises:
          UnsupportedError: no leaf is a parameter.
        """
        found = {leaf.path: leaf.value for leaf in flatten_named(state) if leaf.kind == "params"}
        if not found:
            raise UnsupportedError(
                "local_sgd: no leaf of the state is a parameter",
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
        for leaf, names in zip(found, self._state_names(found, self.dims, set()), strict=True):
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
                f"local_sgd: {rows} rows of `{name}` do not divide among {self.replicas} replicas",
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
        found = self.dims.match(name)
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
        self.inner = self._jit(inner, dims=dims, donate_argnums=0)

        self.outer = self._jit(
            self._outer_step(), dims=self._all_dims(one),
            donate_argnames=("inner", "anchor", "outer", *(["exchange"] if self.exchange else [])), static_argnames="fragment",
        )  # fmt: skip

    def _outer_step(self) -> Callable[..., dict[str, Any]]:
        """The function that :attr:`outer` compiles."""

        def outer_step(inner: Any, anchor: Any, outer: Any, exchange: Any = None, fragment: int = 0) -> dict[str, Any]:
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

        return outer_step

    def _blended(self, own: jax.Array, outer: jax.Array) -> jax.Array:
        """Parameters [replica, …] from which replicas continue: a mean of their own and the outer ones."""
        outer = jnp.broadcast_to(outer, own.shape)
        return outer if self.blend == 1 else (self.blend * outer + (1 - self.blend) * own).astype(own.dtype)
