"""Factor rules: every primitive has one that matches its shapes, and that is correct.

Each rule is checked by a run: for a factor that a rule allows to be split, every operand is halved
along it, the op runs on each half, and the results are combined (concatenated along a dim of the
result, or by the reduction that is the factor's kind). That must equal the result on full operands.
"""

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

import meshpar as mp
from meshpar._src.plan.collectives import UNWORDED
from meshpar._src.program.primitives import add_row_p
from meshpar._src.rules import having, no_rule, primitive, separated
from meshpar._src.rules.mapped import same_dims
from meshpar._src.rules.rearrange import rearrange

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
    x = numbers(batch, n, n)
    return x @ jnp.swapaxes(x, -1, -2) + 4 * jnp.eye(n)


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


REDUCTIONS = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


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
    "wrap keys": (jax.random.wrap_key_data, jnp.zeros((4, 2), jnp.uint32)),
    "ragged dot": (lambda x, y: lax.ragged_dot(x, y, jnp.array([3, 1])), X, numbers(2, 6, 4)),
    "ragged dot of groups from outside": (lax.ragged_dot, X, numbers(2, 6, 4), np.array([3, 1], np.int32)),
    "ragged dot gradients": (gradients(lambda x, y: lax.ragged_dot(x, y, jnp.array([3, 1]))), X, numbers(2, 6, 4)),
    "inverse": (jnp.linalg.inv, spd(4)[0]),
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


def fits(shapes, dims, rule) -> None:
    assert len(shapes) == len(dims)
    for shape, mine in zip(shapes, dims, strict=True):
        if not mine:
            continue  # every device has all of it
        assert len(shape) == len(mine)
        for size, factors in zip(shape, mine, strict=True):
            assert size == np.prod([rule.sizes[f] for f in factors], dtype=int)


@pytest.mark.parametrize("name", CASES)
def test_rule_fits_the_shapes(name):
    found = False
    for eqn, rule in ruled(name):
        found = True
        ins, outs = shapes_of(eqn)
        assert rule.known
        assert len(rule.sizes) == len(rule.kinds)
        fits(ins, rule.ins, rule)
        fits(outs, rule.outs, rule)
        read = {f for dims in rule.ins for factors in dims for f in factors}
        made = {f for dims in rule.outs for factors in dims for f in factors}
        assert read | made == {f for f in range(len(rule.sizes)) if f in read | made}
        for f, kind in enumerate(rule.kinds):
            if kind in REDUCTIONS:  # contracted: in operands only
                assert f in read
                assert f not in made
            if kind == "pass_through" and f in read and f in made:  # a result without it would be summed over it
                assert all(any(f in factors for factors in dims) for dims in rule.outs)
        for dims in (*rule.ins, *rule.outs):  # a factor is one dim of a value, at most
            flat = [f for factors in dims for f in factors]
            assert len(flat) == len(set(flat))
        for dims, shape in zip(rule.outs, outs, strict=True):
            assert len(dims) == len(shape)  # results are spelt out in full
        for x, y, _ in rule.name_links:
            assert max(x, y) < len(rule.sizes)
            assert rule.kinds[y] == ("need_replication" if rule.kinds[x] == "indexed" else rule.kinds[x])
            assert rule.kinds[x] in ("need_replication", "permutation", "indexed")
        for leader, follower in rule.sharded_like:
            assert rule.kinds[leader] == "permutation"
            assert rule.kinds[follower] in ("permutation", "sum")
    assert found


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
        assert not [c for c in plan.collectives if c.cause.startswith(UNWORDED)]


def test_no_rule_needs_replication():
    rule = no_rule([(2, 3)], [(4,)])
    assert not rule.known
    assert set(rule.kinds) == {"need_replication"}
    fits([(2, 3)], rule.ins, rule)


# -- results on halves combine to the full result


def cut(array: np.ndarray, dims, rule, f: int) -> list[np.ndarray] | None:
    """The two halves of an operand along a factor; twice the operand if it lacks the factor."""
    for axis, factors in enumerate(dims):
        if f in factors:
            k = factors.index(f)
            sizes = [rule.sizes[g] for g in factors]
            shape = array.shape[:axis] + tuple(sizes) + array.shape[axis + 1 :]
            parts = np.split(array.reshape(shape), 2, axis + k)
            flat = (*array.shape[:axis], -1, *array.shape[axis + 1 :])
            return [p.reshape(flat) for p in parts]
    return [array, array]


