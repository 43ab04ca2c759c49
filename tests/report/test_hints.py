"""Hints: all-to-alls in place of all-gathers in a mixture of experts, with the bytes that a plan of the edited program has."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import meshpar as mp
from meshpar._src.cost.device_computation import computation_of
from meshpar._src.report.document import shown_text
from meshpar._src.report.hints import (
    attention_hint,
    exchange_hints,
    float32_hint,
    fused_hints,
    hints,
    recomputation_hint,
    repeated_exchange_hint,
)
from meshpar._src.report.plan_terminal_text import plan_renderable
from meshpar._src.units import format_bytes, format_memory, format_seconds

GROUPS, TOKENS, EMBED, MLP, EXPERTS, CAPACITY = 8, 64, 32, 64, 4, 16
LAYOUT = "expert: expert; batch: data+expert"
DIMS = {"up": "expert embed mlp", "down": "expert mlp embed", "x": "batch seq embed", "mask": "batch seq expert _"}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


UP, DOWN = f32(EXPERTS, EMBED, MLP), f32(EXPERTS, MLP, EMBED)
ARGS = UP, DOWN, f32(GROUPS, TOKENS, EMBED), f32(GROUPS, TOKENS, EXPERTS, CAPACITY)


def gathered(up, down, x, mask):
    tokens = jnp.einsum("gtec,gtd->egcd", mask, x)
    out = jnp.einsum("egcf,efd->egcd", jax.nn.relu(jnp.einsum("egcd,edf->egcf", tokens, up)), down)
    return jnp.einsum("gtec,egcd->gtd", mask, out)


def exchanged(up, down, x, mask):
    tokens = mp.rename(jnp.einsum("gtec,gtd->egcd", mask, x), choice="expert")
    out = jnp.einsum("egcf,efd->egcd", jax.nn.relu(jnp.einsum("egcd,edf->egcf", tokens, up)), down)
    return jnp.einsum("gtec,egcd->gtd", mask, mp.rename(out, expert="choice"))


def planned(fn, layout=LAYOUT, **dims):
    return mp.plan(fn, *ARGS, mesh="data=2, expert=4", layout=layout, dims=DIMS | dims)


def test_the_all_to_all_of_a_hint_is_that_of_the_renamed_program():
    plan, edited = planned(gathered), planned(exchanged, mask="batch seq choice _")
    (hint, *_) = exchange_hints(plan)
    assert (hint.axis, hint.gathered, hint.owner) == ("expert", "batch", "expert")
    gathers = [c for c in plan.collectives if c.op == "all-gather" and c.origin is hint.op]
    assert hint.sent == sum(c.total_bytes for c in gathers) > 0
    exchanges = [c for c in edited.collectives if c.op == "all-to-all"]
    assert hint.exchanged in [c.bytes for c in exchanges]
    assert not [c for c in edited.collectives if c.op == "all-gather"]
    assert edited.bytes_sent < plan.bytes_sent
    assert exchange_hints(edited) == []
    text = " ".join(str(plan).split())
    assert f"hint {format_bytes(hint.sent - hint.exchanged)} less to send: the matmul at " in text
    assert "since `expert` has `expert`" in text
    assert "\nhint" not in str(edited)


def deep(batch, wrap=lambda layer: layer, microbatches=1):
    """The plan of a train step of 32 layers on v5e, which has 15.75 GiB; each saves one or two activations of the batch."""

    def loss(ws, x):
        layer = wrap(lambda x, w: jnp.tanh(jnp.sin(x @ w) * x))
        for w in ws:
            x = layer(x, w)
        return (x**2).mean()

    def step(ws, x):
        gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), microbatches) if microbatches > 1 else None
        return (gradients or jax.value_and_grad(loss))(ws, x)

    where = {"mesh": "data=4", "topology": "v5e:2x2", "layout": "batch: data"}
    return mp.plan(step, [f32(1024, 1024)] * 32, f32(batch, 1024), dims={"x": "batch _"}, **where)


def test_activations_that_do_not_fit_get_a_hint_that_makes_the_plan_fit():
    capacity = 15.75 * 2**30
    plan = deep(2**20)
    assert plan.memory.peak > capacity
    (hint,) = hints(plan)
    assert hint in " ".join(str(plan).split()).replace("hint ", "")
    assert "jax.checkpoint" in hint
    count = int(hint.partition("mp.train.accumulate_gradients(…, ")[2].partition(")")[0])
    assert deep(2**20, microbatches=count).memory.peak <= capacity
    assert deep(2**20, jax.checkpoint).memory.peak < plan.memory.peak


def scanned(layout, mesh, wrap=jax.checkpoint, sizes=(32, 1024, 2**19)):
    """The plan of a train step of scanned layers on v5e; ``sizes``: layers, width, rows of the batch."""
    layers, width, rows = sizes

    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def step(params, x):
        def loss(params):
            return (jax.lax.scan(wrap(layer), x, params)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    weights = {"up": f32(layers, width, 4 * width), "down": f32(layers, 4 * width, width)}
    where = {"mesh": mesh, "topology": "v5e:2x4", "layout": layout, "donate_argnames": "params"}
    return mp.plan(step, weights, f32(rows, width), **where)


def test_an_axis_that_no_rule_uses_is_the_first_hint():
    """Each of its rules exists, and has the memory of the plan with this rule."""
    plan = scanned("batch, embed: dp", "dp=4, tp=2")
    idle, activations = hints(plan)
    found = re.findall(r"`([^`]*: [^`]*)`, with a peak of ([\d.]+ \w+)", idle)
    assert [rule for rule, _ in found] == ["batch: dp+tp", "mlp: tp"]
    for rule, memory in found:
        others = "embed: dp" if "batch" in rule else "batch, embed: dp"
        assert format_memory(plan.replan(layout=f"{rule}; {others}").memory.peak) == memory
    assert "no rule uses `tp`, so that its 2 devices do the same work" in idle
    assert str(plan).split("\n")[1].startswith("fix  9.75 GiB less: no rule uses `tp`")
    assert "jax.checkpoint" not in activations  # the largest saved array stacks the inputs of the layers
    assert "mp.train.accumulate_gradients" in activations
    assert not any("no rule uses" in hint for hint in hints(scanned("batch: dp+tp", "dp=4, tp=2")))
    assert "jax.checkpoint" in hints(scanned("batch, embed: dp", "dp=4, tp=2", wrap=lambda layer: layer))[0]


def test_plans_that_fit_and_large_weights_get_no_such_hint():
    assert hints(deep(2**12)) == []
    where = {"mesh": "data=4", "topology": "v5e:2x2", "layout": "batch: data"}
    large = mp.plan(lambda w, x: x @ w, f32(2**17, 2**17), f32(64, 2**17), dims={"x": "batch _"}, **where)
    assert large.memory.peak > 15.75 * 2**30
    assert hints(large) == []  # a rule for weights without names, which are no argument that is updated


def train(state, x):
    """A step of Adam over one weight."""
    gradients = jax.grad(lambda p: jnp.square(x @ p["w"]).mean())(state["params"])
    updates, opt = optax.adam(1e-3).update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, x.mean()


def trained(layout="batch: data", width=2**17, batch=64, **options):
    params = {"w": f32(2**13, width)}
    state = {"params": params, "opt": jax.eval_shape(optax.adam(1e-3).init, params)}
    where = {"mesh": "data=4", "topology": "v5e:2x2", "dims": {"state/params/w": "embed mlp", "x": "batch embed"}}
    return mp.plan(train, state, f32(batch, 2**13), layout=layout, **where, **options)


def test_state_that_is_not_donated_gets_a_hint_with_what_donation_saves():
    """The bytes are those of the plan with donation; a state without updates, or that is donated, gets none."""
    plan, donated = trained(width=2**12), trained(width=2**12, donate_argnames="state")
    (hint,) = hints(plan)
    saved = format_memory(plan.memory.peak - donated.memory.peak)
    assert hint.startswith(
        f"{saved} of the peak of {format_memory(plan.memory.peak)}: `state` is returned updated but not"
    )
    assert hint.endswith('donate_argnames="state" (--donate state)')
    assert f"hint {hint}" in " ".join(str(plan).split())
    assert donated.memory.peak < 0.75 * plan.memory.peak
    assert hints(donated) == []
    sharded, sizes = "batch: data; embed: data", {"width": 64, "batch": 2**14}
    wide = trained(sharded, **sizes)  # most of the peak are the inputs
    (hint,) = hints(wide)
    state = sum(h.bytes for h in wide.inputs if h.path.startswith("state"))
    assert trained(sharded, **sizes, donate_argnames="state").memory.peak > 0.99 * wide.memory.peak
    assert hint.startswith(f"{format_memory(state)} at the end of the step, ")
    where = {"mesh": "data=4", "layout": "batch: data", "dims": {"x": "batch _"}}
    assert hints(mp.plan(lambda w, x: (w, x @ w), f32(64, 64), f32(8, 64), **where)) == []


def test_a_plan_that_does_not_fit_has_its_remedies():
    """Each hint is an edit, and its bytes are those of the plan with the edit."""
    plan = trained()
    assert str(plan).startswith("DOES NOT FIT")
    rule, donation = hints(plan)  # the one that saves more is the first
    assert "is returned updated but not donated" in donation
    text = re.search(r"(.*) less of arguments: add a rule `(embed|mlp): data` at the end of the layout", rule)
    edited = trained(f"batch: data; {text[2]}: data", donate_argnames="state")
    assert text[1] == format_memory(plan.argument_bytes() - edited.argument_bytes())
    assert edited.memory.peak < 15.75 * 2**30 < plan.memory.peak


def test_a_state_that_exceeds_all_devices_names_those_that_hold_it():
    """Parameters, gradients and two moments in float32 take 16 × 2¹³ × width bytes; 85 % of the 15.75 GiB of a v5e may be used."""
    plan = trained(width=2**21, donate_argnames="state")
    (hint,) = hints(plan)
    assert "256.00 GiB, and v5e:2x2 has 63.00 GiB" in hint
    chips = next(4 * 2**k for k in range(9) if 4 * 2**k * 0.85 * 15.75 >= 256)
    assert hint.endswith(f"They fit on {chips} devices: v5e:4x8")
    assert hints(trained(width=2**18, donate_argnames="state"))[0].startswith("18.00 GiB less of arguments: ")


def attend(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def head(q, k, v):
    """A softmax whose input no batched matmul makes."""
    return jax.nn.softmax(q.reshape(-1, 64) @ k.reshape(64, -1)) + v.sum()


@pytest.mark.parametrize(("fn", "stored"), [(attend, True), (lambda *x: mp.layers.attention(*x), False), (head, False)])
def test_stored_attention_scores_have_a_hint(fn, stored):
    q = jax.ShapeDtypeStruct((8, 512, 4, 64), jnp.bfloat16)
    where = {"mesh": "data=4", "topology": "v5e:2x2", "dims": {"*": "batch seq heads head_dim"}}
    gradient = jax.grad(lambda *x: fn(*x).astype(jnp.float32).sum(), (0, 1, 2))
    plan = mp.plan(gradient, q, q, q, layout="batch: data", **where)
    hint = attention_hint(plan)
    assert (hint is not None) == stored
    if stored:
        writes = [b for k in computation_of(plan).kernels for b in k.writes]
        shard = max(b.bytes for b in writes if b.value.elements == 8 * 4 * 512**2)
        assert 0 < hint.seconds <= plan.seconds
        gain = f"up to {format_seconds(hint.seconds)}: "
        assert (
            f"{gain}attention scores of {format_memory(shard)} are stored at tests/report/test_hints.py:" in hint.text
        )
        assert "computes them in chunks and stores none" in hint.text
        assert f"hint {gain}" in " ".join(str(plan).split())


def test_recomputed_matmuls_have_a_hint_where_their_results_fit():
    """A policy that saves their results adds the bytes of the hint, and saves at most its seconds."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    wraps = jax.checkpoint, lambda layer: jax.checkpoint(layer, policy=policy)
    plan, saving = (scanned("batch: dp", "dp=8", wrap, (8, 4096, 2**15)) for wrap in wraps)
    hint = recomputation_hint(plan)
    assert hints(plan)[0] == hint.text
    assert 0 < plan.seconds - saving.seconds <= hint.seconds
    assert f"{format_memory(plan.chip.hbm - plan.memory.peak)} are free" in hint.text
    assert f"{format_memory(saving.memory.peak - plan.memory.peak)}; a larger batch" in hint.text
    assert recomputation_hint(saving) is None
    assert "hint  up to" in shown_text(plan_renderable(plan, brief=True))
    full = scanned("batch: dp", "dp=8", sizes=(8, 4096, 2**16))
    assert full.memory.peak < full.chip.hbm
    assert recomputation_hint(full) is None
    narrow, copied = (scanned("batch, embed: dp", "dp=8", each, (32, 1024, 2**15)) for each in wraps)
    assert copied.seconds > narrow.seconds
    assert recomputation_hint(narrow) is None


