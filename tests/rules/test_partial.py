"""Partial values: every op, on a value that is partial over a split dim, equals the unsharded run.

One program per dtype and reduction has all cases, each on a partial value of its own (one that several ops read is reduced before
the first of them). Ops that have no law are cases, too: listing `sign` as linear in the registry, or `1/x`, gives wrong numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import meshpar as mp
from meshpar._src.plan.steps import Run
from meshpar._src.program.primitives import reduce_in
from meshpar._src.rules import ELEMENTWISE, PRIMITIVES, primitive
from meshpar._src.rules.partial import dtype_class

REDUCE = {kind: getattr(lax, f"reduce_{kind}") for kind in ("sum", "max", "min", "prod", "and", "or")}
KINDS = {  # dtype: kinds of reductions
    "float32": "sum max",
    "float16": "sum",
    "complex64": "sum",
    "int32": "sum prod",
    "uint8": "min and",
    "bool": "or",
}
MESH = "data=4, idle=2"
OPTIONS = {"mesh": MESH, "layout": "batch: data", "dims": {"x": "batch _ _"}, "lowering": "shard_map"}
ROWS, SHAPE = 8, (2, 3)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.0, 0.5]


def constants(dtype):
    if dtype == "bool":
        return [False, True]
    if dtype_class(jnp.dtype(dtype)) == "integer":
        return [0, 1, 3, -1] if dtype == "int32" else [0, 1, 3, 255]
    return [0.0, np.inf, 0.5, 1e30]


def elementwise_cases(dtype):
    """(name, function of (new partial value, y, s, m)) of the elementwise primitives that take the dtype."""
    with np.errstate(all="ignore"):
        literals = [np.asarray(c).astype(jnp.dtype(dtype)) for c in constants(dtype)]
    is_float = dtype_class(jnp.dtype(dtype)) not in ("integer", "bool")
    like = jax.ShapeDtypeStruct(SHAPE, dtype)
    for name in sorted(ELEMENTWISE):
        fn = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "not": lax.bitwise_not}.get(name)
        fn = fn or getattr(lax, name, None)
        if fn is None or name == "mulhi":  # which XLA does not compile for CPUs
            continue
        for arity in (1, 2):
            try:
                with np.errstate(all="ignore"):
                    jax.eval_shape(fn, *[like] * arity)
            except Exception:  # another number of operands, or not of this dtype
                continue
            if arity == 1:
                yield name, lambda p, y, s, m, fn=fn: fn(p())
                continue
            divides = name in ("div", "rem")
            over = divisor if divides else lambda x: x
            yield name, lambda p, y, s, m, fn=fn, over=over: fn(p(), over(y))
            yield name, lambda p, y, s, m, fn=fn, over=over: fn(p(), over(p()))
            if primitive(name).partial:
                yield name, lambda p, y, s, m, fn=fn, over=over: fn(y, over(p()))
            if name in ("mul", "div"):
                yield name, lambda p, y, s, m, fn=fn, over=over: fn(p(), over(jnp.broadcast_to(s, SHAPE)))
                for c in (c for c in literals if c or not divides or is_float):
                    yield name, lambda p, y, s, m, fn=fn, c=c: fn(p(), jnp.full(SHAPE, c))
                yield name, lambda p, y, s, m, fn=fn, over=over, c=literals[2]: fn(jnp.full(SHAPE, c), over(p()))
    zero = np.zeros((), jnp.dtype(dtype))
    for c in literals:
        yield "select_n", lambda p, y, s, m, c=c: jnp.where(m, p(), c)
        yield "select_n", lambda p, y, s, m, c=c: jnp.where(m, c, p())
    yield "select_n", lambda p, y, s, m: jnp.where(m, p(), y)
    yield "select_n", lambda p, y, s, m: jnp.where(m, p(), p())
    yield "select_n", lambda p, y, s, m: jnp.where(m[0, 0], zero, p())
    yield "select_n", lambda p, y, s, m: jnp.where(p() != 0, y, zero)
    for to in () if dtype == "complex64" else ("float32", "float16", "bfloat16", "int32", "uint8", "bool"):
        yield "convert_element_type", lambda p, y, s, m, to=to: p().astype(to)
    weak = functools.partial(lax.convert_element_type_p.bind, new_dtype=jnp.dtype(dtype), weak_type=True, sharding=None)
    yield "convert_element_type", lambda p, y, s, m: weak(p())
    yield "optimization_barrier", lambda p, y, s, m: lax.optimization_barrier((p(), y))[0]
    yield "copy", lambda p, y, s, m: jnp.copy(p())
    yield "name", lambda p, y, s, m: checkpoint_name(p(), "a")
    yield "stop_gradient", lambda p, y, s, m: lax.stop_gradient(p())
    if dtype == "float32":
        yield "complex", lambda p, y, s, m: lax.complex(p(), p())
    if dtype_class(jnp.dtype(dtype)) in ("float", "narrow"):
        yield "reduce_in", lambda p, y, s, m: reduce_in(p(), jnp.float32)
        yield "clamp", lambda p, y, s, m: lax.clamp(zero, p(), y)


@functools.cache
def cases_of(dtype):
    """(name, function) pairs of all primitives."""
    return [*elementwise_cases(dtype), *rule_cases(dtype)]


def rule_cases(dtype):
    """(name, function) pairs of primitives with factor rules."""
    yield "transpose", lambda p, y, s, m: p().T
    yield "reshape", lambda p, y, s, m: p().reshape(6)
    yield "squeeze", lambda p, y, s, m: lax.squeeze(p().reshape(1, 6), (0,))
    yield "name_dims", lambda p, y, s, m: mp.named(p(), "a b")
    yield "rename_dims", lambda p, y, s, m: mp.rename(mp.named(p(), "a b"), a="e")
    yield "pad", lambda p, y, s, m: jnp.pad(p(), 1)
    yield "concatenate", lambda p, y, s, m: jnp.concatenate([p(), p()])
    yield "stack", lambda p, y, s, m: jnp.stack([p(), p()])
    yield "rev", lambda p, y, s, m: p()[::-1]
    yield "slice", lambda p, y, s, m: p()[:, 1:]
    yield "pad", lambda p, y, s, m: jnp.pad(p(), 1, constant_values=1)
    yield "concatenate", lambda p, y, s, m: jnp.concatenate([p(), y])
    yield "broadcast_in_dim", lambda p, y, s, m: jnp.broadcast_to(p(), (2, *SHAPE))
    yield "broadcast_in_dim", lambda p, y, s, m: lax.broadcast_in_dim(p(), (1, 2, 1, 3), (1, 3))
    yield "sort", lambda p, y, s, m: lax.sort(p())
    yield "gather", lambda p, y, s, m: p()[jnp.array([1, 0, 1])]
    yield "dynamic_slice", lambda p, y, s, m: lax.dynamic_slice(p(), (1, 1), (1, 2))
    yield "scatter", lambda p, y, s, m: y.at[0].set(p()[0])
    for start in (jnp.zeros_like, finite):
        yield "dynamic_update_slice", lambda p, y, s, m, start=start: lax.dynamic_update_slice(start(y), p(), (0, 0))
        if dtype != "bool":
            yield "scatter-add", lambda p, y, s, m, start=start: start(y).at[1].add(p()[0], mode="fill")
    if dtype == "bool":
        reductions = [lax.reduce_and, lax.reduce_or]
    else:
        reductions = [lax.reduce_sum, lax.reduce_prod]
        yield "cumsum", lambda p, y, s, m: lax.cumsum(p(), 1)
        yield "cumsum", lambda p, y, s, m: lax.cumsum(p().T, 0, reverse=True)
        yield "cumprod", lambda p, y, s, m: lax.cumprod(p(), 1)
        yield "dot_general", lambda p, y, s, m: p() @ finite(y).T
        yield "dot_general", lambda p, y, s, m: finite(y) @ p().T
        yield "dot_general", lambda p, y, s, m: p() @ finite(y)[0]
        yield "dot_general", lambda p, y, s, m: finite(y)[0] @ p().T
        yield "dot_general", lambda p, y, s, m: p() @ p().T
        yield "psum", lambda p, y, s, m: jax.vmap(lambda column: lax.psum(column, "i"), 1, axis_name="i")(p())
    if dtype not in ("bool", "complex64"):
        reductions += [lax.reduce_max, lax.reduce_min, *([lax.reduce_and, lax.reduce_or] if "int" in dtype else [])]
        yield "cummax", lambda p, y, s, m: lax.cummax(p(), 1)
        yield "cummin", lambda p, y, s, m: lax.cummin(p(), 1, reverse=True)
        yield "pmax", lambda p, y, s, m: jax.vmap(lambda row: lax.pmax(row, "i"), axis_name="i")(p())
        yield "pmin", lambda p, y, s, m: jax.vmap(lambda row: lax.pmin(row, "i"), axis_name="i")(p())
        yield "argmax", lambda p, y, s, m: jnp.argmax(p(), 1)
    for fn in reductions:
        yield fn.__name__, lambda p, y, s, m, fn=fn: fn(p(), (1,))
        yield fn.__name__, lambda p, y, s, m, fn=fn: fn(p(), (0, 1))
        yield fn.__name__, lambda p, y, s, m, fn=fn: fn(p().reshape(1, 2, 1, 3), (0, 2))
    if dtype_class(jnp.dtype(dtype)) in ("float", "narrow"):
        yield "cumlogsumexp", lambda p, y, s, m: lax.cumlogsumexp(p(), 1)


def divisor(x):
    """Divisors other than 0: XLA's compilers differ in integer division by 0."""
    return x | 1 if x.dtype.kind in "iu" else x


