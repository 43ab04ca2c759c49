"""Models of Mesh-TensorFlow, line by line with named arrays, under their published layouts."""

import jax
import jax.numpy as jnp
import numpy as np
from same_results import assert_same_under

import meshpar as mp
from meshpar import nd

KEYS = list(jax.random.split(jax.random.key(0), 40))


def plain(tree):
    """The tree with plain arrays in place of named ones."""
    return jax.tree.map(lambda x: x.array, tree, is_leaf=lambda x: isinstance(x, nd.Named))


def in_float64(fn, *args):
    """The results of a function, computed in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, args)
        return jax.tree.map(np.asarray, jax.jit(fn)(*wide))


def updated(loss_of, rate):
    """A step of gradient descent: (weights, *data) → (weights, loss)."""

    def step(w, *data):
        loss, gradients = jax.value_and_grad(loss_of)(w, *data)
        return jax.tree.map(lambda w, g: w - rate * g, w, gradients), loss

    return step


# -- the README's model of MNIST


def mnist_loss(w, images, labels):
    hidden = nd.relu(nd.einsum(images, w["w1"], out="batch hidden"))
    logits = nd.einsum(hidden, w["w2"], out="batch classes")
    return nd.mean(nd.cross_entropy(logits, nd.one_hot(labels, classes=10), "classes")).array


def mnist_step_in_float64(w1, w2, images, labels):
    """The new weights and the loss, with derivatives by hand."""
    w1, w2, images = (np.asarray(a, np.float64) for a in (w1, w2, images))
    x, flat = images.reshape(100, -1), w1.reshape(-1, 64)
    before = x @ flat
    hidden = np.maximum(before, 0)
    logits = hidden @ w2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    target = np.eye(10)[labels]
    d_logits = (p - target) / 100
    d_hidden = d_logits @ w2.T * (before > 0)
    new = {"w1": w1 - 0.001 * (x.T @ d_hidden).reshape(w1.shape), "w2": w2 - 0.001 * hidden.T @ d_logits}
    return new, -np.log((p * target).sum(1)).mean()


def test_the_readme_s_model_under_its_layouts():
    w = {
        "w1": nd.normal(KEYS[0], 0.03, rows=28, cols=28, hidden=64),
        "w2": nd.normal(KEYS[1], 0.03, hidden=64, classes=10),
    }
    images = nd.normal(KEYS[2], batch=100, rows=28, cols=28)
    labels = nd.named(jax.random.randint(KEYS[3], (100,), 0, 10), "batch")
    layouts = [
        ("all_processors:4", [("hidden", "all_processors")]),
        ("processor_rows:2;processor_cols:2", "batch:processor_rows;hidden:processor_cols"),
        ("processor_rows:2;processor_cols:2", "rows:processor_rows,cols:processor_cols"),
    ]
    expected = mnist_step_in_float64(*plain((w["w1"], w["w2"], images)), np.asarray(labels.array))
    assert_same_under(layouts, updated(mnist_loss, 0.001), w, images, labels, expected=expected)


# -- the Transformer layer

LENGTH, MODEL, HEADS, KV, FF = 16, 32, 4, 8, 64


def layer_weights():
    keys = iter(KEYS)
    q, k, v = ({"model": MODEL, "heads": HEADS, "d_kv": KV} for _ in range(3))
    return {
        "q": nd.normal(next(keys), (MODEL * KV) ** -0.5, **q),
        "k": nd.normal(next(keys), MODEL**-0.5, **k),
        "v": nd.normal(next(keys), MODEL**-0.5, **v),
        "o": nd.normal(next(keys), (HEADS * KV) ** -0.5, heads=HEADS, d_kv=KV, model=MODEL),
        "wi": nd.normal(next(keys), MODEL**-0.5, model=MODEL, d_ff=FF),
        "wi_bias": nd.normal(next(keys), 0.1, d_ff=FF),
        "wo": nd.normal(next(keys), FF**-0.5, d_ff=FF, model=MODEL),
        "scale": nd.full(1.0, sublayer=2, model=MODEL),
        "bias": nd.normal(next(keys), 0.1, sublayer=2, model=MODEL),
    }


def lm_layer(w, x):
    """Self-attention and a dense layer, each after a layer norm and with a residual connection."""

    def norm(x, i):
        return nd.layer_norm(x, "model", nd.index(w["scale"], sublayer=i), nd.index(w["bias"], sublayer=i))

    y = norm(x, 0)
    memory = nd.rename(y, length="memory_length")
    q, k, v = nd.dense(y, w["q"]), nd.dense(memory, w["k"]), nd.dense(memory, w["v"])
    mask = nd.arange(memory_length=LENGTH) <= nd.arange(length=LENGTH)
    x = x + nd.dense(nd.attention(q, k, v, key="d_kv", memory="memory_length", mask=mask, scale=1.0), w["o"])
    return x + nd.dense(nd.relu(nd.dense(norm(x, 1), w["wi"], w["wi_bias"])), w["wo"])


def test_the_transformer_layer_under_its_layout():
    w, x = layer_weights(), nd.normal(KEYS[38], batch=8, length=LENGTH, model=MODEL)

    def step(w, x):
        return jax.value_and_grad(lambda w, x: nd.mean(lm_layer(w, x) * x).array, (0, 1))(w, x)

    layout = "batch:batch,d_ff:model,heads:model"
    assert_same_under([("model:2;batch:4", layout)], step, w, x, expected=in_float64(step, w, x))


# -- the two-level mixture of experts

A, B, L, M, X, Y, HIDDEN = 2, 4, 8, 16, 4, 2, 32
G, S, C = 8, 4, 4  # groups of tokens, their size, capacity of a first-level expert in a group
H, T, D = 4, 16, 8  # the same for the second level: A * G * C == H * T


def top_2_gating(inputs, w, importance, experts, group, **capacity):
    """(dispatch, combine, loss): where each token of a group goes, with which weight, and the loss that balances the experts.

    Args:
      importance: 1: a token has two experts; between 0 and 1: one; 0: none.
      experts, group: the names of the dims of the experts and of the tokens of a group.
      capacity: the dim of the positions within an expert, and its size.
    """
    ((capacity_dim, limit),) = capacity.items()
    gates = nd.softmax(nd.einsum(inputs, w, reduced="model"), experts)
    number = {experts: gates.sizes[experts]}
    index_1, gate_1 = nd.argmax(gates, experts), nd.max(gates, experts)
    first = (importance == 1.0).astype(jnp.float32)
    mask_1 = nd.one_hot(index_1, **number) * first
    gate_1 = gate_1 * first
    without = gates * (1.0 - mask_1)
    index_2, gate_2 = nd.argmax(without, experts), nd.max(without, experts)
    mask_2 = nd.one_hot(index_2, **number) * (importance > 0.0).astype(jnp.float32)
    total = gate_1 + gate_2 + 1e-9
    gate_1, gate_2 = gate_1 / total, gate_2 / total
    loss = nd.mean(nd.mean(mask_1, group) * nd.mean(gates * first, group)) * float(gates.sizes[experts] ** 2)

    position_1 = (nd.cumsum(mask_1, group) - mask_1) * mask_1
    mask_1 = mask_1 * (position_1 < limit).astype(jnp.float32)
    count = nd.sum(mask_1, group)
    position_2 = (nd.cumsum(mask_2, group) - mask_2 + count) * mask_2
    mask_2 = mask_2 * (position_2 < limit).astype(jnp.float32)
    combine = 0.0
    for gate, mask, index, at in ((gate_1, mask_1, index_1, position_1), (gate_2, mask_2, index_2, position_2)):
        slot = nd.one_hot(nd.sum(at, experts).astype(jnp.int32), **{capacity_dim: limit})
        combine = combine + gate * nd.sum(mask, experts) * nd.one_hot(index, **number) * slot
    return (combine != 0.0).astype(jnp.float32), combine, loss


def moe_layer(w, inputs):
    """The mixture of ``transformer_moe_layer_v2`` with every second choice: (outputs, loss)."""
    inputs = nd.reshape(inputs, "outer_batch batch group_x model", batch=G)
    ones = nd.full(1.0, outer_batch=A, batch=G, group_x=S)
    dispatch_x, combine_x, loss_outer = top_2_gating(
        inputs, w["outer"], ones, "expert_x_unsplit", "group_x", capacity_x=C
    )
    to_x = nd.einsum(inputs, dispatch_x, out="expert_x_unsplit outer_batch batch capacity_x model")
    importance = nd.sum(combine_x, out="expert_x_unsplit outer_batch batch capacity_x")
    importance = 0.5 * ((importance > 0.5).astype(jnp.float32) + (importance > 0.0).astype(jnp.float32))

    # an all-to-all: batch is no longer sharded, the experts are
    split_x = {"expert_x_unsplit": "expert_x", "batch": "batch_unsplit"}
    to_x, importance = nd.rename(to_x, **split_x), nd.rename(importance, **split_x)
    inputs_y = nd.reshape(to_x, "expert_x outer_batch group_y model", outer_batch=H)
    importance = nd.reshape(importance, "expert_x outer_batch group_y", outer_batch=H)
    dispatch_y, combine_y, loss_inner = top_2_gating(
        inputs_y, w["inner"], importance, "expert_y_unsplit", "group_y", capacity_y=D
    )
    to_y = nd.einsum(inputs_y, dispatch_y, out="expert_y_unsplit expert_x outer_batch capacity_y model")
    to_y = nd.rename(to_y, expert_y_unsplit="expert_y", outer_batch="outer_batch_unsplit")

    hidden = nd.relu(nd.dense(to_y, w["wi"], matched="expert_x expert_y"))
    out = nd.dense(hidden, w["wo"], matched="expert_x expert_y")

    out = nd.rename(out, expert_y="expert_y_unsplit", outer_batch_unsplit="outer_batch")
    out = nd.einsum(out, combine_y, out="expert_x outer_batch group_y model")
    out = nd.reshape(
        out, "expert_x outer_batch batch_unsplit capacity_x model", outer_batch=A, batch_unsplit=G, capacity_x=C
    )
    out = nd.rename(out, **{new: old for old, new in split_x.items()})
    out = nd.einsum(out, combine_x, out="outer_batch batch group_x model")
    out = nd.reshape(out, "outer_batch batch length model", batch=B, length=L)
    return out, (loss_outer + loss_inner).array * 1e-2


def moe_weights():
    return {
        "outer": nd.normal(KEYS[10], model=M, expert_x_unsplit=X),
        "inner": nd.normal(KEYS[11], expert_x=X, model=M, expert_y_unsplit=Y),
        "wi": nd.normal(KEYS[12], M**-0.5, expert_x=X, expert_y=Y, model=M, expert_hidden=HIDDEN),
        "wo": nd.normal(KEYS[13], HIDDEN**-0.5, expert_x=X, expert_y=Y, expert_hidden=HIDDEN, model=M),
    }


def test_the_two_level_mixture_of_experts_under_its_layout():
    w, inputs = moe_weights(), nd.normal(KEYS[14], outer_batch=A, batch=B, length=L, model=M)
    layout = "outer_batch:mesh0;batch:mesh1;expert_x:mesh1;expert_y:mesh0"
    assert_same_under(  # matmuls of JAX 0.12 on CPUs round differently: above 3e-7
        [("mesh0:2;mesh1:4", layout)], moe_layer, w, inputs, expected=in_float64(moe_layer, w, inputs), tolerance=6e-7
    )
    ops = {c.op for c in mp.plan(moe_layer, w, inputs, mesh="mesh0:2;mesh1:4", layout=layout).collectives}
    assert "all-to-all" in ops
    assert "all-gather" not in ops


# -- auto_mtf


def test_search_prefers_the_layout_of_auto_mtf_s_toy():
    def product(x, y):
        return nd.einsum(x, y, out="a c")

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2560, 1280), (1280, 5120))]
    x, y = nd.named(shapes[0], "a b"), nd.named(shapes[1], "b c")
    others = ["a:m1;c:m2", "a:m2;b:m1", "b:m1;c:m2", "b:m2;c:m1", "c:m1", "a:m1"]
    options = {"topology": "v5e:2x4", "mesh": "m1:4;m2:2", "objective": "memory", "progress": False}
    found = mp.search(product, x, y, layouts=["a:m2;c:m1", *others], **options)
    assert mp.Layout(found.best.layout).spec("a b c") == jax.P("m2", None, "m1")
    x, y = nd.normal(KEYS[0], a=16, b=8), nd.normal(KEYS[1], b=8, c=32)
    expected = np.float64(x.array) @ np.float64(y.array)
    assert_same_under([(found.best.mesh, found.best.layout)], product, x, y, expected=nd.named(expected, "a c"))
