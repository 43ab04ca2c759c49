"""The statements of random programs that have bodies: loops, branches, calls, maps, own derivatives."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import calling
import data
import edges  # noqa: F401
import indexing  # noqa: F401  (their statements)
import lookups  # noqa: F401
import operands  # noqa: F401
import partials  # noqa: F401
from statements import STATEMENTS, statement
from writer import Skip, Var, Writer

DEEPEST = 2


def fill(w: Writer, n: int, among: Iterable[str] = STATEMENTS) -> None:
    """Append about ``n`` random statements, of some kinds."""
    names = [k for k in among if (w.depth < DEEPEST or k not in BODIES) and (not w.depth or k not in OUTERMOST)]
    weights = [STATEMENTS[k][1] for k in names]
    want, tries = len(w.lines) + n, 0
    while len(w.lines) < want and tries < 6 * n:
        tries += 1
        fn, _ = STATEMENTS[w.rng.choices(names, weights)[0]]
        vars_, lines, used, needs = list(w.vars), list(w.lines), set(w.used), set(w.needs)
        try:
            fn(w)
        except (Skip, StopIteration):
            w.needs.intersection_update(needs)
            w.vars[:] = [v for v in w.vars if v in vars_ or v.name in {i.name for i in w.inputs}]
            w.lines[:] = lines
            w.used.intersection_update(used | {i.name for i in w.inputs})


def result(w: Writer, shape: tuple[int, ...], start: str) -> str:
    """An expression of a shape that depends on the last variables of a body."""
    text = start
    for v in [v for v in w.vars[-6:] if v.kind == "f"][-2:]:
        if v.shape == shape:
            text = f"{text} * 0.5 + jnp.tanh({v.name})"
        elif v.shape and len(v.shape) <= len(shape) and v.shape == shape[len(shape) - len(v.shape) :]:
            text = f"{text} * 0.5 + 0.25 * jnp.sin({v.name})"
        elif v.shape:
            text = f"{text} + 0.125 * jnp.tanh({v.name}).mean()"
        w.used.add(v.name)
    return text


def cast(text: str, like: str) -> str:
    """A result in the dtype of a parameter, as loops and branches need it; others may be f64 where JAX's x64 is on."""
    return f"({text}).astype({like}.dtype)"


def _keeps_bf16(v: Var) -> bool:
    """Whether rounding to bfloat16 leaves a variable as it is."""
    return v.bits is not None and math.log2(max(v.top, 1)) + v.bits <= 7


@statement(1.6)
def scan(w: Writer) -> None:
    """Carried, stacked, over layers of weights, backwards, rematerialised."""
    x = w.pick(ranks=(1, 2, 3))
    over = w.pick("f", ranks=(1, 2, 3, 4)) if w.chance(0.8) else None
    length = over.shape[0] if over is not None else 3
    carry = w.param(x.shape, top=4.0)
    params = [carry]
    xs = "None"
    if over is not None:
        params.append(w.param(over.shape[1:], top=over.top, bits=over.bits if over.exact else None))
        xs = over.name
        if w.chance(0.2):
            xs = f"{over.name}[::-1]"
    else:
        params.append(w.param((), "k"))
    body_params = params if over is not None else params[:1]
    with w.body(body_params) as b:
        fill(b, 1 + w.rng.randrange(3))
        ys = [v.name for v in b.vars[-2:] if v.kind in "fib" and w.chance(0.5)]
        ys += [carry.name] if w.chance(0.3) else []
        new = result(b, x.shape, carry.name)
        if over is not None and w.count[0] % 3 == 0 and _keeps_bf16(params[1]):  # a slice that the body rounds
            s = params[1].name
            new = f"{new} + 0.125 * ({s} * lax.stop_gradient({s}.astype(BF16)).astype(F)).mean()"
        name, text = w.define(b, params, f"{cast(new, carry.name)}, ({''.join(y + ', ' for y in ys)})")
    w.used.update(ys)
    wrapped = w.of([name, name, f"jax.checkpoint({name})", f"jax.checkpoint({name}, prevent_cse=False)",
                    f"jax.checkpoint({name}, policy=jax.checkpoint_policies.dots_saveable)"])  # fmt: skip
    option = w.of(["", "", ", reverse=True", ", unroll=2"])
    before = [*text, f"{name}_out = lax.scan({wrapped}, {x.name}, {xs}, length={length}{option})"]
    picked = [f"{name}_out[0]"] + [f"{name}_out[1][{k}]" for k in range(len(ys))]
    w.emit(f"[{', '.join(picked)}]", 8.0, before=before, scale=False)