def test_repeated_exchanges_have_a_hint_where_the_named_values_fit():
    """The policy of the hint saves at least its seconds, and needs at most its bytes."""

    def planned(wrap, groups=64):
        def step(w, x, mask):
            def layer(x, w):
                return exchanged(w["up"], w["down"], x, mask), None

            return jax.grad(lambda w: jnp.mean(jax.lax.scan(wrap(layer), x, w)[0] ** 2))(w)

        w = {"up": f32(4, EXPERTS, 512, 512), "down": f32(4, EXPERTS, 512, 512)}
        dims = {"w/up": "layers expert embed mlp", "w/down": "layers expert mlp embed"}
        dims |= {"x": DIMS["x"], "mask": "batch seq choice _"}
        how = {"mesh": "data=2, expert=4", "topology": "v5e:2x4", "layout": LAYOUT, "dims": dims}
        return mp.plan(step, w, f32(groups, TOKENS, 512), f32(groups, TOKENS, EXPERTS, CAPACITY), **how)

    policy = mp.train.checkpoint_policies.collectives_saveable
    plan, saving = (planned(wrap) for wrap in (jax.checkpoint, lambda layer: jax.checkpoint(layer, policy=policy)))
    hint = repeated_exchange_hint(plan)
    assert hint.text in hints(plan)
    assert 0 < hint.seconds <= plan.seconds - saving.seconds
    (size,) = re.findall(r"at most ([\d.]+ \wiB)", hint.text)
    assert saving.memory.peak - plan.memory.peak < float(size.split()[0]) * 2 ** {"MiB": 20, "GiB": 30}[size.split()[1]]
    assert repeated_exchange_hint(saving) is None
    assert repeated_exchange_hint(planned(jax.checkpoint, 2**18)) is None  # they do not fit


