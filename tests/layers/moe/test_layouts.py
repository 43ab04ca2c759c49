"""No layout changes a number: outputs, losses, loads, drops and gradients of every router, under both lowerings."""

import functools

import covering
import jax
import jax.numpy as jnp
import moe_oracle as oracle
import numpy as np
import pytest
from arrays import bf16
from interpreters import race_detection

import meshpar as mp
import meshpar_kernels
from meshpar._src.layers.moe import ROUTERS, MoEExecution, moe
from meshpar._src.layers.moe.exchange_choice import Exchange, choose_exchange
from meshpar._src.layers.moe.experts import _works, run_experts
from meshpar._src.program.kernels import ShardCounts
from meshpar.errors import MeshparError

B, S, H, E, M = 8, 4, 8, 8, 16
R = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (scale * R.normal(size=shape) / np.sqrt(shape[-2])).astype("f")


X = R.normal(size=(B, S, H)).astype("f")
MASK = R.random((B, S)) > 0.15
IDS = R.integers(0, 40, (B, S)).astype(np.int32)
P = {
    "kernel": normal(H, E, scale=3.0),
    "noise": normal(H, E),
    "outer": normal(H, 2, scale=3.0),
    "inner": normal(2, H, 4, scale=3.0).swapaxes(0, 1),
    "gate": normal(E, H, M),
    "up": normal(E, H, M),
    "down": normal(E, M, H),
}
DIMS = {
    "p/kernel": "embed router",
    "p/noise": "embed router",
    "p/outer": "embed _",
    "p/inner": "embed _ _",
    "p/gate": "expert embed mlp",
    "p/up": "expert embed mlp",
    "p/down": "expert mlp embed",
    "x": "batch seq embed",
    "mask": "batch seq",
    "ids": "batch seq",
}
ONE = {n: P[n] for n in ("kernel", "gate", "up", "down")}
"""The parameters of one layer, and the dims of its arguments."""
ONE_DIMS = {k: v for k, v in DIMS.items() if k == "x" or k[2:] in ONE}
LAYOUTS = {
    "expert by tensor, FSDP": ("data=4, model=2", "batch: data; expert: data; mlp: model; embed: data"),
    "sequence split, expert on both": ("data=2, model=2", "batch: data; seq: model; expert: data+model"),
}


# -- every router in one program, on the experts they share


def routed(p, x, mask, ids, key):
    """The routings of all routers on the same tokens."""
    logits = {
        n: jnp.einsum("bsh,h...->bs...", x, p[n], precision="highest") for n in ("kernel", "noise", "outer", "inner")
    }
    one = functools.partial(dict, mask=mask)
    every, bias = logits["kernel"], 0.1 * jnp.cos(jnp.arange(8.0))
    return {
        "noisy_top_k": ROUTERS["noisy_top_k"](every, **one(k=2, noise=logits["noise"], key=key, capacity=1.0)),
        "gshard": ROUTERS["gshard"](every, **one(capacity=0.8, groups=2)),
        "switch": ROUTERS["switch"](every, **one(capacity=1.0, groups=4)),
        "switch_max": ROUTERS["switch_max"](every, **one(capacity=1.0, groups=2)),
        "ntlb": ROUTERS["ntlb"](every, **one(capacity=0.8, groups=4, stages=3)),
        "expert_choice": ROUTERS["expert_choice"](every, **one(capacity=1.5)),
        "deepseek_v3": ROUTERS["deepseek_v3"](every, **one(k=3, bias=bias, expert_groups=4, top_groups=2)),
        "hash": ROUTERS["hash"](ids, **one(experts=E, k=2, capacity=1.0)),
        "two_level": ROUTERS["two_level"](logits["outer"], logits["inner"], **one(k=2, capacity=1.0)),
        # all tokens to two experts: five times what a buffer holds, and six experts without a token
        "single": ROUTERS["top_k"](every - 1e3 * (jnp.arange(E) > 1), **one(k=2)),
    }