def finite(y):
    """A finite operand of a contraction; integers are always finite."""
    return y if y.dtype.kind in "iu" else jnp.nan_to_num(y, nan=0, posinf=2, neginf=-1)


def draws(dtype):
    """(x, y, s): random operands; for floating-point types also some with zeros, infinities and NaN."""
    rng = np.random.default_rng(3)
    shapes = (ROWS, *SHAPE), SHAPE, ()
    if dtype == "bool":
        return [[rng.random(n) < 0.6 for n in shapes] for _ in range(2)]
    if dtype_class(jnp.dtype(dtype)) == "integer":
        low, high = np.iinfo(dtype).min // 2, np.iinfo(dtype).max
        ends = [(0, 5), (low, high)]
        return [[np.asarray(rng.integers(a, b, n), dtype) for n in shapes] for a, b in ends]
    plain = [rng.integers(-6, 7, n) / 4 for n in shapes]  # whose sums are exact in every type
    special = [rng.choice(SPECIAL, n, p=[0.3, 0.1, 0.05, 0.05, 0.05, 0.2, 0.15, 0.1]) for n in shapes[:2]]
    sparse = np.zeros(shapes[0])
    sparse[0] = 1  # seven of eight terms are zero
    found = [plain, [*special, np.asarray(0.0)], [sparse, special[1], np.asarray(np.inf)]]
    return [[np.asarray(a).astype(jnp.dtype(dtype)) for a in one] for one in found]


