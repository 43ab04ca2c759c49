"""JAX's explicit sharding around and inside of a step: meshes in context, arrays whose types have shardings, and what asks for one.

The programs have the shape of those in JAX's guides: sharded computation, explicit sharding.
"""

import contextlib

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P

import meshpar as mp

DIMS = {"w": "embed mlp", "x": "batch embed"}
LAYOUT = "batch: data; mlp: model"
LOWERINGS = ["shard_map", "jit"]
W = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
PRODUCT = X.astype(float) @ W.astype(float)


@pytest.fixture(scope="module")
def emesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert set(mesh.axis_types) == {AxisType.Explicit}
    return mesh


def matmul(w, x):
    return x @ w


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def context(mesh):
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def jitted(fn, mesh, lowering="shard_map", layout=LAYOUT, dims=DIMS):
    return mp.jit(fn, mesh=mesh, layout=layout, dims=dims, lowering=lowering)


OTHER_MESHES = {
    "same": ("data=4, model=2", "batch: data"),
    "order": ("model=2, data=4", "batch: data; mlp: model"),
    "shape": ("data=2, model=4", "batch: data; mlp: model"),
    "names": ("a=8", "batch: a"),
    "fewer devices": ("data=4", "batch: data"),
}


@pytest.mark.parametrize(
    ("name", "lowering", "kind"),
    covering.each(OTHER_MESHES, LOWERINGS, [AxisType.Auto] * 2 + [AxisType.Explicit] * 2),
)
def test_a_step_on_another_mesh_than_that_of_set_mesh(name, lowering, kind):
    mesh, layout = OTHER_MESHES[name]
    step = jitted(matmul, mesh, lowering, layout)
    how = {"mesh": mesh, "layout": layout, "dims": {"": "batch mlp"}, "lowering": lowering}
    draw = mp.init(lambda key: jax.random.normal(key, (16, 32)), **how)
    want = jax.random.normal(jax.random.key(0), (16, 32))
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))):
        close(step(W, X), PRODUCT)
        close(step(*step.put(W, X)), PRODUCT)
        close(draw(jax.random.key(0)), want)
        assert mp.plan(matmul, W, X, mesh=mesh, layout=layout, dims=DIMS).sizes == step.plan(W, X).sizes
        big = mp.plan(matmul, W, X, mesh="data=16, model=8", layout=LAYOUT, dims=DIMS)
        assert big.sizes == {"data": 16, "model": 8}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_step_on_another_mesh_inside_jit(emesh, lowering):
    auto = mp.mesh("data=4, model=2")
    for mesh in ("model=2, data=4", "a=8"):
        step = jitted(matmul, mesh, lowering, "batch: a" if mesh == "a=8" else LAYOUT)
        with jax.set_mesh(auto):
            close(jax.jit(lambda w, x, step=step: jnp.sin(step(w, x)))(W, X), np.sin(PRODUCT))
        with jax.set_mesh(emesh), pytest.raises(mp.errors.MeshError, match=r"\(data=4, model=2\)") as e:
            jax.jit(step)(W, X)
        assert "leave mesh= out" in str(e.value)
    with jax.set_mesh(auto), pytest.raises(mp.errors.MeshError, match=r"\(data=4\)"):
        jax.jit(jitted(matmul, "data=4", lowering, "batch: data"))(W, X)


@pytest.mark.parametrize(("where", "lowering"), [("no context", "jit"), ("set_mesh", "shard_map")])
def test_results_are_arrays_of_the_users_mesh(emesh, lowering, where):
    step = jitted(matmul, emesh, lowering)
    with context(emesh if where == "set_mesh" else None):
        placed = jax.device_put(PRODUCT.astype(np.float32), NamedSharding(emesh, P("data", "model")))
        w, x = step.put(W, X)
        typed = jax.device_put(W, NamedSharding(emesh, P("model"))), jax.device_put(X, NamedSharding(emesh, P("data")))
        for args in ((W, X), (w, x), typed):
            y = step(*args)
            close(y + placed, 2 * PRODUCT)
            assert y.sharding.mesh == x.sharding.mesh == emesh
            assert jax.typeof(y).sharding.spec == P("data", "model") == y.sharding.spec
        draw = mp.init(lambda: {"w": jnp.ones((32, 8))}, mesh=emesh, layout=LAYOUT, dims={"w": "embed mlp"})
        assert draw()["w"].sharding == NamedSharding(emesh, P(None, "model"))
        assert step.abstract(W, X).sharding.mesh == emesh == step.shardings(W, X)[0].mesh
        close(step.lower(W, X).compile()(w, x) + placed, 2 * PRODUCT)


