"""Factor rules: every primitive has one that matches its shapes. Under split operands an op has the unsharded result, and its
collectives have a cause."""

import contextlib
import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.random import threefry2x32_p
from same_results import assert_close

import meshpar as mp
from meshpar._src.program.primitives import add_row_p
from meshpar._src.rules import having, primitive, separated
from meshpar._src.rules.constant_index_gather import rearrange
from meshpar._src.rules.user_shard_map import same_dims

KEY = jax.random.key(0)


def numbers(*shape: int, dtype=np.float32, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng([seed, *shape])
    if np.issubdtype(dtype, np.integer):
        return jnp.asarray(rng.integers(0, 5, shape), dtype)
    if dtype is bool or dtype == np.dtype(bool):
        return jnp.asarray(rng.random(shape) < 0.7)
    return jnp.asarray(rng.normal(size=shape), dtype)


ints = functools.partial(numbers, dtype=np.int32)


def spd(n: int, batch: int = 4) -> jax.Array:
    x = np.asarray(numbers(batch, n, n))
    return jnp.asarray(x @ np.swapaxes(x, -1, -2) + 4 * np.eye(n, dtype=x.dtype))


def equations(jaxpr: Jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else (value,):
                if isinstance(x, ClosedJaxpr | Jaxpr):
                    yield from equations(x.jaxpr if isinstance(x, ClosedJaxpr) else x)


def traced(fn, *args):
    return list(equations(jax.make_jaxpr(fn)(*args).jaxpr))


def shapes_of(eqn):
    return [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars]


# -- every registered primitive: the rule fits the shapes

X, IMAGES, KERNEL = numbers(4, 6), numbers(2, 8, 8, 4), numbers(3, 3, 4, 6)


def conv(*, strides=(1, 1), padding="SAME", **kw):
    def of(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **kw)

    return of


def gradients(fn):
    return jax.grad(lambda x, w: jnp.sum(fn(x, w) ** 2), argnums=(0, 1))


def triangular(**how):
    return functools.partial(lax.linalg.triangular_solve, lower=True, **how)


def max_pool_gradient(x):
    return jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2))(x)


def over_vmap(fn):
    return jax.vmap(fn, axis_name="i", out_axes=None)


@functools.partial(jax.jit)
def general_reduce(x, y):
    return lax.reduce((x, y), (np.float32(0), np.float32(0)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))


def tridiagonal_solve(x):
    return lax.linalg.tridiagonal_solve(x, x + 4, x, x[..., None])


def pair_scan(p, q):
    return p[0] + q[0], jnp.maximum(p[1], q[1])


def pair_solve(x, y):
    positive = x @ x.T + y @ y.T + 8 * jnp.eye(4)
    solve = lambda _, b: jnp.linalg.solve(positive, b)  # noqa: E731
    return lax.custom_linear_solve(lambda v: positive @ v, y, solve, symmetric=True)


