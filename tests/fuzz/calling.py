"""Statements whose results depend on how the function is called: JAX's configuration, outer axes."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from statements import statement
from writer import OUTER, Writer


@statement(0.7)
def configured(w: Writer) -> None:
    """What depends on JAX's configuration at the time of the call."""
    x = w.pick(ranks=(1, 2))
    w.needs.add(w.of(["x64", "threefry", "x64"]))
    w.emit(w.of([
        f"{x.name}.astype(float).sum() + jnp.arange(3).sum()", f"jax.random.normal(jax.random.key(0), {x.shape}) + {x.name} * 0", f"jnp.argmax({x.name}, 0)" if x.top < 0 else f"jnp.arange({x.shape[0]}) * 2", f"jax.random.uniform(jax.random.key(3), {x.shape}) * {x.name}",
        f"jnp.zeros({x.shape}).astype(int) + 1", f"jnp.linspace(0, 1, {x.shape[0]})", f"jnp.sum({x.name} > 0, 0)", f"jax.random.randint(jax.random.key(1), {x.shape}, 0, 9)",
    ]), scale=False, kind="o")  # fmt: skip


@statement(0.6)
def under_an_axis(w: Writer) -> None:
    """The size of the axis of an outer ``vmap``, and reductions over it."""
    if w.depth:
        return
    x = w.pick(ranks=(1, 2))
    w.needs.add("axis")
    w.forward_only = True  # a gradient would be summed over the axis
    w.emit(w.of([
        f"{x.name}.sum() / lax.psum(1, '{OUTER}')", f"{x.name} * lax.axis_size('{OUTER}')", f"lax.psum({x.name}, '{OUTER}') * 0.5", f"{x.name} - lax.pmean({x.name}, '{OUTER}')", f"{x.name} + lax.axis_index('{OUTER}')", f"lax.psum({x.name}, '{OUTER}').sum()",
        f"lax.all_gather({x.name}, '{OUTER}').max(0)", f"lax.ppermute({x.name}, '{OUTER}', [(n, n - 1) for n in range(1, lax.axis_size('{OUTER}'))] + [(0, lax.axis_size('{OUTER}') - 1)])",
    ]), scale=False, kind="o")  # fmt: skip


@statement(0.4)
def rings(w: Writer) -> None:
    """Matmuls of sharded weights, overlapped as rings, with 32- and 64-bit indices."""
    w.needs.update({"ring", *(["x64"] if w.chance(0.7) else [])})
    x = w.fresh((w.split_size(), 16), names=("batch", "model"))
    u, v = w.fresh((16, 16), names=("model", "hidden")), w.fresh((16, 8), names=("hidden", None))
    w.sizes.update({"batch": x.shape[0], "model": 16, "hidden": 16})
    w.emit(f"jnp.tanh({x.name} @ {u.name}) @ {v.name}", 16.0)