@pytest.mark.parametrize(("mesh", "lowering"), covering.each(["explicit", None, "data=4, model=2"], LOWERINGS))
def test_a_step_inside_of_code_with_explicit_sharding(emesh, lowering, mesh):
    with jax.set_mesh(emesh):
        step = jitted(matmul, emesh if mesh == "explicit" else mesh, lowering)

        def outer(w, x):
            y = step(w, x)
            assert jax.typeof(y).sharding.spec == P("data", "model")
            return jnp.einsum("bm,em->be", y, w, out_sharding=P("data", None))

        x = jax.device_put(X, P("data"))
        close(jax.jit(outer)(W, x), PRODUCT @ W.T)
        close(jax.grad(lambda w: (step(w, x) ** 2).sum())(W), 2 * X.T @ PRODUCT)
        close(jax.vmap(step, (None, 0))(W, np.stack([X, 2 * X])), [PRODUCT, 2 * PRODUCT])
        assert step(W, x).sharding.mesh == emesh


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_training_on_an_explicit_mesh_does_not_copy_the_state(emesh, lowering):
    @mp.jit(mesh=emesh, layout=f"{LAYOUT}; embed: data", dims=DIMS, lowering=lowering, donate_argnames="w")
    def update(w, x):
        return w - 0.01 * jax.grad(lambda w: (matmul(w, x) ** 2).mean())(w)

    with jax.set_mesh(emesh):
        w, x = update.put(W, X)
        want = W.astype(float)
        for _ in range(3):
            before, w = w, update(w, x)
            want -= 0.02 * X.T @ (X @ want) / PRODUCT.size
            assert before.is_deleted()
            assert w.sharding == NamedSharding(emesh, P("data", "model"))
    close(w, want)


# -- what asks for a sharding inside of a step: (function, result, dims of the result that the constraint splits)