add_row = functools.partial(add_row_p.bind, late=False)
CASES: dict[str, tuple[Any, ...]] = {
    # name: (function, *arguments)
    "matmul": (jnp.matmul, numbers(4, 6), numbers(6, 8)),
    "gamma": (lambda a: jax.random.gamma(KEY, a), X),
    "gamma of many keys": (lambda a: jax.vmap(jax.random.gamma)(jax.random.split(KEY, 4), a), X),
    "attention": (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), numbers(2, 4, 6, 8), numbers(2, 10, 6, 8)),
    "two contractions": (lambda a, b: jnp.einsum("abcd,cdbe->bae", a, b), numbers(2, 4, 6, 8), numbers(6, 8, 4, 2)),
    "outer product": (lambda a, b: jnp.einsum("i,j->ij", a, b), numbers(4), numbers(6)),
    "inner product": (jnp.vdot, numbers(4), numbers(4)),
    "all batch": (lambda a, b: lax.dot_general(a, b, (((), ()), ((0, 1), (1, 0)))), numbers(4, 6), numbers(6, 4)),
    "conv": (conv(), IMAGES, KERNEL),
    "conv 1x1": (conv(), IMAGES, numbers(1, 1, 4, 6)),
    "conv over all": (conv(padding="VALID"), IMAGES, numbers(8, 8, 4, 6)),
    "conv grouped": (conv(feature_group_count=2), numbers(2, 8, 8, 8), KERNEL),
    "conv depthwise": (conv(feature_group_count=4), IMAGES, numbers(3, 3, 1, 8)),
    "conv gradients": (gradients(conv()), IMAGES, KERNEL),
    "conv grouped gradients": (gradients(conv(feature_group_count=2)), numbers(4, 8, 8, 8), KERNEL),
    "conv strided": (conv(strides=(2, 2)), IMAGES, KERNEL),
    "take": (lambda x, i: jnp.take(x, i, axis=0), numbers(8, 6), ints(4, 2)),
    "take along axis": (lambda x, i: jnp.take_along_axis(x, i, axis=1), X, ints(4, 2)),
    "index": (lambda x, i: x[:, i, 2:4], numbers(2, 6, 8), ints(4)),
    "index two": (lambda x, i: x[i, i + 1], numbers(6, 8, 4), ints(4)),
    "embedding gradient": (lambda x, i: jax.grad(lambda x: jnp.sum(x[i] ** 2))(x), numbers(8, 6), ints(4, 2)),
    "at set": (lambda x, i: x.at[i].set(1.0), numbers(8, 6), ints(4)),
    "at set window": (lambda x, i: x.at[i, 2:4].set(1.0), numbers(8, 6), ints(4)),
    "at mul": (lambda x, i: x.at[i].mul(2.0), numbers(8, 6), ints(4)),
    "at min": (lambda x, i: x.at[i].min(0.0), numbers(8, 6), ints(4)),
    "at max": (lambda x, i: x.at[i].max(0.0), numbers(8, 6), ints(4)),
    "at subtract": (lambda x, i, u: x.at[i].subtract(u), numbers(8, 6), ints(4), X),
    "batched scatter": (jax.vmap(lambda x, i, u: x.at[i].add(u)), numbers(4, 8, 6), ints(4, 2), numbers(4, 2, 6)),
    "batched gather": (jax.vmap(lambda x, i: x[i]), numbers(4, 8, 6), ints(4, 2)),
    "sum": (lambda x: x.sum(1), X),
    "sum all": (jnp.sum, X),
    "sum keepdims": (lambda x: x.sum(1, keepdims=True), X),
    "max": (lambda x: x.max(1), X),
    "min": (lambda x: x.min(0), X),
    "prod": (lambda x: x.prod(1), X),
    "all": (lambda x: x.all(1), numbers(4, 6, dtype=bool)),
    "any": (lambda x: x.any(0), numbers(4, 6, dtype=bool)),
    "xor": (lambda x: lax.reduce_xor(x, [1]), ints(4, 6)),
    "psum of a vmap": (over_vmap(lambda x: lax.psum((x, 2 * x), "i")), X),
    "pmax of a vmap": (over_vmap(lambda x: lax.pmax(x, "i")), X),
    "pmin of a vmap": (over_vmap(lambda x: lax.pmin(x, "i")), X),
    "rearrange": (lambda x: rearrange(x, 1, [5, 0, 0, -1, 2, 3]), X),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "argmin": (lambda x: jnp.argmin(x, 0), X),
    "reduce": (general_reduce, X, X + 1),
    "cumsum": (lambda x: jnp.cumsum(x, 1), X),
    "cumprod": (lambda x: jnp.cumprod(x, 0), X),
    "cummax": (lambda x: lax.cummax(x, 1), X),
    "cummin": (lambda x: lax.cummin(x, 1), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), X),
    "sort": (lambda x: jnp.sort(x, 1), X),
    "sort pairs": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), X, X + 1),
    "top_k": (lambda x: lax.top_k(x, 2), X),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), X),
    "windowed sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"), X),
    "windowed max": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), X),
    "windowed min": (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"), X),
    "windowed": (lambda x: lax.reduce_window(x, np.float32(1), lax.mul, (1, 2), (1, 2), "VALID"), X),
    "max pool gradient": (max_pool_gradient, X),
    "max pool second": (lambda x: jax.jvp(max_pool_gradient, (x,), (x,)), X),
    "fft": (lambda x: jnp.fft.fft(x), X),
    "fft 2": (lambda x: jnp.fft.rfft2(x), numbers(2, 4, 6)),
    "cholesky": (jnp.linalg.cholesky, spd(4)),
    "eigh": (lambda x: jnp.linalg.eigh(x), spd(4)),
    "eig": (lambda x: jnp.linalg.eig(x), spd(4)),
    "lu": (lambda x: lax.linalg.lu(x), spd(4)),
    "qr": (lambda x: jnp.linalg.qr(x), spd(4)),
    "svd": (lambda x: jnp.linalg.svd(x), numbers(2, 4, 6)),
    "solve": (lambda a, b: jnp.linalg.solve(a, b), spd(4), numbers(4, 4, 2)),
    "triangular solve": (triangular(left_side=True), spd(4), numbers(4, 4, 6)),
    "triangular solve transposed": (triangular(left_side=True, transpose_a=True), spd(4), numbers(4, 4, 6)),
    "triangular solve from the right": (triangular(), spd(4), numbers(4, 6, 4)),
    "random bits of the backend": (lambda k: lax.rng_bit_generator(k, (4, 6)), np.arange(4, dtype=np.uint32)),
    "pure callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), X),
    "io callback": (lambda x: io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), X),
    "debug callbacks": (lambda x: (jax.debug.callback(np.sin, x), jax.debug.print("{}", x)), X),
    "schur": (lambda x: lax.linalg.schur(x), spd(4)[0]),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x), spd(4)),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x, lower=True), spd(4)),
    "tridiagonal solve": (tridiagonal_solve, numbers(2, 6)),
    "symmetric product": (lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0), numbers(2, 4, 6), spd(4, 2)),
    "cholesky update": (lambda r, w: lax.linalg.cholesky_update(r, w), spd(4)[0], numbers(4)),
    "product with an orthogonal matrix": (lambda a, b: jax.scipy.linalg.qr_multiply(a, b), numbers(6, 4), X),
    "householder": (lambda a: lax.linalg.householder_product(a, a[..., 0, :2]), numbers(2, 4, 2)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (8, 4, 6)), X),
    "broadcast a size of 1": (lambda x: jnp.broadcast_to(x, (4, 6)), numbers(4, 1)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), numbers(2, 4, 6)),
    "reshape split": (lambda x: x.reshape(4, 2, 3), X),
    "reshape merge": (lambda x: x.reshape(8, 3), numbers(4, 2, 3)),
    "reshape both": (lambda x: x.reshape(8, 6), numbers(2, 4, 2, 3)),
    "reshape crosswise": (lambda x: x.reshape(4, 6), numbers(6, 4)),
    "reshape ones": (lambda x: x.reshape(4, 1, 6), X),
    "reshape uneven": (lambda x: x.reshape(2, 9), numbers(3, 6)),
    "reshape uneven after a prefix": (lambda x: x.reshape(4, 2, 9), numbers(4, 3, 6)),
    "reshape uneven before a suffix": (lambda x: x.reshape(2, 9, 4), numbers(3, 6, 4)),
    "reshape empty": (lambda x: x.reshape(0, 6), numbers(4, 0)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), numbers(4, 1, 6)),
    "expand dims": (lambda x: lax.expand_dims(x, (1,)), X),
    "slice": (lambda x: x[:, 1:3], X),
    "strided slice": (lambda x: x[:, ::2], X),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (np.int32(0), i), (4, 2)), X, jnp.int32(1)),
    "dynamic update slice": (lambda x, u: lax.dynamic_update_slice(x, u, (0, 1)), X, numbers(4, 2)),
    "add row": (add_row, numbers(3, 4, 6), numbers(4, 6), jnp.int32(1), jnp.array([True, False, True, True])),
    "add rows": (add_row, numbers(3, 4, 6), numbers(4, 6), jnp.array([2, 0, 1, 2], jnp.int32), jnp.ones(4, bool)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), X),
    "pad to the same size": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, -1, 0))), X),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), X, numbers(4, 2)),
    "concatenate equal": (lambda x, y: jnp.concatenate([x, y], 0), X, X),
    "split": (lambda x: jnp.split(x, 2, 1), X),
    "split into one": (lambda x: jnp.split(x, 1, 1), X),
    "reverse": (lambda x: x[:, ::-1], X),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 1), X),
    "random": (lambda k: jax.random.bits(k, (4, 6)), KEY),
    "stack": (lambda x, y: jnp.stack([x, y], 1), X, X + 1),
    "unstack": (lambda x: jnp.unstack(x, axis=1), X),
    "tile": (lambda x: jnp.tile(x, (2, 1, 3)), numbers(2, 4, 6)),
    "device put": (lambda x, y: jax.device_put((x, y)), X, numbers(2, 3)),
    "split keys": (jax.vmap(lambda k: jax.random.key_data(jax.random.split(k, 3))), jax.random.split(KEY, 4)),
    "seeds": (jax.vmap(lambda s: jax.random.key_data(jax.random.key(s))), jnp.arange(4)),
    "wrap keys": (lambda x: jax.random.key_data(jax.random.wrap_key_data(x)), jnp.zeros((4, 2), jnp.uint32)),
    "ragged dot": (lambda x, y: lax.ragged_dot(x, y, jnp.array([3, 1])), X, numbers(2, 6, 4)),
    "ragged dot of groups from outside": (lax.ragged_dot, X, numbers(2, 6, 4), np.array([3, 1], np.int32)),
    "ragged dot gradients": (gradients(lambda x, y: lax.ragged_dot(x, y, jnp.array([3, 1]))), X, numbers(2, 6, 4)),
    "inverse": (jnp.linalg.inv, spd(4)[0]),
    # several operands, which are sharded differently
    "sort three": (lambda x, y, z: lax.sort((x, y, z), dimension=1, num_keys=2), ints(4, 6), X, X + 1),
    "windowed pairs": (
        lambda x, y: lax.reduce_window((x, y), (np.float32(0), np.float32(-9)), pair_scan, (2, 1), (2, 1), "VALID"),
        X,
        X + 1,
    ),
    "barrier": (lambda x, y: lax.optimization_barrier((x.sum(0), y.max(1))), X, X + 1),
    "threefry": (lambda x, y: threefry2x32_p.bind(x, y, x + 1, y + 1), *[ints(4, 6).astype(np.uint32)] * 2),
    "select and clamp": (lambda x, y, z: (lax.select_n(z % 2 > 0, x, y), lax.clamp(x, y, x + 1)), X, X + 1, ints(4, 6)),
    "custom linear solve": (pair_solve, X, X + 1),
    "associative scan": (lambda x, y: lax.associative_scan(pair_scan, (x, y), axis=0), X, X + 1),
    "cond": (lambda x, y: lax.cond(x[0, 0] > 0, lambda p, q: (p, q), lambda p, q: (q, p), x, y), X, X + 1),
    "scan": (
        lambda x, y: lax.scan(lambda c, z: ((c[0] + z[0], c[1] * z[1]), (c[1], z[0])), (x[0], y[0]), (x, y)),
        X,
        X + 1,
    ),
    "while": (
        lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2] * 0.5, c[1] + 1), (0, x, y)),
        X,
        X + 1,
    ),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
    "bitcast narrower": (lambda x: lax.bitcast_convert_type(x, jnp.int16), X),
    "bitcast wider": (lambda x: lax.bitcast_convert_type(x, jnp.int32), numbers(4, 2, dtype=np.int16)),
}