@statement(0.7)
def accumulate(w: Writer) -> None:
    """Microbatches: a gradient summed in the carry."""
    x = w.pick(ranks=(2, 3), such=lambda v: any(v.shape[0] % p == 0 and v.shape[0] > p for p in (2, 4)))
    parts = w.of([p for p in (2, 4) if x.shape[0] % p == 0 and x.shape[0] > p])
    weight = w.fresh((x.shape[-1], w.of(list(w.sizes.values()))))
    name = f"f{w.name()[1:]}"
    before = [
        f"def {name}(g, part):",
        f"    loss, one = jax.value_and_grad(lambda u: (jnp.tanh(part @ u) ** 2).mean())({weight.name})",
        "    return g + one, loss",
        f"{name}_out = lax.scan({name}, jnp.zeros_like({weight.name}), {x.name}.reshape({parts}, -1, *{x.name}.shape[1:]))",
    ]
    w.emit(f"[{name}_out[0], {name}_out[1]]", 4.0, before=before, scale=False)


@statement(0.7)
def loop(w: Writer) -> None:
    """fori_loop and while_loop, with trips that are known and trips that depend on data."""
    x = w.pick(ranks=(1, 2, 3))
    i, carry = w.param((), "i", 3, 0), w.param(x.shape, top=4.0)
    dynamic = w.depth == 0 and w.chance(0.4)  # not differentiable in reverse
    with w.body([i, carry]) as b:
        fill(b, 1 + w.rng.randrange(2))
        new = cast(result(b, x.shape, carry.name), carry.name)
        name, text = w.define(b, [i, carry], new)
    if dynamic:
        ids = w.ids()
        expr = w.of(
            [
                f"lax.fori_loop(0, {ids.name}[0] % 4, {name}, {x.name})",
                f"lax.while_loop(lambda s: (s[0] < 3) & ({ids.name}.sum() > s[0]), lambda s: (s[0] + 1, {name}(*s)), (0, {x.name}))[1]",
                f"lax.while_loop(lambda s: (s[0] < 4) & (jnp.round(s[1]).sum() < 1e6), lambda s: (s[0] + 1, {name}(*s)), (0, {x.name}))[1]",
            ]
        )
        w.forward_only = True
    else:
        expr = f"lax.fori_loop(0, 3, {name}, {x.name})"
    w.emit(f"{expr} + 0", 8.0, before=text)


@statement(0.8)
def branch(w: Writer) -> None:
    """cond and switch on a value of the data."""
    x = w.pick(ranks=(1, 2, 3))
    n = w.of([2, 2, 3])
    text: list[str] = []
    branches = []
    for _ in range(n):
        p = w.param(x.shape, top=x.top, bits=x.bits)
        with w.body([p]) as b:
            fill(b, w.rng.randrange(3))
            new = cast(result(b, x.shape, p.name), p.name)
            forms = [f"({new}, {p.name}.sum())", f"({p.name} * 2, 0.5 + 0 * {p.name}.sum())"]
            name, lines = w.define(b, [p], w.of(forms))
        text += lines
        branches.append(name)
    ids = w.ids((1, 2))
    if n == 2:
        expr = f"lax.cond({ids.name}.sum() % 2 == 0, {branches[0]}, {branches[1]}, {x.name})"
    else:
        expr = f"lax.switch({ids.name}.sum() % 3, [{', '.join(branches)}], {x.name})"
    w.emit(expr, 16.0, before=text, scale=False)