CASES = [(dtype, kind) for dtype, kinds in KINDS.items() for kind in kinds.split()]


def program_of(dtype, kind, every):
    """(names of primitives, a program that applies each to a partial value of its own).

    Args:
      every: all primitives; else those with laws, and some that might be taken for one that has.
    """
    cases = cases_of(dtype)
    if not every:
        some = {"sign", "abs", "not", "xor", "rem", "square", "exp", "cumprod", "sort", "clamp", "shift_left"}
        cases = [(name, case) for name, case in cases if name in some or primitive(name).partial]

    def program(x, y, s, m):
        return [case(lambda: REDUCE[kind](x, (0,)), y, s, m) for _, case in cases]

    return [name for name, _ in cases], program


EVERY = [("float32", "sum"), ("int32", "sum")]
"""With all primitives."""


@pytest.mark.parametrize(("dtype", "kind", "every"), [(*case, case in EVERY) for case in CASES])
def test_an_op_on_a_partial_value_is_that_of_the_unsharded_run(dtype, kind, every):
    names, program = program_of(dtype, kind, every)
    sharded, reference = mp.jit(program, **OPTIONS), jax.jit(program)
    tolerance = {"bfloat16": 0.1, "float16": 0.02}.get(dtype, 1e-4)
    m = np.array([[True, False, True], [False, True, True]])
    for x, y, s in draws(dtype):
        for name, got, want in zip(names, sharded(x, y, s, m), reference(x, y, s, m), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), name
            got, want = (np.asarray(a) for a in (got, want))
            if got.dtype.kind in "biu":
                np.testing.assert_array_equal(got, want, err_msg=name)
            else:
                exact = np.complex128 if got.dtype.kind == "c" else np.float64
                np.testing.assert_allclose(got.astype(exact), want.astype(exact), tolerance, tolerance, err_msg=name)
    assert_laws_are_used(sharded.plan(x, y, s, m), names, dtype, kind)