ABSENT = {  # what no function of JAX makes before it is lowered
    "empty",
    "geqp3",
    "kernel",  # tests/program/test_kernels.py
    "lu_pivots_to_permutation",
    "shard_map",  # tests/lower/test_own_shard_map.py
}


def ruled(name: str):
    """(equation, rule) of every equation of a case that has a factor rule."""
    fn, *args = CASES[name]
    for eqn in itertools.chain.from_iterable(map(separated, traced(fn, *args))):
        rule = primitive(eqn.primitive.name).rule
        if rule is not None:
            yield eqn, rule(eqn, *shapes_of(eqn))


def test_every_rule_is_tried():
    tried = {eqn.primitive.name for name in CASES for eqn, _ in ruled(name)}
    in_own_shard_maps = having(lambda p: p.rule is same_dims)  # collectives over axes of the mesh
    assert having(lambda p: p.rule) - in_own_shard_maps - tried == ABSENT


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_every_split_has_its_causes_worded(name):
    """Every dim of the operands is split alone, and with all dims of its size: the reshards, reductions and local forms of each."""
    fn, *args = CASES[name]
    dims = [tuple(f"d{k}_{i}" for i in range(np.ndim(x))) for k, x in enumerate(args)]
    sizes = {d: n for own, x in zip(dims, args, strict=True) for d, n in zip(own, np.shape(x), strict=True)}
    even = [d for d, n in sizes.items() if n and n % 2 == 0]
    together = [[d for d in even if sizes[d] == n] for n in sorted({sizes[d] for d in even})]
    where = {
        "mesh": "x=2",
        "dims": {f"args/{k}": " ".join(own) for k, own in enumerate(dims) if own},
        "lowering": "jit",
    }
    for split in {tuple(t) for t in (*together, *([d] for d in even))}:
        plan = mp.plan(lambda *args: fn(*args), *args, layout=f"{', '.join(split)}: x", **where)
        assert all(c.cause for c in plan.collectives)