@statement(1.2)
def call(w: Writer) -> None:
    """jit, checkpoint, own derivatives (others than those of the functions), gradients inside."""
    x = w.pick(ranks=(1, 2, 3))
    p = w.param(x.shape, top=x.top, bits=x.bits)
    how = w.of("jit checkpoint policy custom_vjp custom_jvp grad vjp jvp own own composite".split())
    with w.body([p]) as b:
        if how in ("own", "composite"):  # JAX differentiates neither with respect to values of the outside
            b.vars = [p]
        fill(b, 1 + w.rng.randrange(3))
        new = result(b, x.shape, p.name)
        name, text = w.define(b, [p], new)
    if how in ("own", "composite") and {v.name for v in w.vars} & set(re.findall(r"\bv\d+\b", "\n".join(text))):
        how = "checkpoint"
    if how == "jit":
        expr = f"jax.jit({name})({x.name}) + jax.jit({name})({x.name} * 0.5)"
    elif how == "checkpoint":
        expr = f"jax.checkpoint({name})({x.name})"
    elif how == "policy":
        expr = f"jax.checkpoint({name}, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)({x.name})"
    elif how == "custom_vjp":
        text = [*text, f"{name}_c = jax.custom_vjp(lambda x: jnp.tanh(x) + {name}_k(x))", f"{name}_k = lambda x: x * 0.5",
                f"{name}_c.defvjp(lambda x: (jnp.tanh(x) + 0.5 * x, x), lambda r, g: (g * (1 - jnp.tanh(r) ** 2) + 0.25 * g,))"]  # fmt: skip
        expr = f"{name}_c({name}({x.name}))"
    elif how == "custom_jvp":
        text = [
            *text,
            f"{name}_c = jax.custom_jvp(lambda x: x * jnp.tanh(x))",
            f"{name}_c.defjvp(lambda p, t: ({name}_c(p[0]), t[0] * jnp.tanh(p[0]) + p[0] * t[0]))",
        ]
        expr = f"{name}_c({name}({x.name}))"
    elif how == "own":  # the body itself has a rule, which returns another derivative than JAX would
        text = [*text, *w.of([
            [f"{name}_c = jax.custom_jvp({name})", f"{name}_c.defjvp(lambda p, t: ({name}_c(*p), 0.5 * jax.jvp({name}, p, t)[1]))"],
            [f"{name}_c = jax.custom_vjp({name})", f"{name}_c.defvjp(lambda x: ({name}_c(x), x), lambda x, g: (0.5 * jax.vjp({name}, x)[1](g)[0],))"],
        ])]  # fmt: skip
        expr = w.of([f"{name}_c({x.name})", f"jax.jit(jax.checkpoint({name}_c))({x.name})"])
    elif how == "composite":
        expr = f"lax.composite({name}, 'fuzz.body')({x.name})"
        w.forward_only = True
    elif how == "grad":
        expr = f"jax.grad(lambda x: (0.25 * {name}(x) ** 2).sum())({x.name})"
    elif how == "vjp":
        expr = f"jax.vjp({name}, {x.name})[1](0.5 * {name}({x.name}))[0]"
    else:
        expr = f"jax.jvp({name}, ({x.name},), (0.5 * {x.name},))[1]"
    w.emit(expr, 16.0, before=text)


@statement(1)
def mapped(w: Writer) -> None:
    """vmap along any dim, lax.map."""
    x = w.pick(ranks=(2, 3), such=lambda v: min(v.shape) > 1)
    axis = w.rng.randrange(len(x.shape))
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    p = w.param(shape, top=x.top, bits=x.bits if x.exact else None)
    with w.body([p]) as b:
        fill(b, 1 + w.rng.randrange(3))
        new = result(b, shape, p.name)
        name, text = w.define(b, [p], new)
    out = w.of([0, axis, len(shape)])
    by_vmap = axis or w.chance(0.7)
    expr = f"jax.vmap({name}, in_axes={axis}, out_axes={out})" if by_vmap else f"lax.map({name}, {x.name})"
    w.emit(f"{expr}({x.name})" if by_vmap else expr, 8.0, before=text)