@pytest.mark.parametrize("by_head", [False, True])
def test_a_fused_weight_that_is_cut_has_a_hint_whose_edit_sends_less(by_head):
    def attend(params, x):
        heads = (8, 3, 16) if by_head else (3, 8, 16)
        y = x @ params["layer_0"]["qkv"]
        parts = jnp.split(y, 3, -1)
        if by_head:
            y = mp.named(y.reshape(*y.shape[:-1], *heads), "batch seq heads _ head_dim")
            parts = [y[..., i, :] for i in range(3)]
        q, k, v = (z.reshape(8, 32, 8, 16) for z in parts)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        return out.reshape(8, 32, 128) @ params["layer_0"]["out"]

    params = {"layer_0": {"qkv": f32(64, 384), "out": f32(128, 64)}}
    dims = {"*/qkv": "embed _" if by_head else "embed heads", "*/out": "heads embed", "x": "batch seq embed"}
    plan = mp.plan(
        attend, params, f32(8, 32, 64), mesh="data=2, model=4", layout="batch: data; heads: model", dims=dims
    )
    exchanged = sum(c.total_bytes for c in plan.collectives if c.op == "all-to-all")
    assert (exchanged > 0) is not by_head
    assert [hint.text.split("`")[1] for hint in fused_hints(plan)] == ["params/layer_*/qkv"] * (not by_head)
    assert all(hint.text.startswith(f"{format_bytes(exchanged)} of all-to-alls: ") for hint in fused_hints(plan))


