"""A per-device program with a fault in one equation is never proven; without it, it is."""

import jax
import jax.numpy as jnp
import pytest
from faults import faults

import llama
import meshpar as mp
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.verify.prove import prove_program

S = jax.ShapeDtypeStruct


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
    "mlp data": lambda: mlp("batch: data"),
    "mlp tensor": lambda: mlp("batch: data; mlp: model"),
    "mlp fsdp": lambda: mlp("batch: data; embed: data; mlp: model"),
    "llama fsdp+tensor": lambda: tiny_llama("fsdp_tensor"),
    "llama sequence": lambda: tiny_llama("sequence_parallel"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_with_a_fault_is_not_proven(name):
    written, program = lowered(CASES[name]())
    assert prove_program(written, program).status == "proven"
    found = list(faults(program))
    assert len(found) >= 3
    wrong = [fault for fault, other in found if prove_program(written, other).status == "proven"]
    assert not wrong
