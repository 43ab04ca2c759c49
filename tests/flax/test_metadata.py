"""Names from Flax metadata, as people write it: linen and NNX, optimizers, stacked layers."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.dims import format_dims
from meshpar._src.flax import flatten_named
from meshpar._src.plan import checks

LAYOUT = "batch: data; mlp: model; embed: data"
TOKENS = {"x": "batch embed"}
lecun = nn.initializers.lecun_normal()


def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def dims_of(held) -> dict[str, str]:
    return {h.path: format_dims(h.dims) for h in held}


def ends(held) -> dict[str, str]:
    """:func:`dims_of`, by the last two components of the paths."""
    return {"/".join(path.split("/")[-2:]): dims for path, dims in dims_of(held).items()}


def close(got, want, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def found(tree, *path: str) -> dict[str, tuple]:
    return {leaf.path: leaf.dims for leaf in flatten_named(tree, path)}


# -- linen


class Mlp(nn.Module):
    """Its weights are named by ``box``, its activations by a logical constraint."""

    box: object = nn.with_logical_partitioning
    constrain: bool = True

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(32, kernel_init=self.box(lecun, ("embed", "mlp")), name="up")(x)
        if self.constrain:
            h = nn.with_logical_constraint(nn.relu(h), ("batch", "mlp"))
        return nn.Dense(16, kernel_init=self.box(lecun, ("mlp", "embed")), use_bias=False, name="down")(h)


def variables(model: nn.Module = Mlp()):  # noqa: B008
    return model.init(jax.random.key(0), x())


def axes_of(layout, dims=None):
    """The specs of the weights, and the notes, of a model whose metadata are axes: of a plan, shardings() and put()."""
    model = nn.Dense(32, kernel_init=nn.with_partitioning(lecun, ("fsdp", "tp")), use_bias=False)
    how = {"mesh": mp.mesh("fsdp=4, tp=2"), "layout": layout, "dims": {"x": "batch _", **(dims or {})}}
    step, weights = mp.jit(lambda variables, x: model.apply(variables, x), **how), model.init(jax.random.key(0), x())
    plan = step.plan(weights, x())
    of_kernel = {plan.inputs[0].spec}
    of_kernel.add(jax.tree.leaves(step.put(variables=weights))[0].sharding.spec)
    of_kernel.add(jax.tree.leaves(mp.shardings({"variables": weights}, layout, how["mesh"], dims=dims))[0].spec)
    of_kernel.add(jax.tree.leaves(mp.jit(model.apply, **how | {"dims": dims}).put(variables=weights))[0].sharding.spec)
    (spec,) = of_kernel
    return spec, plan, [n for n in plan.notes if "metadata" in n]


def test_metadata_that_names_axes_of_the_mesh():
    """Rules for them follow those of the user, who can replace them; names of dims= are never axes."""
    spec, plan, notes = axes_of("batch: fsdp")
    assert spec == P("fsdp", "tp")
    assert str(plan.layout) == "batch, fsdp: fsdp; tp: tp"
    assert [n.partition("turns")[0].rpartition("; ")[2] for n in notes] == ["`fsdp: none` ", "`tp: none` "]
    assert plan.inputs[1].spec == P("fsdp")  # `batch` comes first: the weights are gathered, FSDP
    assert {(c.op, c.axes) for c in plan.collectives} == {("all-gather", ("fsdp",))}
    spec, plan, notes = axes_of("batch: fsdp; fsdp: none")
    assert (spec, len(notes), str(plan.layout)) == (P(None, "tp"), 1, "batch: fsdp; fsdp: none; tp: tp")
    spec, plan, notes = axes_of("batch: fsdp; tp: tp", {"*/kernel": "fsdp tp"})
    assert (spec, notes, str(plan.layout)) == (P(None, "tp"), [], "batch: fsdp; tp: tp")


def test_a_dim_with_the_name_of_an_axis_has_no_rule_of_its_own():
    """Data parallelism over two axes stays that, for experts as well, in a plan and in Layout.spec."""
    experts, tokens = jnp.ones((8, 64, 256)), jnp.ones((64, 64))
    mesh, layout = mp.mesh("data=2, expert=4"), mp.Layout("batch: data+expert")
    dims = {"w": "expert embed mlp", "x": "batch embed"}
    plan = mp.plan(lambda w, x: jnp.einsum("bd,edf->bef", x, w), experts, tokens, mesh=mesh, layout=layout, dims=dims)
    assert [h.spec for h in plan.inputs] == [layout.spec(dims[k], mesh) for k in "wx"] == [P(), P(("data", "expert"))]
    assert not plan.collectives


@pytest.mark.parametrize("box", [nn.with_logical_partitioning, nn.with_partitioning])
def test_linen_apply_and_its_gradient(mesh, box):
    model = Mlp(box)

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - x) ** 2)

    def fn(variables, x):
        return jax.value_and_grad(loss)(variables, x)

    run = mp.jit(fn, mesh=mesh, layout=LAYOUT, dims=TOKENS, strict=True)
    plan = run.plan(variables(model), x())
    assert dims_of(plan.inputs)["variables/params/up/bias"] == "mlp"  # inferred
    gradients = {"down/kernel": "mlp embed", "up/bias": "mlp", "up/kernel": "embed mlp"}
    assert ends(plan.outputs) == {"0": "", **gradients}
    assert {h.kind for h in plan.inputs} == {"params", None}
    value, grads = run(variables(model), x())
    want, want_grads = fn(variables(model), x())
    assert jax.tree.structure(grads) == jax.tree.structure(want_grads)  # boxes stay boxes
    close((value, grads), (want, want_grads), rtol=2e-5, atol=1e-6)


def test_linen_logical_constraints_name_activations(mesh):
    model = Mlp(lambda init, names: init)  # no names but those of the constraint
    how = {"mesh": mesh, "layout": "batch: data; mlp: model", "dims": {"x": "batch _"}}
    plan = mp.plan(lambda variables, x: model.apply(variables, x), variables(model), x(), **how)
    assert ends(plan.inputs) == {"down/kernel": "mlp _", "up/bias": "mlp", "up/kernel": "_ mlp", "x": "batch _"}


def test_with_sharding_constraint_over_names_and_over_axes(mesh):
    def fn(x):
        y = jax.lax.with_sharding_constraint(x * 2, P("batch", "embed"))
        return y, jax.lax.with_sharding_constraint(x * 3, P(None, "model"))

    plan = mp.plan(fn, x(), mesh=mesh, layout="batch: data")
    assert dims_of(plan.inputs) == {"x": "batch embed"}
    assert [h.spec for h in plan.outputs] == [P("data"), P(None, "model")]  # explicit beats claimed


# -- nnx


def named(*names: str, key: str = "out_sharding"):
    """An initializer whose variable carries these names, under a key that Flax has used."""
    return nnx.with_metadata(nnx.initializers.lecun_normal(), **{key: names})


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, make=named):
        self.up = nnx.Linear(16, 32, kernel_init=make("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=make("mlp", "embed"), use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def net(make=named) -> Net:
    with nnx.use_eager_sharding(False):
        return Net(nnx.Rngs(0), make)


def partitioned(*names: str):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


@pytest.mark.filterwarnings("ignore:'sharding:DeprecationWarning")  # what older models write
@pytest.mark.parametrize(
    "make", [named, partitioned, lambda *n: named(*n, key="sharding_names"), lambda *n: named(*n, key="sharding")]
)
def test_nnx_metadata(mesh, make):
    plan = mp.plan(lambda model, x: model(x), net(make), x(), mesh=mesh, layout=LAYOUT, dims=TOKENS, strict=True)
    weights = {"down/kernel": "mlp embed", "up/bias": "mlp", "up/kernel": "embed mlp"}
    assert ends(plan.inputs) == {**weights, "x": "batch embed"}
    assert [h.kind for h in plan.inputs] == ["params"] * 3 + [None]


@pytest.mark.parametrize("metadata", [("embed", "mlp"), P("embed", "mlp"), P("embed", ("mlp",))])
def test_the_forms_of_nnx_metadata(metadata):
    with nnx.use_eager_sharding(False):
        param = nnx.Param(jnp.ones((16, 32)), out_sharding=metadata)
    assert found({"w": param}, "params") == {"params/w": ("embed", "mlp")}


@pytest.mark.parametrize("optimizer", [optax.adamw, optax.lion, optax.adafactor])
def test_nnx_optimizer(mesh, optimizer):
    model = net()
    opt = nnx.Optimizer(model, optimizer(1e-3), wrt=nnx.Param)

    def step(model, opt, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        opt.update(model, grads)
        return loss

    plan = mp.plan(step, model, opt, x(), mesh=mesh, layout=LAYOUT, dims=TOKENS, strict=True)
    state = {h.path: h for h in plan.inputs if h.path.startswith("opt/")}
    assert {h.kind for h in state.values()} == {"opt"}
    kernels = {p: format_dims(h.dims) for p, h in state.items() if p.endswith("up/kernel") and h.shape == (16, 32)}
    assert kernels
    assert set(kernels.values()) == {"embed mlp"}
    assert {format_dims(h.dims) for p, h in state.items() if h.shape == (32,) and p.endswith("bias")} <= {"mlp"}
    assert {h.path for h in plan.outputs} >= set(state)


def test_constraints_are_ours_only_while_tracing(mesh):
    """Nothing stays patched, and a trace in one thread leaves another's constraints alone."""
    plain = jax.lax.with_sharding_constraint
    inside, done = threading.Event(), threading.Event()
    seen = []

    def fn(x):
        seen.append(jax.lax.with_sharding_constraint is plain)
        inside.set()
        assert done.wait(30)
        return jax.lax.with_sharding_constraint(x, jax.P("batch", None))

    def trace():
        plan = mp.plan(fn, np.ones((8, 4), np.float32), mesh=mesh, layout="batch: data", dims={"x": "_ _"})
        seen.append(plan.outputs[0].spec)

    other = threading.Thread(target=trace)
    other.start()
    assert inside.wait(30)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    here = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))(np.ones((8, 4), np.float32))
    done.set()
    other.join()
    assert here.sharding.is_equivalent_to(sharding, 2)
    assert seen == [False, jax.P("data")]
    assert jax.lax.with_sharding_constraint is plain