def step(p, x, mask, ids, key):
    def loss(p, x):
        routings = routed(p, x, mask, ids, key)
        wide = [(0, 0)] * 2
        expert = jnp.stack(
            [jnp.pad(r.expert, [*wide, (0, E - r.expert.shape[-1])], constant_values=E) for r in routings.values()]
        )
        weight = jnp.stack([jnp.pad(r.weight, [*wide, (0, E - r.weight.shape[-1])]) for r in routings.values()])
        xs = jnp.broadcast_to(x, (len(routings), *x.shape))
        how = {"activation": "silu", "rate": 1.5, "most_per_expert": None, "slack": 1.0, "strategy": None}
        y = run_experts(xs, expert, weight, [p["gate"], p["up"], p["down"]], **how)
        losses = {n: r.losses for n, r in routings.items()}
        total = (y * jnp.sin(jnp.arange(y.size).reshape(y.shape))).sum() / 30 + sum(jax.tree.leaves(losses))
        return total, (y, losses, {n: (r.load, r.dropped) for n, r in routings.items()})

    (_, results), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)
    return *results, grads


@pytest.fixture(scope="module")
def unsharded():
    """The results without a layout: every router serves real tokens, padding gets nothing, and most routers drop tokens."""
    y, losses, counts, grads = jax.jit(step)(P, X, MASK, IDS, jax.random.key(3))
    for i, name in enumerate(counts):
        assert (np.asarray(y[i])[~MASK] == 0).all(), name
        assert abs(np.asarray(y[i])[MASK]).max() > 0.1, name
    whole = {n for n, (_, dropped) in counts.items() if not int(dropped)}
    assert {"deepseek_v3", "single"} <= whole <= {"deepseek_v3", "single", "expert_choice"}
    assert (np.asarray(counts["single"][0]) == [MASK.sum()] * 2 + [0] * 6).all()
    return y, losses, counts, grads


@pytest.mark.parametrize(("name", "lowering"), covering.each(LAYOUTS, ["shard_map", "jit"]))
def test_every_router_under_every_layout(unsharded, name, lowering):
    mesh, layout = LAYOUTS[name]
    run = mp.jit(step, mesh=mp.mesh(mesh), layout=layout, dims=DIMS, lowering=lowering)
    same(run(P, X, MASK, IDS, jax.random.key(3)), unsharded)


def same(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        where = jax.tree_util.keystr(path)
        if a.dtype.kind == "i":
            np.testing.assert_array_equal(a, b, err_msg=where)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(abs(b).max(), 1e-6), err_msg=where)


# -- the layer


def layer(p, x, *, router="top_k", **options):
    experts = {n: p[n] for n in ("gate", "up", "down")}
    return moe(x, p["kernel"], experts, router=router, k=2, execution=MoEExecution(**options))


def one_layer(p, x, **options):
    def loss(p, x):
        y, aux = layer(p, x, **options)
        return (y * y).sum() + aux.losses["balance"], (y, aux)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)


@pytest.fixture(scope="module")
def one_layer_unsharded():
    return jax.jit(functools.partial(one_layer, slack=1.0))(ONE, X)


@pytest.mark.parametrize(
    ("strategy", "overlap", "lowering", "layout", "first"),
    [
        ("a2a", 2, "shard_map", "batch: data; expert: model+data", "all-to-all"),
        ("ring", 2, "jit", "batch: data; expert: model+data", "all-gather"),
        ("dense", 1, "jit", "batch: data; expert: data; mlp: model", "all-gather"),
    ],
)
def test_strategies(one_layer_unsharded, mesh, strategy, overlap, lowering, layout, first):
    run = functools.partial(one_layer, strategy=strategy, overlap=overlap, slack=1.0)
    sharded = mp.jit(run, mesh=mesh, layout=layout, dims=ONE_DIMS, lowering=lowering)
    same(sharded(ONE, X), one_layer_unsharded)
    sent = [c.op for c in sharded.plan(ONE, X).collectives if c.tensor.startswith("moe_experts: ") and c.bytes > 300]
    assert first in sent


