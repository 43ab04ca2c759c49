"""Random programs of devices: the relation of each of their values holds on 8 devices.

The global value that a relation names is evaluated by NumPy, op by op; blocks, partial sums and fragments are compared with the
values that the devices have.
"""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar._src.compat.jax import axes_of_spec
from meshpar._src.verify.prove.non_block_shards import ALL
from meshpar._src.verify.prove.relation import Context, Fragments, Rel
from meshpar._src.verify.prove.term import Terms, number_of, table_of
from meshpar._src.verify.prove.walk import Walk

SIZES = {"data": 4, "model": 2}
EVERY = ("data", "model")
MAX_SIZE, MAX_VALUE = 4096, 2.0**22
REDUCTIONS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}
UNARY = {
    "convert": lambda x, t: x, "expand": lambda x, t: x, "scale": lambda x, t: x * float(t.params),
    "reshape": lambda x, t: x.reshape(t.shape), "transpose": lambda x, t: x.transpose(t.params),
    "slice": lambda x, t: np.take(x, table_of(t), t.params[0]), "take": lambda x, t: np.take(x, table_of(t), t.params[0]),
    "sort": lambda x, t: np.sort(x, dict(t.params)["dimension"]), "argmax": lambda x, t: np.argmax(x, t.params[0]),
    "argmin": lambda x, t: np.argmin(x, t.params[0]), "rev": lambda x, t: np.flip(x, t.params),
}  # fmt: skip
"""Ops of one operand, and their terms."""
POINTWISE = {
    "mul": np.multiply, "sub": np.subtract, "max": np.maximum, "min": np.minimum, "abs": np.abs, "and": np.logical_and,
    "or": np.logical_or, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal,
    "gt": np.greater, "select_n": lambda c, x, y: np.where(c, y, x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip


class Values:
    """The values of terms, for the arguments of a program."""

    def __init__(self, inputs):
        self.inputs, self.memo = inputs, {}

    def of(self, t, at):
        """The array of a term for the coordinates of a device, with dims of size 1 where it is constant."""
        key = t.number, tuple(at[a] for a in sorted(t.axes))
        if key not in self.memo:
            x = np.asarray(self._of(t, at)).astype(t.dtype)
            np.broadcast_shapes(x.shape, t.shape)
            assert all(n in (1, m) for n, m in zip(x.shape, t.shape, strict=True)), (t, x.shape)
            self.memo[key] = np.broadcast_to(x, t.shape)
        return self.memo[key]

    def _of(self, t, at):
        p, rank, number = t.params, len(t.shape), number_of(t)
        if number is not None:
            return np.full((1,) * rank, number)
        if t.op == "input":
            return self.inputs[p]
        if t.op == "array":
            return np.frombuffer(p[1], t.dtype).reshape(p[0])
        if t.op == "axis_index":
            return np.full((1,) * rank, at[p])
        if t.op == "iota":
            return np.arange(math.prod(t.shape)).reshape(t.shape)
        if t.op == "devices":
            axes, d = p
            return np.concatenate([self.of(t.args[0], dict(at) | c) for c in coordinates(axes)], d)
        xs = [self.of(a, at) for a in t.args]
        x = xs[0]
        if t.op == "arg_block":
            axes, n, name, d = p
            own = np.take(x, index(axes, at) * n + np.arange(n), d)
            return (np.argmax if name == "argmax" else np.argmin)(own, d)
        if t.op == "add":
            return sum(xs[1:], x)
        if t.op in POINTWISE:
            return POINTWISE[t.op](*xs)
        if t.op in UNARY:
            return UNARY[t.op](x, t)
        if t.op == "concatenate":
            d, _ = p
            shape = np.broadcast_shapes(*[(*x.shape[:d], 1, *x.shape[d + 1 :]) for x in xs])
            return np.concatenate([np.broadcast_to(x, (*shape[:d], x.shape[d], *shape[d + 1 :])) for x in xs], d)
        if t.op == "pad":
            config = dict(p)
            return lax.pad(jnp.asarray(x), jnp.asarray(xs[1]), [config.get(d, (0, 0, 0)) for d in range(rank)])
        if t.op in REDUCTIONS:
            return REDUCTIONS[t.op](x, p, keepdims=True)
        if t.op == "cumsum":
            d, reverse = p
            return np.flip(np.cumsum(np.flip(x, d), d), d) if reverse else np.cumsum(x, d)
        if t.op == "einsum":
            (left, right), kept, _ = p
            sizes = {}
            for labels, a in ((left, x), (right, xs[1])):
                for n, size in zip(labels, a.shape, strict=True):
                    sizes[n] = max(size, sizes.get(n, 1))
            x, y = (np.broadcast_to(a, [sizes[n] for n in ls]) for ls, a in ((left, x), (right, xs[1])))
            return np.einsum(x.astype(np.float64), list(left), y.astype(np.float64), list(right), list(kept))
        if t.op == "dynamic_slice":
            n, start = t.shape[p], int(xs[1].reshape(()))
            return np.take(x, min(max(start, 0), x.shape[p] - n) + np.arange(n), p)
        if t.op == "dynamic_update_slice":
            x, new, *starts = xs
            x, at = np.array(np.broadcast_to(x, t.shape)), [slice(None)] * rank
            for d, start in zip(p, starts, strict=True):
                start = min(max(int(start.reshape(())), 0), t.shape[d] - new.shape[d])
                at[d] = slice(start, start + new.shape[d])
            x[tuple(at)] = new
            return x
        raise NotImplementedError(t.op)


def coordinates(axes):
    grids = np.indices([SIZES[a] for a in axes]).reshape(len(axes), -1).T
    return [dict(zip(axes, map(int, c), strict=True)) for c in grids]


def index(axes, at):
    return int(np.ravel_multi_index([at[a] for a in axes], [SIZES[a] for a in axes])) if axes else 0


def check(values, rel, found):
    """Compare a relation with the values of all devices; False if it says nothing that can be compared."""
    if rel.kind.endswith("*") or any(isinstance(s, Fragments) and s.origin is not None for s in rel.spec):
        return False
    reduce = {"max": np.max, "min": np.min}.get(rel.kind, np.sum)
    for at in coordinates(EVERY):
        group = [
            k for k, c in enumerate(coordinates(EVERY)) if all(c[a] == at[a] for a in EVERY if a not in rel.partial)
        ]
        have = reduce(found[group].astype(np.float64), 0)
        want, defined = values.of(rel.term, at).astype(np.float64), np.ones(rel.shape, bool)
        for d, (axes, n) in enumerate(zip(rel.spec, rel.shape, strict=True)):
            if not axes:
                continue
            where, fill = index(tuple(axes), at) * n + np.arange(n), None
            if isinstance(axes, Fragments):
                table = axes.array[index(tuple(axes), at)]
                assert (table[..., 1] == ALL).all()
                where, fill = table[:, 0], axes.fill
            assert (where >= 0).all() or fill is not None
            want = np.take(want, np.maximum(where, 0), d)
            outside = (where < 0).reshape([-1 if k == d else 1 for k in range(len(rel.shape))])
            if fill is not None and fill[0] == "literal":
                want = np.where(outside, float({"True": 1, "False": 0}.get(fill[1], fill[1])), want)
            elif fill is not None:
                defined &= ~outside
        want = np.broadcast_to(want, rel.shape)
        np.testing.assert_allclose(have[defined], want[defined], rtol=1e-5, atol=1e-5, err_msg=f"{rel}")
    return True


def random_program(seed, length, made):
    """A program of devices: random ops of random values. ``made``: gets the name of the op of each value."""

    def program(*args):
        rng, pool = random.Random(seed), list(args)
        made.clear()
        made.extend(["argument"] * len(args))

        def pick(test=lambda x: True):
            some = [x for x in pool if test(x)]
            return rng.choice(some[-6:] if rng.random() < 0.4 else some) if some else None

        def axes():
            return rng.choice([("data",), ("model",), EVERY, EVERY[::-1]])

        def dim(x):
            return rng.randrange(x.ndim)

        def device():
            return lax.axis_index(rng.choice(EVERY))

        def elementwise(x):
            y = pick(lambda y: y.shape == x.shape)
            return rng.choice([jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum])(x, y)

        def reshaped(x):
            sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if x.size % n == 0]
            n = rng.choice(sizes)
            m = rng.choice([m for m in sizes if x.size // n % m == 0])
            return x.reshape(rng.choice([(n, x.size // n), (n, m, x.size // n // m), (x.size,), x.shape[::-1]]))

        def broadcast(x):
            k, n = rng.randrange(x.ndim + 1), rng.choice([1, 2, 4])
            return lax.broadcast_in_dim(x, (*x.shape[:k], n, *x.shape[k:]), [*range(k), *range(k + 1, x.ndim + 1)])

        def masked(x):
            c = device() == rng.randrange(2)
            if rng.random() < 0.3:
                c &= lax.axis_index("model") == rng.randrange(2)
            return jnp.where(c, x, rng.choice([0.0, 0.0, 0.0, -0.0, 1.0]))

        def masked_rows(x):
            d = dim(x)
            row = lax.broadcasted_iota(np.int32, x.shape, d) + device() * rng.choice([x.shape[d], x.shape[d], 1])
            return jnp.where(row >= rng.randrange(5), x, rng.choice([0.0, -1.0]))

        def dot(x):
            y = pick(lambda y: set(y.shape) & set(x.shape))
            pairs = [(i, j) for i, n in enumerate(x.shape) for j, m in enumerate(y.shape) if n == m]
            i, j = rng.choice(pairs)
            return lax.dot_general(x, y, (((i,), (j,)), ((), ())))

        def start(n):
            return rng.choice([np.int32(rng.randrange(n + 1)), device() * n, device() * rng.randrange(4), device() + 1])

        def sliced(x):
            d = dim(x)
            n = rng.choice([n for n in (1, 2, 3, 4) if n <= x.shape[d]])
            if rng.random() < 0.3:
                at = rng.randrange(x.shape[d] - n + 1)
                return lax.slice_in_dim(x, at, at + n, 1, d)
            return lax.dynamic_slice_in_dim(x, start(n), n, d)

        def updated(x):
            d = dim(x)
            new = pick(
                lambda y: (
                    y.ndim == x.ndim
                    and all(
                        n == m or (k == d and m <= n) for k, (n, m) in enumerate(zip(x.shape, y.shape, strict=True))
                    )
                )
            )
            return lax.dynamic_update_slice_in_dim(rng.choice([x, jnp.zeros_like(x)]), new, start(new.shape[d]), d)

        def permuted(x):
            over = axes()
            n = math.prod(SIZES[a] for a in over)
            targets = rng.choice([[(k + 1) % n for k in range(n)], [*range(1, n), -1], rng.sample(range(n), n)])
            return lax.ppermute(x, over, [(k, t) for k, t in enumerate(targets) if t >= 0])

        def concatenated(x):
            d = dim(x)
            like = (*x.shape[:d], *x.shape[d + 1 :])
            return jnp.concatenate(
                [pick(lambda y: y.ndim == x.ndim and (*y.shape[:d], *y.shape[d + 1 :]) == like), x], d
            )

        def scattered(x):
            over = axes()
            n = math.prod(SIZES[a] for a in over)
            dims = [d for d, m in enumerate(x.shape) if m % n == 0]
            return lax.psum_scatter(x, over, scatter_dimension=rng.choice(dims), tiled=True) if dims else None

        def exchanged(x):
            over = axes()
            n = math.prod(SIZES[a] for a in over)
            dims = [d for d, m in enumerate(x.shape) if m % n == 0]
            return lax.all_to_all(x, over, rng.choice(dims), dim(x), tiled=True) if dims else None

        def padded(x):
            d = dim(x)
            config = [
                (rng.randrange(2), rng.randrange(2), rng.randrange(2)) if k == d else (0, 0, 0) for k in range(x.ndim)
            ]
            return lax.pad(x, np.float32(rng.choice([0.0, 0.0, 2.0])), config)

        def rows(x):
            d = dim(x)
            at = lax.broadcasted_iota(np.int32, x.shape, d) + device() * rng.choice([x.shape[d], 1])
            return at.astype(np.float32)

        def best(x):
            d = dim(x)
            return rng.choice([jnp.argmax, jnp.argmin])(x, d).astype(np.float32)

        ops = {
            "elementwise": elementwise, "reshape": reshaped, "broadcast": broadcast, "mask": masked, "mask of rows": masked_rows,
            "dot": dot, "slice": sliced, "update": updated, "ppermute": permuted, "concatenate": concatenated, "iota": rows,
            "reduce-scatter": scattered, "all-to-all": exchanged, "pad": padded, "argmax": best,
            "scale": lambda x: x * rng.choice([2.0, -1.0, 0.5]),
            "sum": lambda x: x.sum(dim(x)), "max": lambda x: x.max(dim(x)), "psum": lambda x: lax.psum(x, axes()),
            "pmax": lambda x: lax.pmax(x, axes()),
            "transpose": lambda x: x.transpose(rng.sample(range(x.ndim), x.ndim)),
            "gather": lambda x: lax.all_gather(x, axes(), axis=dim(x), tiled=True),
            "untiled gather": lambda x: lax.all_gather(x, axes(), axis=dim(x)),
            "cumsum": lambda x: lax.cumsum(x, dim(x), reverse=rng.random() < 0.5), "sort": lambda x: jnp.sort(x, dim(x)),
            "rev": lambda x: lax.rev(x, [dim(x)]),
        }  # fmt: skip
        for _ in range(length):
            name = rng.choice(list(ops))
            x = pick(lambda x: x.ndim > 0)
            y = ops[name](x)
            if y is not None and 0 < y.size <= MAX_SIZE and y.ndim <= 4:
                pool.append(y)
                made.append(name)
        return [x[None] for x in pool]

    return program


SPECS = P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P()
SHAPES = (8, 3), (4, 8), (4, 8), (16, 2), (4, 2)


def checked(seed, length=24):
    """(values whose relation was compared, values that have no relation) of a random program."""
    rng, made = np.random.default_rng(seed), []
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    args = [rng.integers(-3, 4, s).astype(np.float32) for s in SHAPES]
    program = random_program(seed, length, made)
    sharded = jax.shard_map(program, mesh=mesh, in_specs=SPECS, out_specs=P(EVERY), check_vma=False)
    traced = jax.jit(sharded).trace(*args)
    (eqn,) = traced.jaxpr.eqns
    walk = Walk(Context(Terms(), written=False))
    walk.ctx.sizes = SIZES
    terms = [walk.ctx.terms.make("input", k, (), a.shape, a.dtype) for k, a in enumerate(args)]
    inner = eqn.params["jaxpr"]
    blocks = zip(terms, inner.invars, SPECS, strict=True)
    rels = [walk.ctx.replicated(t, t.shape).of(t, v.aval.shape, axes_of_spec(s, 2)) for t, v, s in blocks]
    known = walk.run(inner, (), rels)
    assert not [c for c in walk.failed if c.error]
    found = traced.lower().compile()(*args)
    values, compared, unknown = Values(args), 0, 0
    for name, rel, x in zip(made, known, found, strict=True):
        x = np.asarray(x)
        if not isinstance(rel, Rel):
            unknown += 1
        elif np.isfinite(x).all() and np.abs(x).max() < MAX_VALUE:
            try:
                compared += check(values, rel, x[:, None])
            except AssertionError as e:
                raise AssertionError(f"seed {seed}: {name}: {e}") from e
    return compared, unknown


@pytest.mark.parametrize("seed", range(4))
def test_the_relations_of_a_random_program_hold(seed):
    assert checked(seed)[0] > 5
