"""Layers work, with the same dtypes, whatever checks a user has JAX make of their own code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar._src.layers.attention import attention
from meshpar._src.layers.loss import cross_entropy
from meshpar._src.layers.moe import moe

RNG = np.random.default_rng(0)
EXPERTS = {
    n: RNG.normal(size=s).astype("f") for n, s in {"up": (4, 8, 8), "gate": (4, 8, 8), "down": (4, 8, 8)}.items()
}
PARAMS = {"router": RNG.normal(size=(8, 4)).astype("f"), "kernel": RNG.normal(size=(8, 16)).astype("f"), **EXPERTS}
X = RNG.normal(size=(4, 8, 2, 4)).astype("f")
LABELS = RNG.integers(0, 16, (4, 8)).astype(np.int32)
ROUTED = ("top_k", "noisy_top_k", "expert_choice", "deepseek_v3")
TOP = {"top_k": {"k": 2}, "deepseek_v3": {"k": 2, "capacity": 1.0}, "noisy_top_k": {"k": 2}}


def of_layers(params, x, labels, routers=ROUTED):
    """A model of attention, mixtures of experts, and every form of the loss."""
    experts = {n: params[n] for n in EXPERTS}
    h = attention(x, x, x, causal=True).reshape(4, 8, 8)
    total = jnp.float32(0)
    for router in routers:
        y, aux = moe(h, params["router"], experts, router=router, groups=2, **TOP.get(router, {}))
        total += jnp.sum(y**2) + sum(aux.losses.values())
    options = {"z_loss": 0.01, "label_smoothing": 0.1, "mask": labels > 2}
    for over in ("vocab", "tokens"):
        total += cross_entropy((h, params["kernel"]), labels, over=over, chunks=2, **options)
    return total + cross_entropy(h @ params["kernel"], labels, **options)


DIMS = {
    "params/[ug]*": "expert embed mlp",
    "params/down": "expert mlp embed",
    "x": "batch seq heads _",
    "labels": "batch seq",
}


@pytest.mark.slow
def test_layers_under_x64_and_the_checks_of_user_code():
    def types(out):
        return jax.tree.map(lambda x: (x.shape, x.dtype), out)

    args = PARAMS, X, LABELS
    plain = types(jax.eval_shape(jax.value_and_grad(of_layers), *args))
    with_experts = jax.value_and_grad(lambda params, x, labels: of_layers(params, x, labels, ("top_k",)))
    step = mp.jit(
        with_experts, mesh="data=4, model=2", layout="batch: data; mlp: model", dims=DIMS, lowering="shard_map"
    )
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        assert types(jax.eval_shape(jax.value_and_grad(of_layers), *args)) == plain
        assert types(step.lower(*args).out_info) == plain