@pytest.mark.parametrize(("strategy", "overlap"), [("a2a", 1), ("ring", 2)])
def test_codes_of_8_bits_are_rounded_as_the_recipe_says(mesh, strategy, overlap):
    """Tokens, results and the cotangents of both; the plan sends what the program does."""
    c = R.normal(size=X.shape).astype("f")

    def step(p, x, c):
        def loss(p, x):
            y, _ = layer(p, x, strategy=strategy, exchange="float8", overlap=overlap, slack=1.0)
            return (y * c).sum(), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)
        return y, grads

    how = {"mesh": mesh, "layout": "batch: data; expert: data", "dims": {**ONE_DIMS, "c": "batch seq embed"}}
    y, (dp, dx) = mp.jit(step, **how, lowering="shard_map")(ONE, X, c)
    want = recipe(X.reshape(-1, H).astype(float), c.reshape(-1, H).astype(float), strategy)
    for a, b in zip((y, dx, dp["up"], dp["down"]), want, strict=True):
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, rtol=0, atol=2e-5 * abs(b).max())
    assert mp.prove(step, ONE, X, c, **how, lowering="shard_map").proven


def rounded(x):
    """x as float8_e4m3fn with a scale for each row, as it is read."""
    scale = abs(x).max(-1, keepdims=True) / 448
    return np.where(scale > 0, (x / np.where(scale > 0, scale, 1)).astype(jnp.float8_e4m3fn).astype(float) * scale, 0)