KEY = jax.random.key(0)
CASES = {
    "einsum": (lambda w, x: jnp.einsum("be,em->bm", x, w, out_sharding=P(None, "model")), PRODUCT, P(None, "model")),
    "reshard": (lambda w, x: reshard(x @ w, P(None, "model")), PRODUCT, P(None, "model")),
    "reshard, replicated": (lambda w, x: reshard(x @ w, P()), PRODUCT, P()),
    "reshard a tree": (lambda w, x: reshard({"y": x @ w}, {"y": P("model")})["y"], PRODUCT, P("model")),
    "get": (lambda w, x: (x @ w).at[jnp.arange(4)].get(out_sharding=P("model")), PRODUCT[:4], P("model")),
    "set": (lambda w, x: jnp.zeros((16, 8)).at[jnp.arange(16)].set(x @ w, out_sharding=P("model")), PRODUCT, P("model")),
    "reshape": (
        lambda w, x: (x @ w).reshape(4, 4, 8, out_sharding=P("model")), PRODUCT.reshape(4, 4, 8), P("model"),
    ),
    "zeros": (lambda w, x: jnp.zeros((16, 8), out_sharding=P("data")) + x @ w, PRODUCT, None),
    "arange": (lambda w, x: jnp.arange(8.0, out_sharding=P("model")) + x @ w, PRODUCT + np.arange(8), None),
    "random": (
        lambda w, x: jax.random.normal(KEY, (16, 8), out_sharding=P("model")) + 0 * (x @ w),
        jax.random.normal(KEY, (16, 8)), None,
    ),
    "auto_axes of one axis": (
        lambda w, x: auto_axes(matmul, axes="model", out_sharding=P("model"))(w, x), PRODUCT, P("model"),
    ),
    "explicit_axes": (lambda w, x: explicit_axes(matmul, in_sharding=P(None, "model"))(w, x), PRODUCT, None),
    "device_put": (lambda w, x: jax.device_put(x @ w, P("model")), PRODUCT, P("model")),
    "constraint": (lambda w, x: jax.lax.with_sharding_constraint(x @ w, P("model")), PRODUCT, P("model")),
    "nested jit": (lambda w, x: jax.jit(matmul, out_shardings=P("model"))(w, x), PRODUCT, P("model")),
    "nested jit of operands": (
        lambda w, x: jax.jit(matmul, in_shardings=(P(), P("model")))(w, x), PRODUCT, None,
    ),
    "partial": (
        lambda w, x: reshard(jnp.einsum("be,em->bm", x, w, out_sharding=P(unreduced={"data"})), P(None, "model")),
        PRODUCT, P(None, "model"),
    ),
    "scan": (
        lambda w, x: jax.lax.scan(lambda c, _: (reshard(c + x @ w, P("model")), None), jnp.zeros((16, 8)), length=3)[0],
        3 * PRODUCT, None,
    ),
    "vmap": (lambda w, x: jax.vmap(lambda r: reshard(r @ w, P("model")))(x), PRODUCT, P(None, "model")),
    "gradient": (
        lambda w, x: jax.grad(lambda w: (jnp.einsum("be,em->bm", x, w, out_sharding=P("data")) ** 2).sum())(w),
        2 * X.T @ PRODUCT, P(None, "model"),
    ),
    "shard_map": (
        lambda w, x: jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "model"), in_specs=(P("data", "model"), P("model")), out_specs=P("data")
        )(x, w), PRODUCT, P("data"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "lowering", "inside"), covering.each(CASES, LOWERINGS, [False, False, True, True]))
def test_constraints_of_explicit_sharding(emesh, lowering, name, inside):
    """The same function under jax.jit with explicit sharding is the user's program; the result is compared with NumPy."""
    fn, want, spec = CASES[name]
    step = jitted(fn, emesh, lowering)
    with context(emesh if inside else None):
        y = step(W, X)
    close(y, want)
    assert y.sharding.mesh == emesh
    if spec is not None:
        assert y.sharding.spec == spec


def test_a_constraint_moves_what_the_layout_does_not(emesh):
    """`x @ w` under `batch: data` sends nothing; as a result without `data` it is gathered: 3/4 of [16, 8] / 2 floats."""
    columns = NamedSharding(emesh, P(None, "model"))
    for fn in (CASES["einsum"][0], CASES["reshard"][0], jax.jit(matmul, out_shardings=columns)):
        assert mp.plan(fn, W, X, mesh=emesh, layout=LAYOUT, dims=DIMS).bytes_sent == 192
    casts = (
        auto_axes(matmul, axes="model", out_sharding=P("data", "model")),
        explicit_axes(matmul, in_sharding=(P(None, "model"), P("data"))),
    )
    for fn in (matmul, *(lambda w, x, cast=cast: cast(w, x) for cast in casts)):
        assert mp.plan(fn, W, X, mesh=emesh, layout=LAYOUT, dims=DIMS).bytes_sent == 0


def test_cotangents_of_a_constraint_have_none(emesh):
    """The gradient of a weight behind `out_sharding=` is reduced to the weight's sharding, not to a replica."""

    def gradient(w, x):
        return jax.grad(lambda w: (jnp.einsum("be,em->bm", x, reshard(w, P()), out_sharding=P("data")) ** 2).sum())(w)

    plan = mp.plan(gradient, W, X, mesh=emesh, layout="batch: data; embed: data", dims=DIMS)
    assert plan.outputs[0].spec == P("data")
    assert [c.op for c in plan.collectives].count("reduce-scatter") == 1


