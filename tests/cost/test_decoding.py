"""Plans of steps of decoding: the limit of HBM, rates and the largest batch, against sums over shapes."""

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp

E, M, B, C = 1024, 8192, 16, 4096
WEIGHTS = {"w/up": "embed mlp", "w/down": "mlp embed", "w/table": "vocab embed"}
DIMS = {**WEIGHTS, "cache": "batch cache embed", "token": "batch"}


def decode(w, cache, token):
    """A token of each sequence: reads two weights, some rows of a table, and the cache."""
    x = w["table"][token]
    x = jax.nn.relu(x @ w["up"]) @ w["down"]
    return jnp.einsum("bce,be->be", cache, x)


def planned(layout: str, topology: str | None = "v5e:2x4", batch: int = B, **how):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    w = {"up": shape(E, M), "down": shape(M, E), "table": shape(32000, E)}
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return mp.plan(
        decode, w, shape(batch, C, E), token, mesh="data=2, model=4", topology=topology, layout=layout, dims=DIMS, **how
    )


def test_the_limit_is_the_bytes_of_weights_cache_and_looked_up_rows():
    plan = planned("batch: data; mlp: model; cache: model").with_tokens("batch")
    d = plan.decoding
    needed = 2 * 2 * E * M / 4 + 2 * (B / 2) * (C / 4) * E + 2 * (B / 2) * E + 4 * B / 2
    assert d.bytes_read == pytest.approx(needed)
    assert d.limit == pytest.approx(needed / 8.1e11)
    assert d.sequences == B
    assert d.seconds == plan.seconds
    assert d.tokens_per_second == pytest.approx(B / plan.seconds)
    assert d.tokens_per_second_per_chip == pytest.approx(B / plan.seconds / 8)
    assert d.ratio == plan.seconds / d.limit > 1


def test_of_a_table_the_row_of_one_token_is_read():
    table, token = jax.ShapeDtypeStruct((4096, E), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    plan = mp.plan(lambda table, token: table[token], table, token, mesh="model=8", topology="v5e:2x4", layout="embed: model",
                   dims={"table": "vocab embed", "token": "batch"})  # fmt: skip
    assert plan.with_tokens("batch").decoding.bytes_read <= 4 * E / 8 + 16


def test_the_largest_batch_fits_and_the_next_one_does_not():
    layout = "batch: data; mlp: model"
    largest = planned(layout).with_tokens("batch").decoding.largest
    capacity = 15.75 * 2**30
    assert largest % 2 == 0
    assert planned(layout, batch=largest).memory.peak <= capacity < planned(layout, batch=largest + 4).memory.peak


def test_without_a_chip_there_are_no_times():
    d = planned("batch: data", topology=None).with_tokens("batch").decoding
    assert d.limit is d.seconds is d.largest is d.ratio is d.tokens_per_second is None
    assert d.sequence_bytes == pytest.approx(2 * C * E / 2, rel=0.1)  # two shards
    assert str(d).startswith("16 tokens a step")


def test_a_dim_that_no_argument_has_is_an_error():
    with pytest.raises(mp.errors.UnknownDimError, match="bach"):
        planned("batch: data").with_tokens("bach")


@pytest.mark.parametrize(("topology", "padded"), [("v5e:2x4", False), ("v6e:2x4", True)])
def test_a_matmul_of_one_row_is_computed_by_the_vector_units_or_padded(topology, padded):
    """The weights take as long as that many elements of an elementwise op; with eight rows they are only read."""

    def planned(rows: int) -> mp.Plan:
        w = jax.ShapeDtypeStruct((8192, 28672), jnp.int8)
        x = jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16)
        return mp.plan(
            lambda w, x: x @ w.astype(jnp.bfloat16), w, x, mesh="model=8", topology=topology, layout="mlp: model",
            dims={"w": "embed mlp", "x": "batch embed"},
        )  # fmt: skip

    shard, one, eight = 8192 * 28672 / 8, planned(1), planned(8)
    vector = 0 if padded else shard / (one.compiler.vector_elements_per_cycle * one.compiler.clock_hz)
    assert one.seconds == pytest.approx(eight.seconds + vector, rel=0.1)


def test_an_argument_that_nothing_reads_is_not_read():
    args = {"w": jax.ShapeDtypeStruct((E, M), jnp.bfloat16), "x": jax.ShapeDtypeStruct((B, E), jnp.bfloat16)}
    where = {"mesh": "data=8", "topology": "v5e:2x4", "layout": "", "dims": {"*w": "embed mlp", "*x": "batch embed"}}

    def read(spare):
        step = lambda args, spare: args["x"] @ args["w"]  # noqa: E731
        return mp.plan(step, args, spare, **where).with_tokens("batch").decoding.bytes_read

    assert read(jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)) == read(None) == 2 * (E * M + B * E)