def recipe(x, c, strategy):
    """(y, gradients of sum(y * c) for x but not by the router, up and down) on 4 devices with two experts each, in float64."""
    wide = {n: w.astype(float) for n, w in ONE.items()}
    logits = x @ wide["kernel"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y, dx, dup, ddown = np.zeros_like(x), np.zeros_like(x), np.zeros_like(wide["up"]), np.zeros_like(wide["down"])
    to_router = np.zeros_like(logits)
    seen, cotangent = rounded(x), rounded(c)
    for t in range(len(x)):
        chosen = np.argsort(-logits[t], kind="stable")[:2]
        weight = probabilities[t, chosen] / probabilities[t, chosen].sum()
        sums: dict[int, list[np.ndarray]] = {}
        for j, e in enumerate(chosen):
            a, b = seen[t] @ wide["gate"][e], seen[t] @ wide["up"][e]
            s = 1 / (1 + np.exp(-a))
            h = a * s * b
            row = weight[j] * (h @ wide["down"][e])
            ddown[e] += weight[j] * np.outer(h, cotangent[t])
            dh = weight[j] * (wide["down"][e] @ cotangent[t])
            db, da = dh * a * s, dh * b * (s + a * s * (1 - s))
            dup[e] += np.outer(seen[t], db)
            back = wide["gate"][e] @ da + wide["up"][e] @ db
            sums.setdefault(e // 2 if strategy == "ring" else j, []).append(np.stack([row, back]))
            to_router[t, e] = cotangent[t] @ (h @ wide["down"][e])
        to_router[t, chosen] = weight * (to_router[t, chosen] - weight @ to_router[t, chosen])
        for parts in sums.values():
            both = rounded(np.sum(parts, 0))
            y[t], dx[t] = y[t] + both[0], dx[t] + both[1]
    return y, dx + to_router @ wide["kernel"].T, dup, ddown


def test_the_layer_is_the_oracles():
    shared = {"gate": normal(H, M), "up": normal(H, M), "down": normal(M, H)}
    weights = {n: P[n] for n in ("gate", "up", "down")}
    y, aux = jax.jit(
        lambda x, mask: moe(x, P["kernel"], weights, router="top_k", k=2, capacity=1.0, mask=mask, shared=shared)
    )(X, MASK)
    flat = X.reshape(-1, H).astype(float)
    want = oracle.top_k(flat @ P["kernel"].astype(float), MASK.reshape(-1), k=2, capacity=1.0)
    wide = {n: w.astype(float) for n, w in weights.items()}
    expected = oracle.experts(flat, want.weight, **wide)
    a = flat @ shared["gate"]
    expected += (a / (1 + np.exp(-a)) * (flat @ shared["up"])) @ shared["down"]
    np.testing.assert_allclose(np.asarray(y).reshape(-1, H), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(aux.load, want.load)
    assert int(aux.dropped) == want.dropped > 0


def test_two_dims_of_experts_are_one_in_order():
    wide = {n: P[n] for n in ("gate", "up", "down")}
    two = {n: w.reshape(2, 4, *w.shape[1:]) for n, w in wide.items()}
    weights = {"outer": P["outer"], "inner": P["inner"]}

    def run(experts, weights, x):
        return moe(x, weights, experts, router="two_level", k=2, execution=MoEExecution(slack=1.0))

    want = jax.jit(run)(wide, weights, X)
    dims = {
        "experts/down": "outer_expert inner_expert mlp embed",
        "experts/*": "outer_expert inner_expert embed mlp",
        "weights/outer": "embed _",
        "weights/inner": "embed _ _",
        "x": "batch seq embed",
    }
    layout = "batch: data; inner_expert: data; outer_expert: model"
    sharded = mp.jit(run, mesh=mp.mesh("data=2, model=2"), layout=layout, dims=dims, lowering="shard_map")
    same(sharded(two, weights, X), want)


def test_the_plan_knows_what_is_sent(mesh):
    def run(p, x):
        return layer(p, x, strategy="a2a", slack=1.0)[0]

    plan = mp.plan(run, ONE, X, mesh=mesh, layout="batch: data; expert: data", dims=ONE_DIMS)
    exchanges = [c for c in plan.collectives if c.op == "all-to-all"]
    rows = 4 * 8  # a device's 8 tokens make 16 choices: 4 for each of 4 devices, rounded up to 8
    tokens = rows * H * 4 * 3 / 4
    # a number for every expert, and of every row its expert
    assert [c.bytes for c in exchanges] == [tokens, E * 4 * 3 / 4, rows * 4 * 3 / 4, tokens]
    in_parts = mp.plan(functools.partial(layer, strategy="a2a", overlap=2, exchange="float8"), ONE, X, mesh="data=4, model=2",
                       layout="batch: data; expert: data", dims=ONE_DIMS, topology="v5e:2x4")  # fmt: skip
    codes = [c for c in in_parts.collectives if c.dtype == "int8"]
    # of each part the exchange and the return; those that have experts to compute meanwhile are hidden
    assert [(c.bytes, c.hidden > 0) for c in codes] == [(tokens / 4, i) for i in (False, False, True, True)]
    cause = "tokens to the devices of their experts; a load that fills a buffer of 8 rows takes another round, 2 at"
    assert cause in exchanges[0].cause
    assert not any("expert" in c.dims.split() and c.op == "all-gather" for c in plan.collectives)


def test_the_plan_chooses_the_number_of_parts():
    """With the experts of DeepSeek-V3 on 64 chips: as many parts as their matmuls can hide, more where links are fast."""
    inward, outward = bf16(256, 7168, 2048), bf16(256, 2048, 7168)
    p = {"kernel": bf16(7168, 256), "gate": inward, "up": inward, "down": outward}
    x = bf16(64, 3800, 7168)
    how = {"mesh": "data=64", "layout": "batch: data; expert: data", "dims": ONE_DIMS, "lowering": "shard_map"}
    parts, exposed = {}, {}
    for chip, overlap in (("v5p:4x4x4", 1), ("v5p:4x4x4", "auto"), ("v6e:8x8", "auto")):
        loss = functools.partial(squares, strategy="a2a", overlap=overlap)
        plan = mp.plan(jax.value_and_grad(loss, (0, 1)), p, x, topology=chip, **how)
        sent = [c for c in plan.collectives if c.dtype == "bfloat16" and c.op == "all-to-all"]
        parts[chip, overlap] = len(sent) // 5
        exposed[chip, overlap] = sum(c.seconds - c.hidden for c in sent)
    assert parts == {("v5p:4x4x4", 1): 1, ("v5p:4x4x4", "auto"): 4, ("v6e:8x8", "auto"): 2}
    assert exposed["v5p:4x4x4", "auto"] < 0.3 * exposed["v5p:4x4x4", 1]
    assert plan.prove().proven  # buffers of two parts have more rows than one, so that the program is that of two parts


def squares(p, x, **options):
    return (layer(p, x, **options)[0] ** 2).sum()


WIDE = {"kernel": normal(128, 4), "gate": normal(4, 128, M), "up": normal(4, 128, M), "down": normal(4, M, 128)}


def wide_layer(p, x, **options):
    return layer(p, x, strategy="a2a", **options)[0]


def test_a_kernels_exchange_is_planned_with_the_rows_in_use():
    """Of the 8 tokens of a device, with 2 choices each, 4 rows go to each of 4 devices, in buffers of 8."""
    x = np.zeros((8, 4, 128), "f")
    sent = {}
    for exchange in (None, "pallas"):
        run = functools.partial(wide_layer, exchange=exchange)
        plan = mp.plan(run, WIDE, x, mesh="data=4", layout="batch: data; expert: data", dims=ONE_DIMS)
        sent[exchange] = [c for c in plan.collectives if c.op == "all-to-all"]
    whole, used = ([c.bytes for c in sent[e]] for e in (None, "pallas"))
    assert whole == [8 * 4 * 128 * 4 * 3 / 4, 4 * 4 * 3 / 4, 8 * 4 * 4 * 3 / 4, 8 * 4 * 128 * 4 * 3 / 4]
    assert used[0] == used[3] == whole[0] / 2
    assert "only rows in use are sent" in sent["pallas"][0].cause


@pytest.mark.slow
def test_a_kernels_exchange_changes_no_number(monkeypatch):
    """In the TPU interpreter with race detection: there, back, and in the gradients. Everything but the exchange is XLA's."""
    for name in ("expert_dispatch", "expert_combine"):
        plain = functools.partial(getattr(meshpar_kernels, name), implementation="reference")
        monkeypatch.setattr(f"meshpar._src.layers.moe.experts.{name}", plain)
    x = R.normal(size=(4, 4, 128)).astype("f")

    def step(p, x, exchange):
        layer = functools.partial(wide_layer, exchange=exchange, implementation="xla")
        return jax.value_and_grad(lambda p, x: (layer(p, x) ** 2).sum(), (0, 1))(p, x)

    want = jax.jit(functools.partial(step, exchange=None))(WIDE, x)
    options = {"layout": "batch: data; expert: data", "dims": ONE_DIMS, "lowering": "shard_map"}
    run = mp.jit(functools.partial(step, exchange="pallas"), mesh=mp.mesh("data=2"), **options)
    with race_detection():
        got = jax.block_until_ready(run(WIDE, x))
    same(got, want)


@pytest.mark.parametrize("router", ["top_k", "deepseek_v3"])
def test_the_kernels_choice_is_the_routers(router, mesh, monkeypatch):
    """Choices, weights and their gradients, with tokens split, padding, NaN, and groups of experts; drops are counted as ever.

    `route` by its definition replaces its kernels.
    """
    monkeypatch.setattr("meshpar._src.layers.moe.routers.route", _route_by_definition)
    logits = (3 * R.normal(size=(B, S, E))).astype("f")
    logits[0, 1, 2], logits[1, 0, 3:] = np.nan, -np.inf
    options = {"k": 2, "mask": MASK, "capacity": 1.0}
    if router == "deepseek_v3":
        options |= {"bias": np.cos(np.arange(8.0)).astype("f"), "expert_groups": 4, "top_groups": 2, "scale": 2.5}

    def step(logits, implementation):
        def loss(logits):
            r = ROUTERS[router](logits, **options, implementation=implementation)
            return (r.weight * jnp.cos(jnp.arange(r.weight.size).reshape(r.weight.shape))).sum(), r

        return jax.grad(loss, has_aux=True)(logits)

    want = jax.jit(functools.partial(step, implementation=None))(logits)
    where = {"layout": "batch: data; seq: model", "dims": {"logits": "batch seq router"}, "lowering": "shard_map"}
    same(mp.jit(functools.partial(step, implementation="pallas"), mesh=mesh, **where)(logits), want)


def _route_by_definition(logits, k, implementation=None, **options):
    assert implementation == "pallas"
    return meshpar_kernels.route(logits, k, implementation="reference", **options)


@pytest.mark.slow
def test_all_kernels_together_change_no_number():
    """Route, gather, gated matmul, weighted matmul and sum: in the TPU interpreter with race detection, against XLA's."""
    x = R.normal(size=(2, 8, 128)).astype("f")
    wide = {"kernel": normal(128, 4), **{n: normal(4, 128, 128) for n in ("gate", "up", "down")}}
    want = jax.jit(one_layer)(wide, x)
    options = {"layout": "batch: data", "dims": ONE_DIMS, "lowering": "shard_map"}
    run = mp.jit(functools.partial(one_layer, implementation="pallas"), mesh=mp.mesh("data=2"), **options)
    with race_detection():
        got = jax.block_until_ready(run(wide, x))
    same(got, want)


def exchange_of(strategy=None, **changed):
    devices = {"token_axes": ["data"], "expert_axes": [["data"]], "sizes": {"data": 8, "model": 4}}
    sizes = {"tokens": 4096, "k": 2, "embed": 4096, "local_experts": 1, "weights": 3 * 4096 * 14336}
    load = {"rate": 2.0, "most_per_expert": None, "slack": 1.25}
    return choose_exchange(Exchange(**{**devices, **sizes, **load, **changed}, strategy=strategy))


def test_the_exchange_that_sends_least():
    assert exchange_of().strategy == "a2a"
    assert exchange_of().rows == 1280
    assert exchange_of().rounds == 4
    # nearly every token goes to every device anyhow
    assert exchange_of(k=8, rate=8.0, local_experts=8).strategy == "ring"
    assert exchange_of(weights=4096 * 64).strategy == "dense"
    assert exchange_of(token_axes=[], expert_axes=[["model"]]).strategy == "local"
    assert exchange_of(expert_axes=[["model", "data"]]).rest == ("model",)
    assert exchange_of(most_per_expert=1000).rounds == 1
    assert (exchange_of().rows_sent, exchange_of(exchange="pallas").rows_sent) == (1280, 1024)
    assert exchange_of(k=8, rate=8.0, local_experts=8, exchange="pallas").rows == 5120
    assert exchange_of(distinct=False).rounds == 7  # both choices of all tokens at one expert
    replicated = exchange_of(token_axes=["data"], expert_axes=[[]], local_experts=8)
    assert (replicated.rows, replicated.rounds) == (8192, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"strategy": "sparse"}, "strategy must be one of a2a, ring, dense"),
        ({"exchange": "xla"}, "exchange must be one of padded, float8, pallas, .* or None, got 'xla'"),
        ({"exchange": "float8", "embed": 200}, "a scale for each 128 elements of a token, which do not divide its 200"),
        ({"overlap": 3}, "overlap must be one of 1, 2, 4, got 3"),
        ({"slack": 0.5}, "slack=0.5 must be at least 1"),
        ({"strategy": "dense", "expert_axes": [["data", "model"]]}, "cannot all-gather experts"),
    ],
)
def test_exchanges_that_do_not_exist(changed, says):
    with pytest.raises(MeshparError, match=says):
        exchange_of(**changed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": {"up": P["up"]}}, "experts must be `up`, `down`"),
        ({"experts": {"up": P["up"].astype("int8"), "down": P["down"]}}, "experts are floating-point, got up int8"),
        ({"experts": {"up": P["up"], "down": P["up"]}}, r"up \[8, 8, 16\], down \[8, 8, 16\] do not fit"),
        ({"router": "swich"}, "did you mean `switch`"),
        ({"k": None}, r'(?s)router="top_k" needs k, the number of experts per token.*k=2'),
        ({"router": "two_level", "k": None}, 'router="two_level" needs k'),
        ({"capasity": 1.0}, "takes no capasity=.*(?s:.*)did you mean `capacity`"),
        ({"router": "switch", "k": 1, "bias": X}, 'router="switch" takes no bias=; it takes k=, capacity='),
        ({"activation": "swiglu"}, "no activation 'swiglu'"),
        ({"router_weights": None}, r"router='top_k' must be \[H, E\]; got None"),
        ({"router_weights": (P["kernel"], P["kernel"])}, r"must be \[H, E\]; got kernel tuple"),
        ({"router": "two_level"}, r"router='two_level' must be {\"outer\": \[H, O\], \"inner\": \[H, O, I\]}; got"),
        ({"router": "two_level", "router_weights": dict.fromkeys(("outer", "inner"), P["kernel"])}, "must be {"),
        ({"router": "hash"}, "router='hash' must be None, and ids="),
        ({"router": "hash", "router_weights": None}, "needs ids=, an integer array"),
        ({"router": "hash", "router_weights": None, "ids": jnp.zeros(3, int)}, r"an integer array .* got \[3\]"),
        ({"router": "hash", "router_weights": None, "ids": [1]}, "got list"),
        ({"router": "hash", "router_weights": None, "ids": jnp.zeros(X.shape[:-1])}, "ids must be integers"),
        ({"ids": jnp.zeros(X.shape[:-1], int)}, 'router="top_k" takes no ids='),
        ({"router_weights": P["kernel"][:, :4]}, "router_weights are for 4 experts, but `up` and `down` have 8"),
        ({"router_weights": {"gate": P["kernel"]}}, r"must be \[H, E\]; got gate"),
        ({"x": X[..., :4]}, "do not fit"),
    ],
)
def test_bad_arguments(change, says):
    given = {"x": X, "router_weights": P["kernel"], "experts": {n: P[n] for n in ("gate", "up", "down")}, "k": 2}
    with pytest.raises(MeshparError, match=says):
        moe(**{**given, **change})


