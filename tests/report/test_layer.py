"""The drawing of a layer: its parts, the dims of the arrays between them, and the collectives of the loop's body."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import lab_program
import pytest
from flax import linen as nn
from flax import nnx

import meshpar as mp
from meshpar._src.report.timeline import timeline

LAYOUT = "; ".join(lab_program.RULES)


@pytest.fixture
def page(opened):
    return opened()


@pytest.fixture
def nodes_of(page, tmp_path):
    """A function that returns the nodes of the drawing of a plan, as the script of its page has them."""

    def nodes(plan):
        plan.save(tmp_path / "plan.html")
        page.goto((tmp_path / "plan.html").as_uri())
        data = page.locator("[data-draw=drawLayer] script")
        return data.evaluate("(data) => layerNodes(JSON.parse(data.textContent))") if data.count() else []

    return nodes


def words(dims):
    """``batch:data embed``."""
    return " ".join(f"{name}:{axes}" if axes else name for name, _, axes in dims)


def test_attention_in_several_parts_has_the_names_of_its_matmuls(nodes_of):
    def layer(x, w):
        q, k, v = (z.reshape(8, 32, 8, 8) for z in jnp.split(x @ w["qkv"], 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(8, 32, 64) @ w["out"], None

    x, qkv, out = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((8, 32, 64), (3, 64, 192), (3, 64, 64)))
    dims = {"x": "batch seq embed", "*/qkv": "layers embed heads", "*/out": "layers heads embed"}
    plan = mp.plan(
        lambda x, weights: jax.lax.scan(layer, x, weights)[0], x, {"qkv": qkv, "out": out}, dims=dims, mesh="data=2, model=4",
        topology="v5e:2x4", layout="batch: data; heads: model",
    )  # fmt: skip
    names = [n["name"] for n in nodes_of(plan) if not n["gates"] or n["weights"]]
    assert names[1:] == ["qkv", "split", "queries × keys", "scores × values", "out", "add"]


def test_parts_of_plain_jax_have_the_keys_of_their_weights(nodes_of):
    names = [n["name"] for n in nodes_of(lab_program.planned(lab_program.MESH, "batch: data")) if n["part"]]
    assert names == ["w", "v"]


class NnxBlock(nnx.Module):
    """Attention of which keys and values share a weight, and a gated MLP, each with a norm before it and added to its input."""

    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.norm1, self.norm2 = nnx.RMSNorm(32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
        self.wq, self.wkv, self.wo = linear(32, 32), linear(32, 32), linear(32, 32, use_bias=True)
        self.w1, self.w3, self.w2 = linear(32, 64), linear(32, 64), linear(64, 32)

    def __call__(self, x):
        h = self.norm1(x)
        q, kv = self.wq(h).reshape(*x.shape[:2], 4, 8), self.wkv(h).reshape(*x.shape[:2], 4, 8)
        k, v = jnp.split(kv, 2, axis=2)
        angles = jnp.arange(x.shape[1])[:, None, None] * jnp.ones(8)
        o = jax.nn.dot_product_attention(q * jnp.cos(angles).astype(q.dtype), k, v, is_causal=True)
        x = x + self.wo(o.reshape(x.shape))
        h = self.norm2(x)
        return x + self.w2(nnx.silu(self.w1(h)) * self.w3(h))


class NnxModel(nnx.Module):
    """Rematerialized blocks between an embedding and a head, unrolled or in a scan."""

    def __init__(self, rngs, scan):
        self.tokens = nnx.Embed(128, 32, dtype=jnp.bfloat16, rngs=rngs)
        if scan:
            self.blocks = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(rngs.split(3))
        else:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])
        self.head = nnx.Linear(32, 128, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x, block = self.tokens(tokens), nnx.remat(lambda block, x: block(x))
        if isinstance(self.blocks, NnxBlock):
            return self.head(
                nnx.scan(lambda x, b: block(b, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
            )
        for b in self.blocks:
            x = block(b, x)
        return self.head(x)


@pytest.mark.parametrize("scan", [False, True])
def test_a_layer_of_nnx_modules_begins_and_ends_at_the_residual_stream(nodes_of, scan):
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), scan))

    def step(model, tokens):
        return nnx.grad(lambda model: jnp.mean(model(tokens) ** 2))(model)

    dims = {"*/w[q1]/kernel": "layers embed _" if scan else "embed _", "tokens": "batch seq"}
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    plan = mp.plan(step, model, tokens, dims=dims, mesh="data=4", topology="v5e:2x2", layout="batch: data; embed: data")
    nodes = nodes_of(plan)
    names = [n["name"] for n in nodes]
    assert [(n["name"], [names[k] for k, _ in n["sources"]]) for n in nodes[1:]] == [
        ("norm1", [""]),
        ("wq", ["norm1"]),
        ("wkv", ["norm1"]),
        ("attention", ["wq", "wkv"]),
        ("wo", ["attention"]),
        ("add", ["", "wo"]),
        ("norm2", ["add"]),
        ("w1", ["norm2"]),
        ("w3", ["norm2"]),
        ("mul", ["w1", "w3"]),
        ("w2", ["mul"]),
        ("add", ["add", "w2"]),
    ]
    assert nodes[-1]["sources"][0][0] == names.index("add")
    assert {words(dims) for n in nodes for k, dims in n["sources"] if k == 0} == {"batch:data seq embed"}
    gathered = {n["name"]: [g["text"] for w in n["weights"] for g in w["gates"]] for n in nodes if n["weights"]}
    once = {name: ["all-gather"] for name in names if name.startswith(("norm", "w"))}
    assert gathered == {**once, "wo": ["all-gather"] * 2}  # its kernel and its bias
    assert nodes[2]["about"].startswith("blocks/wq\n" if scan else "blocks/0/wq\n")
    assert all(n["time"] not in ("", "fused") for n in nodes if n["name"].startswith("w"))


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ("net", "the program has no loop over layers, and no modules with numbers in their paths"),
        ("net/layer0", "no module with a number in its path has one activation as its input and one of the same shape"),
    ],
)
def test_without_a_layer_of_one_input_and_output_the_page_says_why_none_is_drawn(nodes_of, page, scope, reason):
    def loss(w, x):
        with jax.named_scope(scope):
            x = x @ w["up"]
        return jnp.sum(x @ w["head"])  # the layer has an output of another shape

    w, x = {"up": jnp.ones((32, 64)), "head": jnp.ones((64, 16))}, jnp.ones((16, 32))
    assert nodes_of(mp.plan(jax.grad(loss), w, x, mesh="data=4", layout="batch: data", dims={"x": "batch embed"})) == []
    assert f"No layer is drawn: {reason}" in page.locator("#layer").inner_text()


@pytest.mark.parametrize("width", [1280, 380])
@pytest.mark.parametrize("layout", [LAYOUT, "batch: data; mlp: model", "batch: data", ""])
def test_the_collectives_of_a_drawing_are_those_of_the_loop(page, layout, width, tmp_path):
    plan = lab_program.planned(lab_program.MESH, layout)
    plan.save(tmp_path / "plan.html")
    page.set_viewport_size({"width": width, "height": 800})
    page.goto((tmp_path / "plan.html").as_uri())
    drawn = page.locator(".layer .gate").evaluate_all(
        "all => all.map(({ dataset: d }) => [d.op, d.axes, Number(d.bytes)])"
    )
    want = [[c.op, "+".join(c.axes), c.bytes] for c in plan.body.loops[0].body.sends]
    assert Counter(map(tuple, drawn)) == Counter(map(tuple, want))
    assert page.locator(".layer .part").count() == 2  # two matmuls; tanh is in the first one
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_collective_is_pale_where_kernels_wait_for_less_than_half_of_it(nodes_of):
    plan = lab_program.planned(lab_program.MESH, LAYOUT)
    nodes = nodes_of(plan)
    gates = [g for n in nodes for g in (*n["gates"], *(g for w in n["weights"] for g in w["gates"]))]
    step = timeline(plan)
    assert step is not None
    body = next(s.body for s in step.spans if s.body)
    shares = [((s.name, "+".join(s.axes), s.bytes), s.exposed / s.seconds) for s in body.spans if s.axes]
    drawn = Counter(((g["text"], g["axes"], g["bytes"]), g["hidden"], "of it exposed" in g["waits"]) for g in gates)
    assert drawn == Counter((collective, share < 0.5, share >= 0.01) for collective, share in shares)
    assert gates


class LinenBlock(nn.Module):
    """Attention of three projections in bfloat16, which cast the float32 result of a norm."""

    @nn.compact
    def __call__(self, x, _):
        init, h = nn.initializers.lecun_normal(), nn.RMSNorm()(x)
        kernel = nn.with_logical_partitioning(init, ("embed", "heads", "head_dim"))
        project = functools.partial(nn.DenseGeneral, (4, 8), use_bias=False, dtype=jnp.bfloat16, kernel_init=kernel)
        q, k, v = (project(name=name)(h) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        kernel = nn.with_logical_partitioning(init, ("heads", "head_dim", "embed"))
        out = nn.DenseGeneral(32, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16, kernel_init=kernel, name="o")
        return x + out(jnp.einsum("bhqk,bkhd->bqhd", weights, v)), None


def test_a_cast_that_several_parts_read_is_in_none_of_them(nodes_of):
    scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    model = nn.scan(nn.remat(LinenBlock), **scan, metadata_params={nn.PARTITION_NAME: "layers"})()
    x = jax.ShapeDtypeStruct((8, 16, 32), jnp.bfloat16)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, None), x)
    step = jax.grad(lambda params, x: jnp.mean(model.apply(params, x, None)[0].astype(jnp.float32)))
    layout, dims = "batch: data; heads: model", {"x": "batch seq embed"}
    nodes = nodes_of(mp.plan(step, params, x, dims=dims, mesh="data=2, model=4", topology="v5e:2x4", layout=layout))
    sources = {n["name"]: [nodes[k]["name"] for k, _ in n["sources"]] for n in nodes}
    assert [sources[name] for name in "qkv"] == [["RMSNorm_0"]] * 3