class Renamed(nn.Module):
    """A model that names its activations as its author does."""

    by: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(self.by(nn.Dense(32)(x), P("rows", "hidden")))


@pytest.mark.parametrize(("module", "by"), [(nn, "with_logical_constraint"), (jax.lax, "with_sharding_constraint")])
def test_a_join_names_the_function_that_gave_the_name(module, by):
    model, dims = Renamed(lambda *args: getattr(module, by)(*args)), {"x": "batch embed"}
    weights = jax.eval_shape(Renamed(lambda y, _: y).init, jax.random.key(0), x())
    step = lambda variables, x: model.apply(variables, x)  # noqa: E731
    with pytest.warns(mp.errors.JoinWarning, match=rf"{by} at .*test_metadata.py:\d+ \(<lambda>\) names it `rows`"):
        plan = mp.plan(step, weights, x(), mesh="data=4", layout="batch: data", dims=dims)
    assert "mp.named" not in str(plan.joins[0])


class Foreign(nn.Module):
    """A model with names of its own, on weights and on activations."""

    rows: str | None = "act_batch"
    hidden: str | None = "act_emb"
    width: str = "features"

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning(lecun, (self.width, "mlp"))
        h = nn.relu(nn.Dense(32, kernel_init=box, use_bias=False, name="up")(x))
        h = nn.with_logical_constraint(h, (self.rows, self.hidden))
        return nn.Dense(16, kernel_init=nn.with_logical_partitioning(lecun, ("mlp", self.width)), use_bias=False)(h)