def test_the_plan_counts_what_the_experts_hold_while_they_run():
    tokens, k = 64, 2
    shapes = [((tokens, H), "f"), ((tokens, k), "i"), ((tokens, k), "f"), *[((E, H, M), "f")] * 2, ((E, M, H), "f")]
    avals = [jax.ShapeDtypeStruct(*s) for s in shapes]
    how = {"token_dims": 1, "activation": "silu", "rate": k, "most_per_expert": None, "slack": 1.25, "strategy": None}
    axes, sizes = {"t0": ("data",), "e0": ("data",)}, {"data": 4}
    matrix = 4 * E * H * M

    alone = _works(avals, ShardCounts({}, sizes), **how)
    row, hidden = (4 * tokens * k * n for n in (H, M))
    assert alone.memory == row + 2 * hidden
    assert _works(avals, ShardCounts({}, sizes), **how, fused=True).memory == row + max(row, hidden)
    # the last matrix's gradient with all that was made; or the others' gradients, with that matrix gone
    assert alone.backward == max(4 * hidden + 2 * row - 2 * matrix, 2 * hidden + 3 * row - matrix)

    # 32 rows of a balanced load and a quarter more for each of 4 devices
    there = _works(avals, ShardCounts(axes, sizes), **how)
    row, hidden = (4 * 40 * 4 * n for n in (H, M))
    assert there.memory == row + 2 * hidden
    # further rounds add to float32 sums for the tokens and every matrix
    assert there.backward == 4 * tokens * H + 3 * matrix + 4 * row + 5 * hidden

    dense = _works(avals, ShardCounts(axes, sizes), **{**how, "strategy": "dense"})
    row, hidden = (4 * tokens * k * n for n in (H, M))
    assert dense.memory == 4 * 3 * matrix + row + 2 * hidden
