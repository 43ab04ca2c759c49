"""The preset layouts by name: the dims that they shard, on models with all of their dims and with some."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax
import pytest

import meshpar as mp
from meshpar._src.plan_api import Plan
from meshpar.errors import ReplicatedWarning
from meshpar.layouts import PRESETS

DIMS = {"w/q": "embed heads head_dim", "w/up": "embed mlp", "w/down": "mlp embed", "x": "batch seq embed"}


def step(w, x):
    def loss(w):
        y = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return (y if "q" not in w else jnp.einsum("bse,ehd->bshd", y, w["q"])).var()

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def planned(layout, mesh: str, heads: bool = True) -> Plan:
    shapes = {"up": (32, 64), "down": (64, 32)} | ({"q": (32, 8, 4)} if heads else {})
    w = {k: shape(*s) for k, s in shapes.items()}
    dims = {k: v for k, v in DIMS.items() if heads or k != "w/q"}
    return mp.plan(step, w, shape(8, 16, 32), mesh=mesh, layout=layout, dims=dims)


def test_axes_are_those_that_a_scheme_is_given():
    specs = {h.path: h.spec for h in planned(mp.layouts.megatron(model="tensor"), "data=2, tensor=4").inputs}
    assert specs["w/q"] == specs["w/up"] == jax.P(None, "tensor")
    assert (specs["w/down"], specs["x"]) == (jax.P("tensor"), jax.P("data"))
    specs = {h.path: h.spec for h in planned(mp.layouts.hsdp(), "slice=2, data=4").inputs}
    assert (specs["x"], specs["w/up"]) == (jax.P(("slice", "data")), jax.P("data"))


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("heads", [True, False])
def test_each_plans_a_model_that_lacks_some_of_its_dims(name, heads):
    no_experts = "shards `expert` and `experts` and `exp` over `data`, but no dim"  # no warning of axes of size 1
    with pytest.warns(ReplicatedWarning, match=no_experts) if name == "expert_megatron" else nullcontext():
        plan = planned(PRESETS[name](), "slice=1, data=2, model=2, context=2, expert=1", heads)
    assert plan.inputs[-1].spec[0] is not None, "the batch is split"


@pytest.mark.parametrize("name", ["expert", "experts", "exp"])
def test_experts_are_split_by_each_of_their_names(name):
    how = {"layout": mp.layouts.expert_parallel(), "dims": {"x": "batch embed", "w": f"{name} embed mlp"}}
    args = shape(8, 16), shape(4, 16, 8)
    plan = mp.plan(lambda x, w: jnp.einsum("bd,edf->bef", x, w), *args, mesh="data=2, expert=2", **how)
    assert plan.inputs[1].spec == jax.P("expert", "data")


@pytest.mark.parametrize("name", mp.layouts.PRESETS)
def test_the_name_of_a_scheme_is_its_layout_with_the_default_axes(name):
    assert mp.Layout(name) == mp.layouts.PRESETS[name]()
    assert mp.Layout(name).rules


def test_a_scheme_for_weights_without_names_gives_the_dims_to_fill_in():
    args = {"w": shape(16, 8)}, shape(8, 16)
    with pytest.warns(
        ReplicatedWarning,
        match=r'The weights have no names.*\n.*\n  "p/w": "_ _",  # \[16, 8\]',
    ):
        mp.plan(lambda p, x: (x @ p["w"]).mean(), *args, mesh="data=4", layout="fsdp", dims={"x": "batch _"})


def test_commas_and_colons_as_in_mesh_tensorflow():
    assert (
        mp.Layout("batch:rows,hidden:cols")
        == mp.Layout("batch:rows;hidden:cols")
        == mp.Layout("batch: rows; hidden: cols")
    )
    assert mp.Layout("batch:rows, hidden:cols; heads, mlp: cols") == mp.Layout("batch: rows; hidden, heads, mlp: cols")


def test_a_scheme_whose_dims_have_other_names_warns():
    w, x = shape(32, 64), shape(8, 32)
    named = {"w": "hidden ff", "x": "batch hidden"}

    def sent(layout, dims=named):
        return mp.plan(lambda w, x: x @ w, w, x, mesh="data=4, model=2", layout=layout, dims=dims)

    with pytest.warns(ReplicatedWarning, match=r"scheme `fsdp` shards `embed` over `data`.* batch, ff, hidden: rename"):
        sent(mp.layouts.fsdp())
    with pytest.warns(ReplicatedWarning, match="`heads` and `kv_heads` and `mlp` and `vocab` over `model`"):
        sent("fsdp+tensor", {"w": "embed ff", "x": "batch embed"})
    sent(str(mp.layouts.fsdp()))  # rules of one's own marked `?` are for dims that may be absent
    sent("fsdp", {"w": "embed mlp", "x": "batch embed"})
    sent(mp.layouts.fsdp() | "hidden: model")


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("pipeline", "layers: stage; batch: data; vocab?: stage"),
        ("fsdp+pipeline", "layers: stage; batch, embed?: data; vocab?: stage"),
        ("zero1+pipeline", "layers: stage; batch, opt.embed?: data; vocab?: stage"),
        ("megatron+pipeline", "layers: stage; batch: data; heads?, kv_heads?, mlp?: model; vocab?: stage+model"),
    ],
)
def test_a_scheme_inside_of_stages(name, rules):
    scheme = name.removesuffix("pipeline").strip("+") or "data_parallel"
    assert mp.Layout(name) == mp.layouts.pipeline(scheme) == mp.Layout(rules)
    assert mp.layouts.pipeline(scheme).scheme == mp.Layout(name).scheme == name.replace("+", "_")


def test_stages_around_a_layout_of_ones_own():
    layout = mp.layouts.pipeline("batch: x; vocab: x; depth: none", stage="s", layers="depth")
    assert str(layout) == "depth: s; batch: x; vocab: s+x"
    assert mp.layouts.pipeline(layout, stage="s", layers="depth") == layout
    assert str(mp.layouts.pipeline(rounds=2)) == "layers: stage*2; batch: data; vocab?: stage"
    with pytest.raises(mp.errors.UnsupportedError, match="rounds=0"):
        mp.layouts.pipeline(rounds=0)


@pytest.mark.parametrize(
    ("layout", "dims", "warns"),
    [
        ("batch: data; mlp: data", None, True),
        ("fsdp", None, True),
        ("batch: data", None, False),
        ("context_parallel", None, False),
        ("batch: data; mlp: data", {"*/w": "_ mlp"}, False),
    ],
)
def test_init_of_weights_without_names_warns(layout, dims, warns):
    def create():
        return {"layers_0": {"w": jnp.ones((16, 8))}, "layers_1": {"w": jnp.ones((16, 8))}, "b": jnp.ones(8)}

    mesh = "data=4, context=2" if layout == "context_parallel" else "data=4"
    template = r'\n.*\n  "\*/layers_\*/w": "_ _",  # \[16, 8\] and 1 more\n}'
    replicated = r"mp.init: the weights have no names.*\(nnx.eval_shape for nnx modules\).*" + template
    with pytest.warns(ReplicatedWarning, match=replicated) if warns else nullcontext():
        mp.init(create, mesh=mesh, layout=layout, dims=dims)()


def test_state_that_arrives_less_sharded_than_planned_warns_once():
    def step(params, x):
        draw = jax.random.uniform(params["key"])
        new = {name: w * draw if name != "key" else w for name, w in params.items()}
        return new, (x @ params["up"] @ params["down"]).sum()

    how = {"layout": "batch: data; mlp: model", "mesh": mp.mesh("data=2, model=4")}
    params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16)), "key": jax.random.key(0)}
    dims = {"*/up": "embed mlp", "x": "batch embed"}  # the step infers the dims of `down`
    jitted, x = mp.jit(step, dims=dims, **how), jnp.ones((4, 16))
    made = mp.init(lambda: {"params": params}, dims={"*/up": "embed mlp"}, **how)()["params"]
    sharded = mp.jit(step, dims=dims, **how).shardings(params, x)[0]
    needs = r"take 2.5 KiB of each device before this call, and 1.0 KiB under the plan"
    with pytest.warns(ReplicatedWarning, match=needs) as said:
        jitted(made, x)
    assert 'dims={\n  "*/down": "mlp _",  # [32, 16]\n}' in str(said[0].message)
    jitted(made, x)  # once
    mp.jit(step, dims=dims, **how)(jax.device_put(params, sharded), x)
    mp.jit(step, dims=dims, **how)(params, x)  # uncommitted arrays are on one device


def test_the_template_has_the_batch_and_the_weights_but_not_their_optimizer_state():
    params = {f"layers_{i}": {"up": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}} for i in range(20)}
    state = {"opt": optax.adam(1e-3).init(params), "params": params}

    def loss(state, batch):
        return sum((batch["x"] @ p["up"]["kernel"]).sum() for p in state["params"].values())

    with pytest.raises(mp.errors.UnknownDimError) as e:
        mp.plan(loss, state, {"x": jnp.ones((4, 8))}, mesh="data=4", layout="batch: data", dims={})
    text = str(e.value)
    weights = '"state/params/layers_*/up/kernel": "_ _",  # [8, 8] and 19 more'
    assert text.index('"batch/x": "_ _",  # [4, 8]') < text.index(weights)
    assert "opt" not in text
    assert "more\n" not in text.partition("and 19 more")[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fdsp", "did you mean the scheme `fsdp`"),
        ("tensor-paralel", "did you mean the scheme `tensor_parallel`"),
        ("zero3", "did you mean the scheme `fsdp`"),  # names of other libraries
        ("zero2", "did you mean the scheme `zero1`"),
        ("ddp", "did you mean the scheme `data_parallel`"),
        ("tp", "did you mean the scheme `tensor_parallel`"),
        ("alpa", "schemes are data_parallel, zero1, fsdp"),
        ("fsdp+pipelin", "pipelin"),
        ("batch: data mlp: model", "separate rules by `;`: `batch: data; mlp: model`"),
        ("batch: data opt.mlp: model", "separate rules by `;`: `batch: data; opt.mlp: model`"),
        ("batch, seq: data, mlp: model", "separate rules by `;`: `batch, seq: data; mlp: model`"),
        (["batch: data", "mlp: model"], 'in one text, separated by `;`: "batch: data; mlp: model"'),
        ("batch=data; embed=data", "write `:` in rules: `batch: data`"),
        ("batch data", "did you mean `batch: data`?"),
        ("batch: data; heads, mlp model", "did you mean `heads, mlp: model`?"),
        ("batch::data", "write `batch:data`"),
        ("batch", "layout rule 'batch' has no `:`"),
        ("batch: ", "'' is not an axis"),
        ("batch: data model", "'data model' is not an axis"),
        ("batch: data,model", "'data,model' is not an axis"),
        ("batch seq: data", "'batch seq' is not a dim"),
        (": data", "'' is not a dim"),
        ("seq': data", '"seq\'" is not a dim'),  # what is primed keeps no axis
        ("optt.embed: data", "there is no scope `optt`"),
    ],
)
def test_a_text_that_is_no_layout_is_corrected(text, says):
    with pytest.raises(mp.errors.LayoutSyntaxError) as error:
        mp.Layout(text)
    assert says in str(error.value)
    assert error.value.fixes


def test_the_scheme_of_a_layout():
    assert mp.Layout("fsdp+tensor+sequence") == mp.layouts.sequence_parallel()
    assert mp.Layout("fsdp_tensor_sequence_pipeline").scheme == "sequence_parallel_pipeline"
    assert mp.layouts.fsdp("other").scheme == mp.Layout("fsdp").scheme == mp.Layout(mp.layouts.fsdp()).scheme == "fsdp"
    assert mp.Layout("batch: data").scheme == (mp.layouts.fsdp() | "batch: data").scheme == ""
    assert mp.Layout("batch: data; mlp: model", scheme="mine").scheme == "mine"
    assert mp.Layout("fsdp") == mp.Layout(str(mp.Layout("fsdp")))  # equal by rules, whatever they are called


def test_an_argument_that_only_a_constraint_names_and_a_rule_does_not_divide_warns():
    """The argument is replicated; the warning has its dim, the size, the axis, the line of the constraint, and the fixes."""

    def step(w, x):
        return mp.named(x @ w["up"], "batch mlp") @ w["down"]

    args = {"up": shape(16, 12), "down": shape(12, 16)}, shape(16, 16)
    with pytest.warns(ReplicatedWarning) as said:
        plan = mp.plan(step, *args, mesh="data=1, model=8", layout="batch: data; mlp: model", dims={"x": "batch _"})
    assert all(h.spec == jax.P() for h in plan.inputs[:2])
    (text,) = (str(w.message) for w in said)
    assert text.startswith("w/down: dim `mlp` of size 12 does not divide over model=8")
    assert "so it and 1 more argument have no shards" in text
    assert "mp.named at tests/test_layouts.py:" in text
    assert 'mesh="data=2, model=4"' in text
