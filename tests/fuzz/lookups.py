"""The statements of random programs that look up, write by index, slide windows, draw random bits, solve systems."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

import math

from statements import statement
from writer import Skip, Var, Writer

# -- lookups


def indices(w: Writer, ranks: tuple[int, ...] = (1, 2), shape: tuple[int, ...] | None = None) -> Var:
    try:
        return w.pick("i", ranks, such=lambda v: shape is None or v.shape == shape)
    except Skip:
        sizes = list(w.sizes.values())
        return w.fresh(shape or tuple(w.of(sizes) for _ in range(w.of(ranks))), "i")


@statement(2)
def lookup(w: Writer) -> None:
    x = w.pick(ranks=(1, 2, 3))
    i = w.rng.randrange(len(x.shape))
    n = x.shape[i]
    ids = indices(w, (1, 2) if len(x.shape) < 3 else (1,))
    lead = ":, " * i
    text = w.of([
        f"{x.name}[{lead}{ids.name} % {n}]", f"jnp.take({x.name}, {ids.name} % {n}, {i})", f"{x.name}.at[{lead}{ids.name}].get(mode='clip')",
        f"{x.name}.at[{lead}{ids.name} * 5 - 3].get(mode='fill', fill_value=0.5)", f"{x.name}.at[{lead}{ids.name}].get(mode='promise_in_bounds')" if n >= 8 else f"{x.name}[{lead}{ids.name} % {n}]",
        f"{x.name}[{lead}jnp.arange({n})[::-1]]", f"nn.one_hot({ids.name}, {n}, dtype=F) @ {x.name}" if i == 0 and len(x.shape) < 3 else f"jnp.take({x.name}, {ids.name} % {n}, {i}, mode='clip')",
        f"jnp.take({x.name}, {ids.name} % {n}, {i}, mode='wrap')", f"{x.name}.at[{lead}{ids.name}].get(mode='drop', fill_value=0)",
    ])  # fmt: skip
    w.emit(text, max(x.top, 1), None if x.bits is None else max(x.bits, 1))


@statement(0.8)
def lookup_along(w: Writer) -> None:
    x = w.pick(ranks=(2, 3))
    n = x.shape[-1]
    ids = indices(w, shape=x.shape[:-1])
    w.emit(w.of([
        f"jnp.take_along_axis({x.name}, ({ids.name} % {n})[..., None], -1)", f"jnp.take_along_axis({x.name}, ({ids.name} % {n})[..., None], -1)[..., 0]",
        f"jnp.take_along_axis({x.name}, jnp.argsort(lax.stop_gradient(jnp.round({x.name})), -1), -1)" if x.exact else f"{x.name}[..., 0] + {ids.name} % 3",
        f"{x.name}[jnp.arange({x.shape[0]}), ..., ({ids.name}.reshape({x.shape[0]}, -1)[:, 0]) % {n}]",
    ]), x.top + 3, x.bits)  # fmt: skip


@statement(0.5)
def segments(w: Writer) -> None:
    x = w.pick(ranks=(1, 2))
    ids = indices(w, shape=x.shape[:1])
    n = w.of([4, 8, 6])
    w.emit(w.of([f"jax.ops.segment_sum({x.name}, {ids.name} % {n}, {n})", f"jnp.bincount({ids.name}, length={n}).astype(F)", f"jax.ops.segment_sum({x.name}, {ids.name}, 4)"]),
           max(x.top, 1) * x.shape[0], x.bits)  # fmt: skip


@statement(0.3)
def searched(w: Writer) -> None:
    x = w.pick(ranks=(1,), exact=True)
    y = w.pick(ranks=(1, 2), exact=True)
    w.emit(f"jnp.searchsorted(jnp.sort(lax.stop_gradient({x.name})), lax.stop_gradient({y.name}))", 99, 0, scale=False)


# -- windows


@statement(1.5)
def convolution(w: Writer) -> None:
    rank = w.of([1, 2, 2])
    if w.chance(0.5):
        x = w.pick(ranks=(rank + 2,))
    else:
        x = w.fresh([w.of([2, 4, 8]), *(w.of([4, 6, 8]) for _ in range(rank)), w.of([4, 8])])
    c = x.shape[-1]
    groups = w.of([1, 1, 1, *(g for g in (2, 4, c) if c % g == 0)])
    window = tuple(w.of([1, 1, 2, 3, 3]) for _ in range(rank))
    out = groups * w.of([1, 2, 4] if groups > 1 else [2, 4, 8])
    kernel = w.fresh((*window, c // groups, out))
    letters = "WH"[:rank][::-1]
    strides = tuple(w.of([1, 1, 2]) for _ in range(rank))
    padding = w.of(["'SAME'", "'VALID'", str([(w.of([0, 1, 2]), 1)] * rank)])
    if any(n < k for n, k in zip(x.shape[1:-1], window, strict=True)):
        raise Skip
    wide = f", rhs_dilation={(2,) * rank}" if all(n > 4 for n in x.shape[1:-1]) else ""
    more = w.of(["", "", wide, f", lhs_dilation={(2,) * rank}" if math.prod(x.shape) < 512 else ""])
    lhs, operand = f"N{letters}C", x.name
    if w.chance(0.3):
        order = (0, rank + 1, *range(1, rank + 1))
        lhs, operand = f"NC{letters}", f"{x.name}.transpose{order}"
    n = c // groups * math.prod(window)
    if "lhs_dilation" in more:
        padding = str([(1, 2)] * rank)
    w.emit(
        f"lax.conv_general_dilated({operand}, {kernel.name}, {strides}, {padding}{more}, dimension_numbers=('{lhs}', '{letters}IO', '{lhs}'), feature_group_count={groups})",
        x.top * kernel.top * n,
        x.bits + 2 if x.exact and x.bits is not None else None,
    )


@statement(1)
def pool(w: Writer) -> None:
    x = w.pick(ranks=(2, 3, 4))
    window = [w.of([1, 2, 3]) if w.chance(0.6) else 1 for _ in x.shape]
    if all(k == 1 for k in window) or any(k > n for k, n in zip(window, x.shape, strict=True)):
        raise Skip
    strides = [w.of([1, k]) for k in window]
    padding = w.of(["'SAME'", "'VALID'"])
    n = math.prod(window)
    kinds = [("N(0), lax.add", x.top * n, x.bits)]
    if x.exact:
        kinds += [("N(-np.inf), lax.max", x.top, x.bits)] * 2 + [("N(np.inf), lax.min", x.top, x.bits)]
    text, top, bits = w.of(kinds)
    w.emit(f"lax.reduce_window({x.name}, {text}, {tuple(window)}, {tuple(strides)}, {padding})", top, bits)


# -- random bits


@statement(1.5)
def random(w: Writer) -> None:
    if w.chance(0.5):
        key = f"jax.random.key({w.rng.randrange(100)})"
    else:
        keys = [v for v in w.vars if v.kind == "k" and v.shape == ()]
        var = w.of(keys) if keys else w.fresh((), "k")
        w.used.add(var.name)
        folded = f"jax.random.fold_in({var.name}, {w.rng.randrange(9)})"
        key = w.of([var.name, folded, f"jax.random.split({var.name}, 3)[1]"])
    x = w.pick(ranks=(1, 2, 3))
    shape = x.shape
    text = w.of([
        "jax.random.normal({k}, {s}, jnp.float32).astype(F)", "jnp.where(jax.random.bernoulli({k}, 0.75, {s}), {x} / 0.75, 0)", "jax.random.uniform({k}, {s}, jnp.float32).astype(F)",
        "jax.random.truncated_normal({k}, -2, 2, {s}, jnp.float32).astype(F)", "(jax.random.randint({k}, {s}, 0, 8) * {x})", "jax.random.gumbel({k}, {s}, jnp.float32).astype(F)",
        "jax.random.permutation({k}, {x})", "(jax.random.bits({k}, {s}) >> 24).astype(F) / 16 + {x}", "jax.random.choice({k}, {x})",
        "jax.random.normal(jax.random.key(3, impl='rbg'), {s}, jnp.float32).astype(F)", "jax.vmap(lambda k, y: y * jax.random.uniform(k, y.shape, jnp.float32).astype(F))(jax.random.split({k}, {s}[0]), {x})",
        "(jax.random.categorical({k}, jnp.zeros({s}))[..., None] + {x})", "(jax.random.bits({k}, {s}, 'uint8') >> 4).astype(F) + {x}", "jax.random.exponential({k}, {s}, jnp.float32).astype(F)",
        "jax.random.rademacher({k}, {s}, F) * {x}", "jax.random.laplace({k}, {s}, jnp.float32).astype(F)",
    ])  # fmt: skip
    w.emit(text.replace("{k}", key).replace("{s}", str(shape)).replace("{x}", x.name), max(20.0, 8 * x.top))


# -- linear algebra


@statement(0.6)
def algebra(w: Writer) -> None:
    x = w.pick(ranks=(2, 3), such=lambda v: v.shape[-1] <= 8 and v.shape[-2] <= 8)
    n = x.shape[-2]
    spd = f"0.1 * jnp.tanh({x.name}) @ jnp.tanh({x.name}).swapaxes(-1, -2) + 2.0 * jnp.eye({n}, dtype=F)"
    w.emit(w.of([
        f"jnp.linalg.cholesky({spd})", f"jax.scipy.linalg.solve_triangular(jnp.tril({spd}), jnp.tanh({x.name}), lower=True)" if len(x.shape) == 2 else f"lax.linalg.triangular_solve({spd}, {x.name}, left_side=True, lower=True)",
        f"jnp.linalg.inv({spd})", f"jnp.linalg.solve({spd}, {x.name})", f"jnp.abs(jnp.fft.fft({x.name}) + 1.5j).astype(F)" if x.exact else f"jnp.fft.rfft({x.name}).real.astype(F)", f"jnp.linalg.det({spd})",
        f"jnp.trace({spd}, axis1=-2, axis2=-1)", f"jnp.linalg.qr({spd})[1]",
    ]), 64.0)  # fmt: skip
