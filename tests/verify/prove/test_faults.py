"""A per-device program with a fault in one equation is never proven; without it, it is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import faults
from jax.extend.core import jaxpr_as_fun

import llama
import meshpar as mp
from meshpar._src.compat.jax import without_dead_code
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.verify.proofs import claims_of
from meshpar._src.verify.prove import prove_program

S = jax.ShapeDtypeStruct


def status(written, program):
    """The status of a proof, in which no lemma raises an exception."""
    proof = prove_program(written, program)
    assert not proof.errors
    return proof.status


def lowered(plan):
    """(the function as planned, its lowered program)."""
    fn, *_ = lower_to_shard_map(plan, plan.mesh)
    like = [S(v.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in plan.program.inputs]
    return plan.program.closed, jax.make_jaxpr(fn)(*like)


def mlp_step(params, x):
    def loss(params):
        h = jax.nn.gelu(x @ params["up"] + params["bias"])
        return jnp.mean((h @ params["down"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"up": S((64, 256), jnp.float32), "down": S((256, 64), jnp.float32), "bias": S((256,), jnp.float32)}
DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "params/bias": "mlp", "x": "batch embed"}


def mlp(layout):
    where = {"mesh": mp.mesh("data=2, model=4"), "layout": layout, "dims": DIMS}
    return mp.plan(mlp_step, PARAMS, S((32, 64), jnp.float32), **where)


def tiny_llama(layout):
    step, args, dims = llama.tiny(attention="xla", heads=8, kv_heads=4)
    return mp.plan(step, *args, mesh=mp.mesh("data=2, model=4"), layout=llama.LAYOUTS[layout], dims=dims)


CASES = {
    "data": lambda: mlp("batch: data"),
    "tensor": lambda: mlp("batch: data; mlp: model"),
    "fsdp": lambda: mlp("batch: data; embed: data; mlp: model"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_with_a_fault_is_not_proven(name):
    written, program = lowered(CASES[name]())
    assert status(written, program) == "proven"
    found = list(faults(program))
    assert len(found) >= 3
    assert not [fault for fault, other in found if status(written, other) == "proven"]


@pytest.mark.slow
def test_a_fault_in_a_transformer_that_is_proven_changes_nothing():
    """Of the faults in a Llama, those that are proven are of bounds and masks of values that other ops drop."""
    written, program = lowered(tiny_llama("fsdp_tensor"))
    assert status(written, program) == "proven"
    found = list(faults(program))
    same = [other for _, other in found if status(written, other) == "proven"]
    assert len(found) > 130
    assert len(same) < 20
    key = jax.random.key(0)
    args = [
        jnp.where(jnp.arange(a.size).reshape(a.shape) % 5 == 0, 60, jnp.arange(a.size).reshape(a.shape) % 48)
        if jnp.issubdtype(a.dtype, jnp.integer)
        else jax.random.normal(jax.random.fold_in(key, k), a.shape, a.dtype) / 8
        for k, a in enumerate(program.in_avals)
    ]
    wanted = jax.jit(jaxpr_as_fun(program))(*args)
    for other in same:
        for x, y in zip(jax.jit(jaxpr_as_fun(other))(*args), wanted, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_pipeline_of_two_rounds_is_proven_against_its_rewritten_program():
    step, args, dims = llama.tiny(layers=8, microbatches=4, embed=16, mlp=16, heads=2, kv_heads=2, vocab=16, seq=4)
    where = {"mesh": mp.mesh("stage=4, data=2"), "layout": "batch, embed: data; vocab: stage; layers: stage*2"}
    plan = mp.plan(step, *args, dims=dims, lowering="shard_map", **where)
    # Idle slots compute nothing that the plan counts.
    assert without_dead_code(plan.program.closed) is plan.program.closed
    proof = plan.prove()
    assert proof.status == "not verified"
    assert not [cause for cause in proof.failed if cause.op == "plan"]
    assert (proof.planned.status, proof.planned.share) == ("proven", 1.0)


def test_a_proof_of_a_plan_whose_program_xla_partitions_is_an_error():
    plan = mlp("batch: data").replan(lowering="jit")
    with pytest.raises(mp.errors.UnsupportedError, match="XLA partitions"):
        plan.prove()


def test_the_report_counts_the_ops_and_lists_kernels_and_assumptions():
    step, args, dims = llama.llama3_8b(batch=64)
    where = {"mesh": "data=4, model=2", "topology": "v5p:2x2x2", "layout": llama.LAYOUTS["fsdp_tensor"]}
    proof = mp.prove(step, *args, dims=dims, **where)
    assert (proof.status, proof.share) == ("proven", 1.0)
    assert sum(proof.kernels.values()) == proof.ops["kernel"] == 3
    assert json.loads(proof.to_json())["status"] == "proven"
    assert "heads_first" in proof.assumptions[-1]
    assert str(proof).startswith("✓ proven")


def test_the_claims_of_a_plan_are_compared_with_its_program():
    """Each claim that is changed is a difference in the report, and does not change the status of the results."""
    plan = mlp("batch: data; embed: data; mlp: model")
    written, program = lowered(plan)
    right = claims_of(plan)
    assert {"all-gather", "all-reduce", "reduce-scatter"} & {kind for kind, _ in right.sends}

    def proof(**changed):
        return prove_program(written, program, claims=dataclasses.replace(right, **changed))

    assert not proof().failed
    assert f"{proof().claims} claims of the plan hold" in str(proof())
    key = next(iter(right.sends))
    (path, spec), *rest = right.results
    for wrong in (
        {"sends": {**right.sends, key: right.sends[key] + 4}},
        {"sends": {k: n for k, n in right.sends.items() if k != key}},
        {"sends": {**right.sends, ("all-to-all", frozenset({"model"})): 64.0}},
        {"results": [(path, tuple(() for _ in spec)), *rest]},
        {"arguments": [*right.arguments[:-1], (right.arguments[-1][0], ((), ("data",)))]},
    ):
        found = proof(**wrong)
        assert found.proven
        (cause,) = found.failed
        assert cause.op == "plan"
        assert "the plan says" in cause.reason
        assert f"1 of {found.claims} claims of the plan do not hold" in str(found)


def claims_hold(plan):
    return not [c for c in plan.prove().failed if c.op == "plan"]


def test_a_ring_in_a_loop_of_unknown_length_counts_all_its_steps():
    def step(params, x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ params["up"]) @ params["down"], x)

    named = DIMS | {"x": "batch seq embed"}
    where = {"mesh": mp.mesh("data=2, model=4"), "layout": "batch: data; seq: model; mlp: model", "dims": named}
    plan = mp.plan(
        step, PARAMS, S((2, 16, 64), jnp.float32), S((), jnp.int32), overlap="ring", lowering="shard_map", **where
    )
    assert any(c.algorithm == "ring" and c.count is None for c in plan.collectives)
    assert claims_hold(plan)


def test_values_that_only_dead_code_reads_have_no_collectives():
    def in_a_loop(x, w, n):
        y = x @ w
        return jax.lax.fori_loop(0, n, lambda _, x: (x * 2, jnp.tanh(y))[0], x)

    def without_elements(x, w, n):
        return jax.lax.pad(jnp.tanh(x @ w)[:0], x[0, 0] * n, ((8, 0, 0), (0, 0, 0)))

    args, dims = (S((8, 64), jnp.float32), S((64, 64), jnp.float32), S((), jnp.int32)), {"x": "_ embed", "w": "embed _"}
    where = {"mesh": mp.mesh("data=2, model=4"), "layout": "embed: model", "dims": dims, "lowering": "shard_map"}
    for step, count in ((in_a_loop, 0), (without_elements, 1)):  # of x[0, 0]
        plan = mp.plan(step, *args, **where)
        assert len(plan.collectives) == count
        assert claims_hold(plan)


def test_a_ring_has_the_bytes_of_the_collective_that_it_replaces():
    named = DIMS | {"x": "batch seq embed"}
    where = {"mesh": mp.mesh("data=2, model=4"), "layout": "batch: data; seq: model; mlp: model", "dims": named}
    plan = mp.plan(mlp_step, PARAMS, S((2, 16, 64), jnp.float32), overlap="ring", **where)
    proof = plan.prove()
    assert any(c.algorithm == "ring" for c in plan.collectives)
    assert proof.proven
    assert not proof.failed


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_the_kernels_of_attention_send_what_the_plan_says(strategy):
    """Also of a constant gradient, of which a block is a constant of another size."""

    def step(q, k, v):
        attend = lambda *x: mp.layers.attention(*x, causal=True, strategy=strategy).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(attend, (0, 1, 2))(q, k, v)

    where = {"mesh": "context=4", "topology": "v5e:2x2", "layout": "seq: context", "lowering": "shard_map"}
    dims = dict.fromkeys("qkv", "batch seq heads _")
    proof = mp.prove(step, *[S((1, 1024, 4, 128), jnp.bfloat16)] * 3, dims=dims, **where)
    assert proof.proven
    assert not proof.failed


def test_a_step_is_proven_under_its_own_layout():
    step = mp.jit(lambda x: x * 2, mesh="data=4", layout="batch: data", dims={"x": "batch _"})
    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    assert mp.prove(step, x).proven
    with pytest.raises(mp.errors.UnsupportedError, match=r"mp\.prove needs a layout"):
        mp.prove(lambda x: x * 2, x)