OURS = {"act_batch": "batch", "act_emb": None, "features": "embed"}


def test_names_of_a_model_are_changed_from_outside():
    """The plan, the sharding of the weights and the result are those of the model with the other names in its code."""
    layout = "batch: data; mlp: model; embed: data"
    where = {"mesh": "data=4, model=2", "layout": layout}

    def of(model, names):
        weights = model.init(jax.random.key(0), x())
        step = mp.jit(lambda params, x: model.apply(params, x), **where, dims={"x": "batch embed"}, names=names)
        init = mp.init(model.init, **where, names=names)
        placed = jax.tree.leaves(init(jax.random.key(0), x()))[0], jax.tree.leaves(step.put(params=weights))[0]
        held = jax.tree.leaves(
            mp.shardings({"params": init.abstract(jax.random.key(0), x())}, layout, mp.mesh(where["mesh"]), names=names)
        )
        plan = step.plan(weights, x())
        assert plan.joins == []
        return (
            plan.inputs,
            plan.collectives,
            [a.sharding.spec for a in placed],
            [h.spec for h in held],
            step(weights, x()),
        )

    ours, foreign = of(Foreign("batch", None, "embed"), None), of(Foreign(), OURS)
    assert [(h.path, h.dims, h.spec) for h in ours[0]] == [(h.path, h.dims, h.spec) for h in foreign[0]]
    assert [(c.op, c.dims, c.bytes) for c in ours[1]] == [(c.op, c.dims, c.bytes) for c in foreign[1]]
    assert ours[2:4] == foreign[2:4]
    assert ours[2][0] == P("model", "data")
    np.testing.assert_array_equal(ours[4], foreign[4])


def test_a_constraint_without_a_rule_has_the_edit_in_its_warning():
    step, weights = lambda params, x: Foreign().apply(params, x), Foreign().init(jax.random.key(0), x())
    where = {"mesh": "data=4, model=2", "dims": {"x": "batch features"}}
    with pytest.warns(
        mp.errors.JoinWarning, match=r"write `batch, act_batch: data`, or names=\{\"act_batch\": \"batch\"\}"
    ):
        replicated = mp.plan(step, weights, x(), layout="batch: data; mlp: model", **where)
    checks.REPORTED_JOINS.clear()
    with pytest.warns(mp.errors.JoinWarning, match=r"write `mlp\?, act_emb\?: model`"):  # both stay optional
        mp.plan(step, weights, x(), layout="batch, act_batch: data; mlp?: model", **where)
    edited = mp.plan(step, weights, x(), layout="batch, act_batch: data; mlp, act_emb: model", **where)
    renamed = mp.plan(
        step, weights, x(), layout="batch: data; mlp: model", names=OURS | {"features": "features"}, **where
    )
    assert replicated.bytes_sent > edited.bytes_sent == renamed.bytes_sent


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        ({"act_bath": "batch"}, mp.errors.UnknownDimError, "the names that it has: act_batch, act_emb, features, mlp"),
        ({"act_batch": "a b"}, mp.errors.LayoutSyntaxError, "'a b' is not one name"),
        ({"act_batch": "a:b"}, mp.errors.LayoutSyntaxError, "is not a name"),
    ],
)
def test_names_that_cannot_be_changed(names, error, says):
    weights = jax.eval_shape(Foreign().init, jax.random.key(0), x())
    with pytest.raises(error, match=says):
        mp.plan(
            lambda params, x: Foreign().apply(params, x), weights, x(), mesh="data=4", layout="mlp: data", names=names
        )