def paste(parts, dims, rule, f: int, shape) -> np.ndarray:
    for axis, factors in enumerate(dims):
        if f in factors:
            k = factors.index(f)
            sizes = [rule.sizes[g] // (1 + (g == f)) for g in factors]
            split = [p.reshape(p.shape[:axis] + tuple(sizes) + p.shape[axis + 1 :]) for p in parts]
            return np.concatenate(split, axis + k).reshape(shape)
    return parts[0]


def splittable(rule) -> list[int]:
    """Factors that are split without an exchange or an index (for those: test_halo, _index, _scan_like and _sort)."""
    exchanged = {f for f, kind in enumerate(rule.kinds) if kind in ("need_replication", "permutation", "indexed")} | {
        f for _, f in rule.sharded_like
    }
    return [f for f, n in enumerate(rule.sizes) if f not in exchanged and n > 1 and n % 2 == 0]


def local_params(eqn, rule, f: int) -> dict[str, Any]:
    """The parameters of an op on shards: shapes are those of its operands."""
    p = dict(eqn.params)
    name = eqn.primitive.name

    def halved(shape, dims):
        return tuple(n // 2 if f in factors else n for n, factors in zip(shape, dims, strict=True))

    if name == "broadcast_in_dim":
        p["shape"] = halved(p["shape"], rule.outs[0])
    elif name == "tile":
        dims = zip(p["reps"], rule.outs[0], strict=True)
        p["reps"] = tuple(n // 2 if len(factors) > 1 and factors[0] == f else n for n, factors in dims)
    elif name == "reshape":
        p["new_sizes"] = halved(p["new_sizes"], rule.outs[0])
    elif name in ("gather", "dynamic_slice"):
        p["slice_sizes"] = (
            halved(p["slice_sizes"], rule.ins[0])
            if name == "dynamic_slice"
            else tuple(
                n // 2 if f in factors and rule.kinds[f] == "pass_through" and n > 1 else n
                for n, factors in zip(p["slice_sizes"], rule.ins[0], strict=True)
            )
        )
    elif name == "slice":
        p["limit_indices"] = halved(p["limit_indices"], rule.ins[0])
    elif name == "conv_general_dilated":
        dn = p["dimension_numbers"]
        for key, dim in (("feature_group_count", dn.lhs_spec[1]), ("batch_group_count", dn.lhs_spec[0])):
            if p[key] > 1 and rule.ins[0][dim][0] == f:
                p[key] //= 2
    return p


def half_operands(eqn, operands, rule, f: int, which: int):
    """The operands of an op on a half: a reduction of groups has those of its rows, and what a scatter adds to is added once."""
    operands = list(operands)
    name = eqn.primitive.name
    if name == "ragged_dot_general" and any(f in fs for fs in rule.ins[0]):
        (rows,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        if f in rule.ins[0][rows]:  # the part of every group that is in this half
            n = rule.sizes[f] // 2
            operands[2] = np.diff(np.clip(np.cumsum(operands[2]) - which * n, 0, n), prepend=0).astype(np.int32)
    if name.startswith("scatter") and f >= 0 and rule.kinds[f] == "sum" and which == 1:
        operands[0] = np.zeros_like(operands[0])
    return operands


def results(runs):
    """The results of (primitive, parameters, operands) of several runs, in one program."""

    def program(every):
        return [p.bind(*xs, **params) for (p, params, _), xs in zip(runs, every, strict=True)]

    outs = jax.jit(program)([list(map(jnp.asarray, operands)) for *_, operands in runs])
    found = zip(runs, outs, strict=True)
    return [[np.asarray(x) for x in (out if p.multiple_results else [out])] for (p, *_), out in found]


def interesting(eqn) -> bool:
    return all(np.issubdtype(v.aval.dtype, np.number) or v.aval.dtype == bool for v in (*eqn.invars, *eqn.outvars))


WHOLE = (
    "gamma, gamma of many keys, sum keepdims, rearrange, reduce, approx_top_k, windowed min, windowed, max pool second, fft 2, "
    "eig, qr, svd, random bits of the backend, pure callback, io callback, debug callbacks, schur, hessenberg, tridiagonal, "
    "tridiagonal solve, cholesky update, product with an orthogonal matrix, householder, reshape uneven before a suffix, "
    "reshape empty, expand dims, strided slice, add row, add rows, split into one, iota, random, split keys, seeds, wrap keys, "
    "ragged dot of groups from outside, inverse, bitcast wider"
).split(", ")
"""Cases that cannot run on halves: they draw numbers, have no dim that may be split, or parameters of their own for shards."""


HALVED = [name for name in CASES if name not in WHOLE]


@pytest.mark.parametrize("names", [HALVED[k : k + 12] for k in range(0, len(HALVED), 12)], ids=lambda names: names[0])
def test_results_on_halves_combine_to_the_full_result(names):
    """Of several cases in one program."""
    ops = [(name, eqn, rule) for name in names for eqn, rule in ruled(name) if eqn.invars and interesting(eqn)]
    runs = []
    for _, eqn, rule in ops:
        operands = [example(eqn, i) for i in range(len(eqn.invars))]
        runs.append((eqn.primitive, eqn.params, operands))
        for f in splittable(rule):
            halves = [cut(x, dims, rule, f) for x, dims in zip(operands, rule.ins, strict=True)]
            params = local_params(eqn, rule, f)
            runs += [(eqn.primitive, params, half_operands(eqn, [h[k] for h in halves], rule, f, k)) for k in (0, 1)]
    found, tried = iter(results(runs)), {"reshape uneven", "reshape crosswise"}
    for name, eqn, rule in ops:
        full = next(found)
        for f in splittable(rule):
            tried.add(name)
            kind, halves = rule.kinds[f], (next(found), next(found))
            for want, dims, *parts in zip(full, rule.outs, *halves, strict=True):
                got = paste(parts, dims, rule, f, want.shape) if kind == "pass_through" else REDUCTIONS[kind](*parts)
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4, err_msg=f"{eqn} factor {f} ({kind})")
    assert tried >= set(names)


def example(eqn, i: int) -> np.ndarray:
    """An operand for an equation: indices in range, matrices with factorizations, else random numbers."""
    aval = eqn.invars[i].aval
    if hasattr(eqn.invars[i], "val"):
        return np.broadcast_to(np.asarray(eqn.invars[i].val), aval.shape)
    name = eqn.primitive.name
    if name in ("cholesky", "eigh", "lu", "triangular_solve") and i == 0:
        return np.asarray(spd(aval.shape[-1], aval.shape[0]))
    if (name.startswith("scatter") or name == "gather") and i == 1:
        dn, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
        if name == "gather":
            room = [operand[d] - eqn.params["slice_sizes"][d] + 1 for d in dn.start_index_map]
        else:
            room = [operand[d] if d in dn.inserted_window_dims else 1 for d in dn.scatter_dims_to_operand_dims]
        return np.asarray(numbers(*aval.shape, dtype=np.int32, seed=3)) % np.asarray(room, np.int32)
    if name == "ragged_dot_general" and i == 2:
        return np.array([3, 1], aval.dtype)
    if name in ("dynamic_slice", "dynamic_update_slice") and aval.shape == ():
        return np.zeros((), aval.dtype)
    return np.asarray(numbers(*aval.shape, dtype=aval.dtype, seed=i))


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


def lowered_text(names: list[str], **options) -> str:
    """StableHLO of cases whose operands are split along their first dims. Their equations are traced before the options are
    set, so that they can change meshpar's own code only."""
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

    run = mp.jit(step, mesh="data=2, model=2", dims=dims, lowering="shard_map", layout="; ".join(rules))
    with configured(**options), warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.JoinWarning)
        return run.lower(xs).as_text()


LOCAL = sorted(CASES.keys() - {"io callback"})  # with results: it has no local form
READ_BY_JAX = [name for name in LOCAL if name.startswith("ragged dot")]  # JAX's lowering reads the default precision
OTHERS = [name for name in LOCAL if name not in READ_BY_JAX]


@pytest.mark.parametrize(
    "names", [READ_BY_JAX, *(OTHERS[k : k + 12] for k in range(0, len(OTHERS), 12))], ids=lambda x: x[0]
)
def test_local_forms_do_not_depend_on_the_configuration(names):
    options = {k: v for k, v in CHECKS_OF_USER_CODE.items() if names is not READ_BY_JAX or "precision" not in k}
    with configured(jax_enable_x64=True):  # in which more dtypes differ
        assert lowered_text(names, **options) == lowered_text(names)