# -- programs of the shape of JAX's guides: a loss of an MLP with its shardings, and its plain form

LAYERS = {
    name: np.random.default_rng(i).normal(size=shape).astype(np.float32) / 8
    for i, (name, shape) in enumerate({"up": (2, 32, 64), "down": (2, 64, 32)}.items())
}


def plain_loss(p, x):
    for up, down in zip(p["up"], p["down"], strict=True):
        x = x + jax.nn.relu(x @ up) @ down
    return (x**2).mean()


def typed_loss(p, x):
    """Explicit sharding: data and tensor parallel, with `out_sharding=` where a contraction is ambiguous."""
    for i in range(2):
        up, down = (reshard(p[k][i], spec) for k, spec in (("up", P(None, "model")), ("down", P("model"))))
        h = jax.nn.relu(jnp.einsum("be,em->bm", reshard(x, P("data")), up, out_sharding=P("data", "model")))
        x = x + jnp.einsum("bm,me->be", h, down, out_sharding=P("data", None))
    return (x**2).mean()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_training_steps_as_in_the_guides_of_jax(emesh, lowering):
    def train(loss):
        def step(p, x):
            value, gradients = jax.value_and_grad(loss)(p, x)
            return jax.tree.map(lambda p, g: p - g, p, gradients), value

        return step

    dims = {"p/up": "layer embed mlp", "p/down": "layer mlp embed", "x": "batch embed"}
    step = jitted(train(typed_loss), emesh, lowering, f"{LAYOUT}; embed: data", dims)
    want = train(plain_loss)(train(plain_loss)(LAYERS, X)[0], X)
    with jax.set_mesh(emesh):
        p = step.put(p=LAYERS)
        for _ in range(2):
            p, value = step(p, X)
        jax.tree.map(close, (p, value), want)
        assert jax.typeof(p["up"] * 2).sharding.spec == P(None, "data", "model")


@pytest.mark.parametrize("mesh", ["data=4, model=2", "auto"])
def test_explicit_code_on_a_mesh_with_auto_axes(mesh):
    """A plan for devices that are not attached, and a search, have such meshes."""
    fn, want, spec = CASES["einsum"]
    mesh = mp.mesh("data=4, model=2") if mesh == "auto" else mesh
    y = jitted(fn, mesh)(W, X)
    close(y, want)
    assert y.sharding.spec == spec
    assert y.sharding.mesh.axis_types == (AxisType.Auto,) * 2
    assert mp.check(fn, W, X, mesh="data=4, model=2", layout=[LAYOUT], dims=DIMS).ok


def test_a_function_is_traced_apart_for_a_step_and_for_jax(emesh):
    """Inner functions under `jax.jit` have one trace cache; in a step their types have no shardings."""
    inner = jax.jit(lambda x: reshard(x * 2, P("data")))
    with jax.set_mesh(emesh):
        assert jax.typeof(inner(X)).sharding.spec == P("data", None)
        close(jitted(lambda w, x: inner(x) @ w, emesh)(W, X), 2 * PRODUCT)
        other = jax.jit(lambda x: reshard(x * 3, P("data")))
        close(jitted(lambda w, x: other(x) @ w, emesh)(W, X), 3 * PRODUCT)
        assert jax.typeof(other(X)).sharding.spec == P("data", None)


def test_errors(emesh):
    with pytest.raises(mp.errors.UnsupportedError, match="shard_map without in_specs") as e:
        jitted(lambda w, x: jax.shard_map(jnp.sin, out_specs=P("data"))(x), emesh)(W, X)
    assert "in_specs=" in str(e.value)
    rows = NamedSharding(jax.make_mesh((8,), ("rows",)), P("rows"))
    with pytest.raises(mp.errors.MeshError, match="no axis `rows`") as e:
        jitted(lambda w, x: jax.jit(matmul, out_shardings=rows)(w, x), "data=4, model=2")(W, X)
    assert "test_explicit_sharding.py" in str(e.value)