def test_every_primitive_with_a_law_has_a_case():
    """Except primitives that other tests cover: explicit specs, sums of cotangents, scaled matmuls."""
    cases = {name for dtype in KINDS for name, _ in cases_of(dtype)}
    lawful = {name for name, entry in PRIMITIVES.items() if entry.partial}
    assert lawful - cases == {
        "place", "sharding_constraint", "reshard", "add_any", "in_blocks", "times_power_of_two"
    }  # fmt: skip


def assert_laws_are_used(plan, names, dtype, kind):
    """The plan applies every primitive that has a law for a reduction and a dtype to a partial value.

    But for dtypes that a law takes in some equations only, and for reductions over no axes, which other tests have.
    """
    used = {s.op.name for s in plan.body.all_steps if isinstance(s, Run) and any(shard.partial for shard in s.reads)}
    for name in set(names) - {"psum", "pmax", "pmin"}:
        laws = [
            law for law in primitive(name).partial if kind in law.kinds and dtype_class(jnp.dtype(dtype)) in law.dtypes
        ]
        if any(law.when in ("always", "smaller") for law in laws):
            assert name in used, (name, dtype, kind)


def test_terms_of_narrow_types_do_not_overflow():
    """Terms are 40,000 or -40,000, of which two exceed the largest float16; the sum is 0."""
    x = np.tile([20000.0, 20000.0, -20000.0, -20000.0], 2)[:, None, None] * np.ones((ROWS, *SHAPE))

    def doubled(x, s):
        p = [lax.reduce_sum(x, (0,)) for _ in range(7)]
        return p[0] + p[1], p[2] * 2, p[3] * s, p[4] - -p[5], lax.cumsum(p[6])

    for found in mp.jit(doubled, **OPTIONS)(x.astype(np.float16), np.float16(4)):
        np.testing.assert_array_equal(found, np.zeros(SHAPE))


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_extrema_without_an_all_reduce(lowering):
    """Extrema of complex numbers and 8-bit floats are all-gathered, and combined on each device."""
    x = np.random.default_rng(0).normal(size=(ROWS, *SHAPE)).astype(np.float32)

    def extrema(x):
        z, narrow = x + 1j * x[::-1], x.astype(jnp.float8_e5m2)
        return jnp.max(z, 0), jnp.min(z, 0), narrow.max(0).astype(jnp.float32)

    step = mp.jit(extrema, **{**OPTIONS, "lowering": lowering})
    for got, want in zip(step(x), jax.jit(extrema)(x), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {c.op for c in step.plan(x).collectives if c.op != "collective-permute"} == {"all-gather"}


def sent(fn, *args, **options):
    return [(c.op, c.bytes, c.dtype) for c in mp.plan(fn, *args, **{**OPTIONS, **options}).collectives]


def test_the_smaller_of_operand_and_result_is_reduced():
    g, q = np.ones((8, 4, 64), np.float32), np.ones((64, 16), np.float32)
    eight = {"mesh": "data=8"}
    assert sent(lambda x, q: x.sum((0, 1)) @ q, g, q, **eight) == [("all-reduce", 2 * 16 * 4 * 7 / 8, "float32")]
    assert sent(lambda x, q: q @ x.sum((0, 1)), g[..., :16], q, **eight) == [
        ("all-reduce", 2 * 16 * 4 * 7 / 8, "float32")
    ]
    assert sent(lambda x: x.sum(0).max(), g, **eight) == [("all-reduce", 2 * 4 * 64 * 4 * 7 / 8, "float32")]
    assert sent(lambda x: x.max(0).max(), g, **eight) == [("all-reduce", 2 * 4 * 7 / 8, "float32")]


def test_a_value_with_two_readers_is_reduced_once_before_both():
    """Clipping by the global norm sends as many bytes as without, plus the norm."""
    x = np.ones((8, 4, 64), np.float32)

    def clipped(x):
        g = x.sum(0) / 8
        return g * (1 / jnp.maximum(1, jnp.linalg.norm(g)))

    assert sent(clipped, x) == sent(lambda x: x.sum(0), x)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_casts_of_narrow_partial_sums_can_be_planned(narrow, wide):
    x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4) % 3

    def fn(x):
        return x.astype(narrow)[2:3].astype(wide), (x.astype(narrow).sum(0)).astype(wide)

    found = mp.jit(fn, mesh="data=4, model=2", layout="rows: data", dims={"x": "rows _"}, lowering="shard_map")(x)
    for a, b in zip(found, jax.jit(fn)(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