# -- generated code does not depend on the user's configuration of JAX


CHECKS_OF_USER_CODE = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_matmul_precision": "highest",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_enable_checks": True,
}


@contextlib.contextmanager
def configured(**options):
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


AXES = {(0, 0): "data", (0, 1): "model", (0, 2): "data", (0, 3): "model", (1, 0): "model", (1, 1): "data"}
"""(operand, dim) → mesh axis."""


def split_program(names: list[str], order: int = 1):
    """(a function of the operands of cases, the same under a layout that splits these, the operands).

    Their equations are traced here, so that options that are set later can change meshpar's own code only.

    Args:
      order: 1: the first dims of each operand are split, as far as the axes allow; -1: the last ones.
    """
    functions, xs, dims, rules = {}, {}, {}, []
    for k, name in enumerate(names):
        fn, *args = CASES[name]
        functions[name] = jaxpr_as_fun(jax.make_jaxpr(fn)(*args))
        xs[name] = jax.tree.leaves(args)
        for i, x in enumerate(xs[name]):
            if jnp.ndim(x):
                dims[f"xs/{name}/{i}"] = " ".join(f"x{k}_{i}_{d}" for d in range(jnp.ndim(x)))
                rules += [f"x{k}_{i}_{d}?: {AXES[i, d]}" for d in range(jnp.ndim(x)) if (i, d) in AXES]

    def step(xs):
        return {name: fn(*xs[name]) for name, fn in functions.items()}

    where = {"mesh": "data=2, model=2", "dims": dims, "lowering": "shard_map", "layout": "; ".join(rules[::order])}
    return step, mp.jit(step, **where), xs


LOCAL = sorted(CASES.keys() - {"io callback"})  # with results: it has no local form
READ_BY_JAX = [name for name in LOCAL if name.startswith("ragged dot")]  # JAX's lowering reads the default precision
OTHERS = [name for name in LOCAL if name not in READ_BY_JAX]
GROUPS = [READ_BY_JAX, *(OTHERS[k : k + 12] for k in range(0, len(OTHERS), 12))]


@pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("names", GROUPS, ids=lambda x: x[0])
def test_split_operands_have_the_unsharded_results(names, order):
    step, run, xs = split_program([name for name in names if name != "debug callbacks"], order)
    assert_close(run(xs), jax.jit(step)(xs), 2e-4, 2e-4)


@pytest.mark.parametrize("names", GROUPS, ids=lambda x: x[0])
def test_local_forms_do_not_depend_on_the_configuration(names):
    options = {k: v for k, v in CHECKS_OF_USER_CODE.items() if names is not READ_BY_JAX or "precision" not in k}

    def text(**options):
        _, run, xs = split_program(names)
        with configured(**options), warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.errors.JoinWarning)
            return run.lower(xs).as_text()

    with configured(jax_enable_x64=True):  # in which more dtypes differ
        assert text(**options) == text()