def test_a_fused_weight_whose_dim_has_no_name_has_a_hint_whose_edit_shards_it():
    def planned(own_dim):
        def step(params, x):
            y = x @ params["w13"].reshape(2048, -1)
            gate, up = y.reshape(*x.shape[:-1], 2, -1).swapaxes(0, -2) if own_dim else jnp.split(y, 2, -1)
            return (jax.nn.silu(gate) * up) @ params["w2"]

        params = {"w13": f32(2048, 2, 8192) if own_dim else f32(2048, 16384), "w2": f32(8192, 2048)}
        dims = {"*/w13": "embed _ mlp" if own_dim else "embed _", "*/w2": "mlp embed" if own_dim else "_ embed"}
        how = {"mesh": "data=2, model=4", "topology": "v5e:2x4", "layout": "batch: data; mlp?: model"}
        return mp.plan(step, params, f32(4096, 2048), dims={**dims, "x": "batch embed"}, **how)

    plan, edited = planned(False), planned(True)
    (hint,) = fused_hints(plan)
    assert hint.text in hints(plan)
    assert "`params/w13` has 2 arrays in a dim of 16,384, which split cuts at " in hint.text
    assert "as in [embed, 2, mlp]" in hint.text
    assert fused_hints(edited) == []
    assert (
        0 < hint.seconds < plan.seconds - edited.seconds
    )  # the third matmul, which is sharded as well, is not counted


@pytest.mark.parametrize(
    ("chip", "dtype", "slow"),
    [("h100:8", "float32", True), ("h100:8", "bfloat16", False), ("v5e:2x4", "float32", False)],
)
def test_matmuls_in_float32_have_a_hint_where_bfloat16_is_faster(chip, dtype, slow):
    """Of a step bound by matmuls, half of their time, and half of the traffic besides."""
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((2**16, 4096), (4096, 4096)))
    plan = mp.plan(
        lambda x, w: x @ w, x, w, mesh="data=8", topology=chip, layout="batch: data", dims={"x": "batch embed"}
    )
    hint = float32_hint(plan)
    assert (hint is not None) is slow
    if hint is not None:
        assert hint.seconds == pytest.approx(plan.time.compute / 2)
        assert f"up to {format_seconds(hint.seconds)}: matmuls are in float32" in " ".join(str(plan).split())