@statement(1.5)
def parts(w: Writer) -> None:
    """A dim cut into parts, of which one is looped or mapped over; what comes out may be put together again."""
    x = w.pick(ranks=(1, 2, 3), such=lambda v: any(n % p == 0 and n > p for n in v.shape for p in (2, 3, 4)))
    i, k = w.of([(i, p) for i, n in enumerate(x.shape) for p in (2, 3, 4) if n % p == 0 and n > p])
    inner = w.chance(0.3)  # which part is gone over
    cut = (*x.shape[:i], *((x.shape[i] // k, k) if inner else (k, x.shape[i] // k)), *x.shape[i + 1 :])
    at = i + inner
    rest = (*cut[:at], *cut[at + 1 :])
    p = w.param(rest, top=x.top, bits=x.bits if x.exact else None)
    with w.body([p]) as b:
        fill(b, 1 + w.rng.randrange(2))
        name, text = w.define(b, [p], result(b, rest, p.name))
    cuts = f"{name}_x = {x.name}.reshape{cut}"
    lead = f"jnp.moveaxis({name}_x, {at}, 0)" if at else f"{name}_x"
    expr = w.of(
        [
            f"jax.vmap({name}, {at}, {at})({name}_x)",
            f"jax.vmap({name}, {at}, {at})({name}_x)",
            f"jnp.moveaxis(lax.map({name}, {lead}), 0, {at})",
            f"jnp.moveaxis(lax.scan(lambda c, r: (c + r.sum().astype(F), {name}(r)), F(0), {lead})[1], 0, {at})",
            f"jnp.stack([{name}({lead}[j]) for j in range({k})], {at})",
        ]
    )
    back = w.of(["", f".reshape{x.shape}", f".reshape{x.shape}", f".sum({at})", f".mean({at})"])
    w.emit(f"({expr}){back}", 8.0 * k, before=[*text, cuts], scale=False)


@statement(1)
def update(w: Writer) -> None:
    """A gradient that linear readers (averages, decay) take before those that need it whole (signs, norms, clipping)."""
    x = w.pick(ranks=(2, 3))
    u = w.fresh((x.shape[-1], w.of(list(w.sizes.values()))))
    m = w.fresh(u.shape)
    name = f"f{w.name()[1:]}"
    before = [
        f"{name}_l, {name}_g = jax.value_and_grad(lambda u: (jnp.tanh({x.name} @ u) ** 2).mean())({u.name})",
        f"{name}_m = 0.9 * {m.name} + 0.1 * {name}_g",
    ]
    w.emit(w.of([
        f"[{u.name} - 0.25 * jnp.tanh(9.0 * {name}_m + {name}_g), {name}_m]",
        f"[{u.name} - 0.5 * {name}_g, jnp.sqrt(1.0 + jnp.square({name}_g).sum())]",
        f"[{name}_m, {name}_m / (0.5 + jnp.abs({name}_g)), {name}_l]",
        f"[{name}_m * 0.5 + {u.name}, {name}_g / jnp.maximum(1.0, jnp.sqrt(1e-3 + jnp.square({name}_g).sum()))]",
        f"[{name}_g * 2 - {name}_m, jnp.where({name}_l > 0.5, {name}_m, {m.name})]",
    ]), 4.0, before=before, scale=False)  # fmt: skip


CONTROL = ("branch", "loop", "scan", "parts")
"""What runs its body often, or not at all."""
OUTERMOST = frozenset(n for n, (fn, _) in STATEMENTS.items() if fn.__module__ in (calling.__name__, data.__name__))
"""What stands in no body: results of other dtypes, and what the caller decides."""
BODIES = frozenset({"scan", "loop", "branch", "call", "mapped", "accumulate", "parts"})
