"""The statements of random programs that compute with arrays in host memory: stacks in loops, slices, arguments, moments."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from dataclasses import replace

from statements import statement
from writer import Skip, Writer


def stack_on_host(w: Writer) -> tuple[str, str, float, int]:
    """A copy of an array in host memory, zeros like a row of it, the bound of its sum, and its number of rows."""
    x = w.pick(ranks=(2, 3))
    n = x.shape[0]
    host = w.of([
        f"jax.device_put(lax.stop_gradient({x.name}), HOST)",
        f"jax.device_put(jnp.tanh(lax.stop_gradient({x.name})), HOST)",
        f"lax.optimization_barrier(jax.device_put(lax.stop_gradient({x.name}) * 0.5, HOST))",
    ])  # fmt: skip
    return host, f"jnp.zeros_like({x.name}[0])", x.top * max(2, n), n


def select_rows(w: Writer) -> None:
    """Note that a program selects rows of a host array at run-time indices: under ``vmap`` a gather, which JAX does not permit."""
    if "axis" in w.needs:
        raise Skip
    w.needs.add("no axis")


@statement(0.5)
def host_stack(w: Writer) -> None:
    """Loops over a stack in host memory, which read it a row at a time, write it, or do both."""
    select_rows(w)
    host, zeros, top, n = stack_on_host(w)
    name = f"f{w.name()[1:]}"
    row = "jax.device_put(lax.dynamic_index_in_dim(h, i, 0, False), DEVICE)"
    text = w.of([
        f"lax.scan(lambda c, a: (c * 0.5 + jnp.sin(jax.device_put(a, DEVICE)), None), {zeros}, {host})[0]",
        f"jax.device_put(lax.scan(lambda c, a: (c * 0.5 + jax.device_put(a, DEVICE), jax.device_put(c, HOST)), {zeros}, {host})[1], DEVICE)",
        f"(lambda h: lax.fori_loop(0, {n}, lambda i, c: c * 0.5 + {row}, {zeros}))({host})",
        f"jax.device_put(lax.fori_loop(0, {n}, {name}, {host}), DEVICE)",
        f"jax.device_put(lax.fori_loop(1, {n}, {name}, {host}), DEVICE).sum(0)",
    ])  # fmt: skip
    before = [
        f"{name} = lambda i, h: lax.dynamic_update_index_in_dim(h, jax.device_put(jnp.tanh({row}) * 2, HOST), i, 0)"
    ]
    w.emit(text, top, before=before)


@statement(0.4)
def host_rows(w: Writer) -> None:
    """Slices of an array in host memory, and several arrays at once behind a barrier."""
    select_rows(w)
    host, _, top, n = stack_on_host(w)
    y = w.pick(ranks=(1, 2))
    w.emit(w.of([
        f"jax.device_put({host}[{n - 1}], DEVICE) + jax.device_put({host}, DEVICE).sum(0)",
        f"jax.device_put(lax.dynamic_slice_in_dim({host}, jnp.int32({n // 2}), 1), DEVICE)",
        f"jax.device_put(lax.optimization_barrier(({host}, {y.name}.sum(0)))[0], DEVICE)",
        f"jax.device_put(jax.device_put(jax.device_put({host}, DEVICE) * 2, HOST), DEVICE)",
    ]), 2 * top)  # fmt: skip


@statement(0.4)
def host_argument(w: Writer) -> None:
    """An argument in host memory, which the program copies to the device, or loops over."""
    shape = w.of([(w.split_size(), w.of([2, 4])), (w.of([2, 3]), w.split_size(), 4)])
    v = w.fresh(shape)
    writer: Writer | None = w
    while writer is not None:  # other statements, which compute on the device, do not pick it
        writer.vars[:] = [replace(u, kind="h") if u is v else u for u in writer.vars]
        writer = writer.parent
    w.needs.add(f"host {v.name}")
    # JAX's derivative of a loop mixes host and device if its body copies an array of the host, or is inside of another body
    x = f"lax.stop_gradient({v.name})" if w.depth else v.name
    w.emit(w.of([
        f"jax.device_put({x}, DEVICE)",
        f"lax.scan(lambda c, a: (c * 0.5 + jax.device_put(a, DEVICE), None), jax.device_put({x}[0], DEVICE), {x})[0]",
    ]), 4.0)  # fmt: skip


@statement(0.4)
def offloaded_moments(w: Writer) -> None:
    """Updates of ``mp.train.offload``: two parameters in sequence, or a stacked one in a loop over its layers."""
    select_rows(w)
    x, y = w.pick(ranks=(2, 3)), w.pick(ranks=(1, 2))
    name = f"f{w.name()[1:]}"
    layers = w.of(["", f", layers={x.shape[0]}"]) if x.shape[0] > 1 else ""
    before = [
        f"{name} = mp.train.offload(optax.trace(0.5){layers})",
        f"{name}_g = [lax.stop_gradient({x.name}), lax.stop_gradient({y.name})]",
        f"{name}_u, {name}_s = {name}.update({name}_g, {name}.init({name}_g))",
        f"{name}_u, {name}_s = {name}.update({name}_u, {name}_s)",
    ]
    w.emit(f"[{name}_u[0], {name}_u[1] * 0.5]", 2 * max(x.top, y.top), before=before, scale=False)
