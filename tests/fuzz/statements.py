"""The statements of random programs: elementwise, matmuls, reductions, shapes; the table that holds all of them."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

import math
from collections.abc import Callable

from writer import LARGEST, Skip, Writer

Statement = Callable[[Writer], None]
STATEMENTS: dict[str, tuple[Statement, float]] = {}


def statement(weight: float = 1.0) -> Callable[[Statement], Statement]:
    def register(fn: Statement) -> Statement:
        STATEMENTS[fn.__name__] = (fn, weight)
        return fn

    return register


# -- elementwise

SMOOTH = [
    ("jnp.tanh({})", 1), ("jnp.sin({})", 1), ("jnp.cos({})", 1), ("nn.sigmoid({})", 1), ("jnp.exp(jnp.tanh({}))", 3),
    ("jnp.log1p(jnp.square({}))", 6), ("jnp.sqrt(1.5 + jnp.square({}))", 20), ("lax.rsqrt(0.75 + jnp.square({}))", 2),
    ("lax.erf({})", 1), ("nn.gelu({})", 20), ("nn.silu({})", 20), ("nn.softplus({})", 20), ("lax.integer_pow({}, 3)", 8000),
    ("jnp.cbrt(2.0 + jnp.square({}))", 8), ("jnp.arctan({})", 2), ("jnp.arctan2({}, 1.25)", 2), ("jnp.expm1(jnp.tanh({}))", 2),
    ("lax.lgamma(2.0 + jnp.tanh({}))", 2), ("jnp.exp2(jnp.tanh({}))", 2), ("jnp.logaddexp({}, 0.5)", 20), ("nn.elu({})", 20),
    ("jnp.sinh(jnp.tanh({}))", 2), ("jnp.cosh(jnp.tanh({}))", 2), ("jnp.arcsinh({})", 4), ("lax.erf_inv(0.5 * jnp.tanh({}))", 1),
    ("jnp.arcsin(0.5 * jnp.tanh({}))", 1), ("jnp.power(1.5 + jnp.square({}), 0.25)", 4), ("1.0 / (1.25 + jnp.square({}))", 1),
    ("jnp.log(1.5 + jnp.square({}))", 6), ("lax.digamma(2.0 + jnp.tanh({}))", 1), ("lax.erfc({})", 2),
    ("jnp.tan(jnp.tanh({}))", 2), ("jnp.arctanh(0.5 * jnp.tanh({}))", 1), ("jnp.real(lax.complex({0}, {0}) * 1j)", 16),
    ("lax.reduce_precision({} * 0 + 0.3, 8, 7)", 1), ("lax.optimization_barrier({})", 16), ("nn.log_sigmoid({})", 20),
]  # fmt: skip
KINKED = [  # (text, change of top, change of bits)
    ("-{}", 1, 0), ("{} * 0.5", 0.5, 1), ("{} + 1.0", 2, 0), ("1.0 - {}", 2, 0), ("jnp.abs({})", 1, 0),
    ("nn.relu({})", 1, 0), ("jnp.sign({})", 1, 0), ("jnp.floor({})", 1, 0), ("jnp.round({})", 1, 0),
    ("jnp.clip({}, -1.0, 1.5)", 1, 1), ("lax.stop_gradient({})", 1, 0), ("jnp.maximum({}, 0.25)", 1, 2), ("jnp.ceil({})", 1, 0),
    ("{} / 2", 0.5, 1), ("nn.leaky_relu({}, 0.25)", 1, 2), ("nn.relu6({})", 1, 0), ("jnp.where({0} > 0, {0}, {0} * 2)", 2, 0),
    ("{} * jnp.float32(2)", 2, 0), ("jnp.copy({})", 1, 0), ("jnp.minimum({0}, jnp.arange({0}.shape[-1]))", 1, 2),
]  # fmt: skip


@statement(3)
def smooth(w: Writer) -> None:
    text, top = w.of(SMOOTH)
    w.emit(text.format(w.pick(ranks=(0, 1, 2, 3, 4)).name), top)


@statement(2)
def kinked(w: Writer) -> None:
    text, times, more = w.of(KINKED)
    v = w.pick(exact=True)
    w.emit(text.format(v.name), max(v.top * times, 2), (v.bits or 0) + more)


@statement(4)
def binary(w: Writer) -> None:
    x = w.pick()
    y = w.like(x)
    text, top, bits = w.of([
        ("{0} + {1}", x.top + y.top, 0), ("{0} - {1}", x.top + y.top, 0), ("{0} * {1}", x.top * y.top, 1),
        ("{0} / (1.25 + jnp.square({1}))", x.top, None), ("jnp.arctan2({0}, 1.25 + jnp.square({1}))", 2, None),
        ("jnp.hypot({0}, 1.0 + jnp.square({1}))", x.top + y.top**2 + 1, None), ("{1} - 2 * {0}", 2 * x.top + y.top, 0),
        ("jnp.power(1.25 + jnp.square({0}), jnp.tanh({1}))", x.top**2 + 2, None),
    ])  # fmt: skip
    exact = x.exact and y.exact and bits is not None
    both = (x.bits or 0) + (y.bits or 0) if bits == 1 else max(x.bits or 0, y.bits or 0)
    w.emit(text.format(x.name, y.name), top, both if exact else None)


@statement(1.5)
def choose(w: Writer) -> None:
    """A mask from a comparison of exact values, or from iotas, and a selection."""
    x = w.pick()
    y = w.like(x)
    bits = max(x.bits or 0, y.bits or 0) if x.exact and y.exact else None
    top = max(x.top, y.top, 1)
    n = x.shape[-1]
    masks = [f"jnp.arange({n}) % 3 != 0"]
    if len(x.shape) > 1:
        m = x.shape[-2]
        masks += [f"jnp.tril(jnp.ones(({m}, {n}), bool))", f"jnp.arange({m})[:, None] <= jnp.arange({n}) + 1", f"jnp.eye({m}, {n}, dtype=bool)",
                  f"lax.broadcasted_iota(jnp.int32, ({m}, {n}), 0) == 1"]  # fmt: skip
    if x.exact and y.exact:
        masks += [f"{x.name} {w.of(['>', '<=', '==', '!='])} {y.name}"] * 3
    mask = w.of(masks)
    w.emit(w.of([f"jnp.where({mask}, {x.name}, {w.of([y.name, '0', '1.0'])})", f"jnp.where({mask}, 0.0, {x.name}) + {y.name}"]),
           top * 2, bits)  # fmt: skip


@statement(0.8)
def integers(w: Writer) -> None:
    """Integer and boolean arithmetic."""
    if w.chance(0.5):
        x = w.pick("f", exact=True)
        w.emit(f"({x.name} * 4).astype(jnp.int32)", x.top * 4, 0, scale=False)
        return
    x = w.pick("i")
    text = w.of([
        "{} % 5", "{} // 3", "{} * 3 + 1", "{} & 6", "{} | 1", "{} ^ 5", "{} << 2", "{} >> 1", "jnp.abs({})", "~{}",
        "lax.population_count({})", "lax.clz({})", "jnp.maximum({}, 3)", "jnp.cumsum({}, -1)", "{} > 3", "({} > 2) & ({} < 6)",
        "nn.one_hot({}, 8, dtype=jnp.int32)", "lax.rem({}, jnp.asarray(3, {}.dtype))", "-{}", "jnp.sign({} - 3)", "lax.shift_right_logical({}, jnp.asarray(1, {}.dtype))",
        "jnp.isin({}, jnp.arange(3))" if w.chance(0.3) else "{} != 2", "jnp.sort({}, -1)", "jnp.clip({}, 1, 4)",
    ])  # fmt: skip
    w.emit(text.replace("{}", x.name), math.inf, 0, scale=False)


@statement(0.6)
def to_float(w: Writer) -> None:
    x = w.pick("ib", ranks=(0, 1, 2, 3))
    w.emit(f"({x.name} % 8).astype(F)" if x.kind == "i" else f"{x.name}.astype(F)", 8, 0)


@statement(0.4)
def narrow(w: Writer) -> None:
    """Through another dtype and back, where that is exact."""
    x = w.pick(exact=True, such=lambda v: math.log2(max(v.top, 1)) + (v.bits or 0) < 7)
    y = w.of(["BF16", "F16"])
    w.emit(f"{x.name}.astype({y}).astype(F)", x.top, x.bits)


# -- matmuls


@statement(4)
def einsum(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3, 4))
    y = w.pick(ranks=(1, 2, 3), such=lambda v: bool(set(v.shape) & set(x.shape))) if w.chance(0.6) else None
    if y is None:
        keep = [n for n in x.shape if w.chance(0.5)] or [x.shape[-1]]
        y = w.fresh([*keep, w.of(list(w.sizes.values()))] if w.chance(0.7) else keep)
    letters = "abcdefghij"[: len(x.shape)]
    free = iter("klmnopq")
    right = ""
    contracted = 1
    result = []
    for n in y.shape:
        found = [c for c, m in zip(letters, x.shape, strict=True) if m == n and c not in right]
        right += w.of(found) if found and w.chance(0.75) else next(free)
    sizes = {**dict(zip(letters, x.shape, strict=True)), **dict(zip(right, y.shape, strict=True))}
    for c, n in sizes.items():
        keep = w.chance(0.35 if c in letters and c in right else 0.9)
        if keep and math.prod(sizes[r] for r in result) * n <= LARGEST:
            result.append(c)
        else:
            contracted *= n
    if len(result) > 5:
        raise Skip
    w.rng.shuffle(result)
    exact = (x.bits or 0) + (y.bits or 0) if x.exact and y.exact else None
    option = w.of(["", "", "", ", preferred_element_type=F"])
    text = f"jnp.einsum('{letters},{right}->{''.join(result)}', {x.name}, {y.name}{option})"
    w.emit(text, x.top * y.top * contracted, exact)


@statement(1.5)
def matmul(w: Writer) -> None:
    x = w.pick(ranks=(2, 3, 4))
    n = x.shape[-1]
    new = w.chance(0.7)
    y = w.fresh((n, w.of([*w.sizes.values()]))) if new else w.pick(ranks=(1, 2), such=lambda v: v.shape[0] == n)
    w.emit(f"{x.name} @ {y.name}", x.top * y.top * n, (x.bits or 0) + (y.bits or 0) if x.exact and y.exact else None)


@statement(0.6)
def gram(w: Writer) -> None:
    x = w.pick(ranks=(2, 3))
    text, n = w.of([("{0} @ {0}.swapaxes(-1, -2)", x.shape[-1]), ("{0}.swapaxes(-1, -2) @ {0}", x.shape[-2])])
    w.emit(text.format(x.name), x.top**2 * n, 2 * (x.bits or 0) if x.exact else None)


# -- kernels


@statement(0.5)
def kernel(w: Writer) -> None:
    """A kernel that needs all of some dims, marked by `!` or `_`."""
    x = w.pick("f", ranks=(2, 3))
    split = w.rng.randrange(len(x.shape))
    rule = " ".join("rows" if d == split else w.of(["_", f"d{d}!"]) for d in range(len(x.shape)))
    axes = tuple(d for d in range(len(x.shape)) if d != split)
    body = f"k / jnp.sqrt(1.0 + jnp.square(k).sum({axes}, keepdims=True))"
    w.emit(f"mp.kernel_rule('{rule} -> {rule}')(lambda k: {body})({x.name})", 1)


# -- reductions


@statement(3)
def reduce(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3, 4))
    axes = [i for i in range(len(x.shape)) if w.chance(0.4)] or [w.rng.randrange(len(x.shape))]
    n = math.prod(x.shape[a] for a in axes)
    where = f"axis={tuple(axes) if len(axes) > 1 else axes[0]}, keepdims={w.chance(0.3)}"
    kinds = [
        ("{}.sum({})", x.top * n, 0), ("{}.mean({})", x.top, None), ("{}.var({})", x.top**2, None), ("nn.logsumexp({}, {})", x.top + 5, None),
        ("jnp.prod(1.0 + 0.1 * jnp.tanh({}), {})", 4, None), ("jnp.sqrt(jnp.sum(jnp.square({}), {}) + 1.0)", x.top * n + 1, None),
        ("jnp.linalg.norm(1.5 + jnp.square({}), {})" if len(axes) < 3 else "{}.sum({})", x.top**2 * n, None),
    ]  # fmt: skip
    if x.exact:
        kinds += [("{}.max({})", x.top, 0), ("{}.min({})", x.top, 0), ("jnp.ptp({}, {})", 2 * x.top, 0), ("jnp.any({} > 0, {})", 1, 0),
                  ("jnp.all({} > -1, {})", 1, 0), ("jnp.count_nonzero({}, {})", n, 0), ("jnp.prod(jnp.sign({}), {})", 1, 0),
                  ("jnp.bitwise_xor.reduce(({} * 4).astype(jnp.int32), {})", 99, 0), ("lax.reduce_or(({} * 4).astype(jnp.int32), ({},))", 99, 0)]  # fmt: skip
    text, top, bits = w.of(kinds)
    if "lax.reduce_or" in text or "xor" in text:
        where = f"axis={axes[0]}" if "xor" in text else str(axes[0])
    w.emit(text.format(x.name, where), top, (x.bits or 0) if x.exact and bits is not None else None)


@statement(0.8)
def arg(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3), exact=True)
    axis = w.rng.randrange(len(x.shape))
    w.emit(w.of([f"jnp.argmax({x.name}, {axis})", f"jnp.argmin({x.name}, {axis})", f"jnp.argsort({x.name}, {axis})", f"jnp.argmax({x.name}, {axis}, keepdims=True)"]),
           x.shape[axis], 0, scale=False)  # fmt: skip


@statement(2)
def normalize(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3, 4))
    axis = w.of([-1, -1, 0, len(x.shape) - 1])
    text = w.of([
        "nn.softmax({}, {})", "nn.log_softmax({}, {})", "nn.standardize({}, {}, epsilon=0.5)", "{0} * lax.rsqrt(jnp.mean(jnp.square({0}), {1}, keepdims=True) + 0.5)",
        "{0} / (1.0 + jnp.linalg.norm(1.0 + jnp.square({0}), axis={1}, keepdims=True))", "{0} - {0}.mean({1}, keepdims=True)",
    ])  # fmt: skip
    if not any(c in text for c in ("softmax",)) and x.shape[axis] == 1:
        raise Skip
    w.emit(text.format(x.name, axis), 8)


@statement(1.2)
def along(w: Writer) -> None:
    """Cumulative ops and sorting."""
    x = w.pick(ranks=(1, 2, 3))
    axis, n = (a := w.rng.randrange(len(x.shape))), x.shape[a]
    kinds = [
        (f"jnp.cumsum({x.name}, {axis})", x.top * n, 0), (f"lax.cumsum({x.name}, {axis}, reverse=True)", x.top * n, 0),
        (f"jnp.cumprod(1.0 + 0.1 * jnp.tanh({x.name}), {axis})", 4, None), (f"lax.cumlogsumexp({x.name}, {axis})", x.top + 4, None),
        (f"lax.associative_scan(jnp.add, {x.name}, axis={axis})", x.top * n, 0),
        (f"lax.associative_scan(jnp.multiply, 1.0 + 0.1 * jnp.tanh({x.name}), axis={axis}, reverse=True)", 4, None),
        (f"lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (nn.sigmoid({x.name}), {x.name}), axis={axis})[1]", x.top * n, None),
    ]  # fmt: skip
    if x.exact:
        kinds += [
            (f"lax.cummax({x.name}, {axis})", x.top, 0), (f"lax.cummin({x.name}, {axis}, reverse=True)", x.top, 0), (f"jnp.sort({x.name}, {axis})", x.top, 0),
            (f"jnp.diff({x.name}, axis={axis})", 2 * x.top, 0), (f"lax.sort(({x.name}, {x.name} * 2 + 1), dimension={axis}, num_keys=1)[1]", 2 * x.top + 1, 0),
            (f"jnp.median({x.name}, {axis})", x.top, 1), (f"jnp.sort({x.name}, {axis}, descending=True)", x.top, 0),
        ]  # fmt: skip
    text, top, bits = w.of(kinds)
    w.emit(text, top, (x.bits or 0) + bits if x.exact and bits is not None else None)


@statement(0.6)
def top_k(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3), exact=True)
    k = 1 + w.rng.randrange(min(x.shape[-1], 4))
    if w.rng.randrange(2) == 0:
        w.emit(f"lax.top_k({x.name}, {k})[0]", x.top, x.bits)
    else:
        w.emit(f"lax.top_k({x.name}, {k})[1]", 99, 0, scale=False)


# -- shapes


@statement(3)
def reshape(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3, 4))
    shape = list(x.shape)
    how = w.rng.randrange(4)
    if how == 0 and len(shape) > 1:  # merge
        i = w.rng.randrange(len(shape) - 1)
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    elif how == 1:  # split
        found = [(i, d) for i, n in enumerate(shape) for d in (2, 3, 4, 8) if n % d == 0 and n > d]
        i, d = w.of(found)
        shape[i : i + 1] = w.of([[d, shape[i] // d], [shape[i] // d, d]])
    elif how == 2:
        n = math.prod(shape)
        found = [s for s in ([-1], [4, -1], [-1, 8], [2, -1, 2], [6, -1], [-1, 3]) if n % abs(math.prod(s)) == 0]
        shape = w.of(found)
    elif len(shape) > 2:  # merge two, split another way
        a, b = shape[:2]
        shape[:2] = [b, a]
    else:
        raise Skip
    w.emit(f"{x.name}.reshape({', '.join(map(str, shape))})", x.top, x.bits)


@statement(2)
def transpose(w: Writer) -> None:
    x = w.pick("fib", ranks=(2, 3, 4))
    order = list(range(len(x.shape)))
    w.rng.shuffle(order)
    w.emit(f"{x.name}.transpose({', '.join(map(str, order))})", x.top, x.bits)


@statement(1)
def ones(w: Writer) -> None:
    """Dims of size 1 come and go; broadcasts."""
    x = w.pick(ranks=(1, 2, 3))
    i = w.rng.randrange(len(x.shape) + 1)
    n = w.of(list(w.sizes.values()))
    text = w.of([
        f"jnp.expand_dims({x.name}, {i})", f"jnp.broadcast_to({x.name}, {(n, *x.shape)})", f"jnp.stack([{x.name}, {x.name} * 2], {i})",
        f"jnp.repeat({x.name}, 2, {min(i, len(x.shape) - 1)})", f"jnp.tile({x.name}, {(2, *(1,) * (len(x.shape) - 1))})",
        f"jnp.squeeze({x.name}[..., :1], -1)", f"jnp.tile({x.name}, 3)", f"jnp.full({x.shape}, 0.5) + {x.name}",
        f"lax.broadcast_in_dim({x.name}, {(*x.shape, n)}, {tuple(range(len(x.shape)))})", f"jnp.zeros_like({x.name}) + {x.name}.sum() * 0",
        f"jnp.concatenate([{x.name}[:, None], {x.name}[:, None]], 1)", f"jnp.broadcast_to({x.name}[..., None], {(*x.shape, n)})",
    ])  # fmt: skip
    w.emit(text, 2 * x.top, x.bits)


@statement(2.5)
def cut(w: Writer) -> None:
    """Slices, pads, rolls, flips."""
    x = w.pick(ranks=(1, 2, 3))
    i = w.rng.randrange(len(x.shape))
    n = x.shape[i]
    if n < 2:
        raise Skip
    lead = ":, " * i
    a = w.rng.randrange(n)
    b = w.rng.randrange(a, n) + 1
    pads = [(0, 0)] * len(x.shape)
    pads[i] = w.of([(1, 0), (0, 2), (1, 1), (2, 2), (n, 0)])
    low = [(0, 0, 0)] * len(x.shape)
    low[i] = w.of([(1, -1, 0), (-1, 0, 0), (0, 0, 1), (-1, -1, 0) if n > 2 else (1, 1, 1), (0, -1, 1), (2, 1, 0)])
    text = w.of([
        f"{x.name}[{lead}{a}:{b}]", f"{x.name}[{lead}{a}:{b}]", f"{x.name}[{lead}::2]", f"{x.name}[{lead}1::3]", f"{x.name}[{lead}:{n // 2}]",
        f"{x.name}[{lead}{n // 2}:]", f"{x.name}[{lead}{a}]", f"{x.name}[{lead}::-1]", f"jnp.flip({x.name}, {i})", f"jnp.roll({x.name}, {a}, {i})",
        f"jnp.pad({x.name}, {pads})", f"lax.pad({x.name}, F(0.5), {low})", f"jnp.pad({x.name}, {pads}, mode='edge')" if pads[i][0] < 3 else f"{x.name}[{lead}1:]",
        f"jnp.concatenate([{x.name}[{lead}1:], {x.name}[{lead}:1]], {i})", f"lax.slice_in_dim({x.name}, {a}, {b}, axis={i})",
        f"lax.rev({x.name}, ({i},))", f"{x.name}[{lead}:-1] * {x.name}[{lead}1:]" if x.top <= 4 else f"{x.name}[{lead}-1:]",
    ])  # fmt: skip
    w.emit(text, x.top**2 if "*" in text else max(x.top, 1), None if x.bits is None else max(x.bits * 2, 1))


@statement(2)
def shifted(w: Writer) -> None:
    """What reads the neighbours along a dim, or some of its elements, and goes on with what it made."""
    x = w.pick(ranks=(1, 2, 3), such=lambda v: v.top <= 8)
    i = w.rng.randrange(len(x.shape))
    n = x.shape[i]
    if n < 4:
        raise Skip
    lead, a = ":, " * i, x.name
    k = w.rng.randrange(1, 3)
    some = [w.rng.randrange(n) for _ in range(w.of([3, 4, n // 2, n]))]
    twice = [f"{a}[{lead}{k}:]", f"{a}[{lead}:-{k}]"]
    wrap = [(1, 1) if d == i else (0, 0) for d in range(len(x.shape))]
    text, top, bits = w.of([
        (f"{twice[0]} - {twice[1]}", 2 * x.top, 0), (f"({twice[0]} * {twice[1]}).sum({i})", x.top**2 * n, x.bits), (f"jnp.diff({a}, n=2, axis={i})", 4 * x.top, 0),
        (f"jnp.tanh({twice[0]} + {twice[1]}).mean({i})", 1, None), (f"{a}[{lead}::3] * 2", 2 * x.top, 0), (f"{a}[{lead}1::3].sum({i})", x.top * n, 0),
        (f"jnp.roll({a}, {k}, {i}) + jnp.roll({a}, -1, {i})", 2 * x.top, 0), (f"jnp.roll(jnp.roll({a}, {k}, {i}) * 2, {w.rng.randrange(n)}, {i})", 2 * x.top, 0),
        (f"jnp.concatenate([jnp.zeros_like({a}[{lead}:{k}]), {twice[1]}], {i})", x.top, 0), (f"{a}[{lead}jnp.array({some})]", x.top, 0),
        (f"jnp.take({a}, jnp.array({some}), {i})", x.top, 0), (f"({a}[{lead}jnp.array({sorted(set(some))})] * 0.5).sum({i})", x.top * n, 1),
        (f"{a}[{lead}jnp.array({w.rng.sample(range(n), n)})]", x.top, 0),
        (f"lax.slice_in_dim(jnp.pad({a}, {wrap}, mode='wrap'), 2, None, axis={i}) - {a}", 2 * x.top, 0),
        (f"jnp.pad({twice[0]}, {[(0, k) if d == i else (0, 0) for d in range(len(x.shape))]}) + {a}", 2 * x.top, 0),
        (f"jnp.vdot({a}, {a} * 0.5)", x.top**2 * math.prod(x.shape), x.bits and x.bits + 1), (f"jnp.tanh(jnp.ravel({a})) * jnp.ravel({a})", x.top, None),
        (f"(jnp.ravel({a}) * 0.5 + 1).reshape({x.shape})", x.top + 1, 1), (f"{twice[0]} @ jnp.ones({x.shape[-1:]})" if i < len(x.shape) - 1 else twice[0], x.top * x.shape[-1], 0),
    ])  # fmt: skip
    w.emit(text, max(top, 1), None if bits is None or x.bits is None else x.bits + bits)


@statement(1)
def join(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3))
    i = w.rng.randrange(len(x.shape))
    rest = x.shape[:i] + x.shape[i + 1 :]
    y = w.pick(ranks=(len(x.shape),), such=lambda v: v.shape[:i] + v.shape[i + 1 :] == rest)
    bits = max(x.bits or 0, y.bits or 0) if x.exact and y.exact else None
    w.emit(f"jnp.concatenate([{x.name}, {y.name}], {i})", max(x.top, y.top), bits)


@statement(0.7)
def split(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3), such=lambda v: any(n % 2 == 0 for n in v.shape))
    i = w.of([i for i, n in enumerate(x.shape) if n % 2 == 0])
    parts = w.of([p for p in (2, 4) if x.shape[i] % p == 0])
    w.emit(f"jnp.split({x.name}, {parts}, {i})", x.top, x.bits, scale=False)


@statement(0.5)
def names(w: Writer) -> None:
    """Identities that carry names."""
    x = w.pick(ranks=(1, 2, 3))
    found: list[str] = []
    for n in x.shape:
        named = [a for a, size in w.sizes.items() if size == n and a not in found]
        found.append(w.of(named) if named and w.chance(0.6) else "_")
    if not any(a != "_" for a in found):
        raise Skip
    w.emit(f"mp.named({x.name}, '{' '.join(found)}')", x.top, x.bits)


@statement(0.3)
def renamed(w: Writer) -> None:
    x = w.of([i for i in w.inputs if any(i.dims) and i.kind == "f"])
    var = next(v for v in w.vars if v.name == x.name)
    w.used.add(x.name)
    name = w.of([d for d in x.dims if d])
    w.emit(f"mp.rename({x.name}, {name}='{name}_other')", var.top, var.bits)


@statement(0.3)
def swapped(w: Writer) -> None:
    """Two dims take each other's names, or an array meets its transpose: the axes of their rules change places."""
    a, b = w.of([(a, b) for a, n in w.sizes.items() for b, m in w.sizes.items() if a != b and n in (m, 2 * m, 4 * m)])
    x = w.fresh((w.sizes[a], w.sizes[b]), names=(a, b))
    if w.sizes[a] == w.sizes[b] and w.chance(0.5):
        w.emit(f"{x.name} + {x.name}.T", x.top * 2, x.bits)
    else:
        w.renamed |= {(a, w.sizes[b]), (b, w.sizes[a])}
        w.emit(f"mp.rename({x.name}, {a}='{b}', {b}='{a}')", x.top, x.bits)
