"""Each rewrite of indivisible slices has a program of users that sends more bytes without it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import f32
from jax import lax

import meshpar as mp
from meshpar._src.program import divisible_rewrite

SEQUENCE = {"x": "batch seq embed"}


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def next_token_loss(w, x, y):
    """The cross-entropy of each token, given the tokens before, of a sequence that context parallelism shards."""
    logits = x[:, :-1] @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, y[:, 1:]).mean()


def attention(x, w):
    """Attention of all tokens but the last to all tokens, with heads before the sequence."""
    q, k = jnp.einsum("bse,ehd->bhsd", x[:, :-1], w), jnp.einsum("bse,ehd->bhsd", x, w)
    weights = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k))
    return jnp.sum(jnp.einsum("bhst,bhtd->bshd", weights, k) ** 2)


def token_shift(x):
    """RWKV's mixture of each token with the token before."""
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return jnp.sum(jnp.tanh(0.3 * x + 0.7 * before))


def zigzag(x):
    """A sequence whose chunks are reordered for balanced causal attention, as chunks 0, 7, 1, 6, …"""
    order = np.arange(64).reshape(8, 8)[[0, 7, 1, 6, 2, 5, 3, 4]].ravel()
    return jnp.sum(jnp.tanh(x[:, order]))


def cross_entropy(x, y):
    return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(64), y])


def conjugate_gradients(a, b):
    return jax.scipy.sparse.linalg.cg(lambda x: a * x, b, maxiter=4)[0]


def flattened_dense(x, w):
    """A dense layer on a list of tokens."""
    return jnp.tanh((x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:2], -1))


def advantages(rewards, values):
    """Generalized advantage estimation, backward over time steps."""
    deltas = rewards[:-1] + 0.99 * values[1:] - values[:-1]
    decay = jnp.full_like(deltas, 0.95)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, deltas), reverse=True)[1]


SEQ, ROWS = "seq: data", "rows: data; columns: model"
NEXT_DIMS = {**SEQUENCE, "w": "embed vocab", "y": "batch seq"}
NEXT_TOKEN = (jax.value_and_grad(next_token_loss), (f32(64, 128), f32(8, 64, 64), i32(8, 64)), SEQ, NEXT_DIMS)
LABELS = (jax.grad(cross_entropy), (f32(64, 128), i32(64)), "batch: data", {"x": "batch vocab", "y": "batch"})
SHIFT = (jax.grad(token_shift), (f32(8, 64, 64),), SEQ, SEQUENCE)
ZIGZAG = (jax.grad(zigzag), (f32(8, 64, 64),), SEQ, SEQUENCE)
SOLVER = (conjugate_gradients, (f32(64, 32), f32(64, 32)), ROWS, {"*": "rows columns"})
ATTENTION = (attention, (f32(8, 64, 64), f32(64, 4, 16)), SEQ, SEQUENCE)
FLATTENED = (flattened_dense, (f32(8, 64, 64), f32(64, 32)), "batch: data; seq: model", {**SEQUENCE, "w": "embed mlp"})
PROGRAMS = {
    "collapsed.dot_general": FLATTENED,
    "collapsed.reshape": SOLVER,
    "lookups.constant_gather": ZIGZAG,
    "lookups.constant_scatter_add": ZIGZAG,
    "lookups.own_rows": LABELS,
    "pad_operands.by_factors": NEXT_TOKEN,
    "slices.concatenate": SHIFT,
    "slices.pad": SHIFT,
    "slices.rev": (advantages, (f32(128, 64), f32(128, 64)), "time: data", {"*": "time env"}),
    "slices.slice_": SHIFT,
    "slices.split": SHIFT,
}  # by rewrite: function, arguments, layout, dims


def name(rewrite):
    return f"{rewrite.__module__.rsplit('.', 1)[1]}.{rewrite.__name__}"


def bytes_sent(fn, args, layout, dims):
    return mp.plan(fn, *args, mesh="data=4, model=2", layout=layout, dims=dims).bytes_sent


def test_the_next_token_loss_gathers_no_logits():
    fn, args, layout, dims = NEXT_TOKEN
    plan = mp.plan(fn, *args, mesh="data=4, model=2", layout=layout, dims=dims)
    assert {c.op for c in plan.collectives} == {"collective-permute", "all-reduce"}
    one_row_of_each_shard, weights = 4 * 8 * 64 * 2, 2 * 4 * 64 * 128
    assert plan.bytes_sent <= one_row_of_each_shard + weights


def test_a_dense_layer_on_a_list_of_tokens_sends_nothing():
    assert bytes_sent(*FLATTENED) == 0


def test_every_rewrite_has_a_program():
    rewrites = (*divisible_rewrite.REWRITES.values(), divisible_rewrite.READERS)
    assert {name(f) for group in rewrites for f in group} == set(PROGRAMS)


@pytest.mark.parametrize(
    ("rewrite", "program"),
    [*PROGRAMS.items(), ("pad_operands.by_factors", ATTENTION), ("collapsed.dot_general", SOLVER)],
)
def test_its_program_sends_more_bytes_without_it(rewrite, program, monkeypatch):
    sent = bytes_sent(*program)

    def others(fns):
        return tuple(f for f in fns if name(f) != rewrite)

    by_primitive = {p: others(fns) for p, fns in divisible_rewrite.REWRITES.items()}
    monkeypatch.setattr(divisible_rewrite, "REWRITES", by_primitive)
    monkeypatch.setattr(divisible_rewrite, "READERS", others(divisible_rewrite.READERS))
    assert bytes_sent(*program) > sent
