"""Bytes of optimizers under layouts, against their hand-written distributed versions.

    python benchmarks/optimizers.py [--layers 8] [--embed 1024]

A scan over layers of two matrices [embed, 4 · embed] in float32, planned for 8 devices; nothing runs. AdamW, schedule-free AdamW
and Sophia are optax's, Muon is optax.contrib's. Optax 0.2.8 has neither Dion nor SOAP: they are written here as their papers'
equations on stacked matrices, without a collective. ``state`` is the share of the optimizer state that a device stores, over its
share of the parameters. ``sends`` is what a device sends in a step, over the hand-written version's bytes:

- all of them: FSDP gathers each weight in the forward and in the backward pass, and reduce-scatters its gradient: 3 · W · 7/8 for
  weights of W bytes (Zhao et al., *PyTorch FSDP*, 2023). Element-wise optimizers add nothing.
- Sophia computes a Hessian-vector product every tenth step (Liu et al., 2023), and the plan has a step that does: it gathers each
  weight and its direction in the forward and in the backward pass, and reduce-scatters the product: 5 · W · 7/8.
- Muon and SOAP (Vyas et al., 2024): each matrix has an owner, which gets its gradient by an all-to-all and sends its update back by
  another: 2 · W / 8 · 7/8 (Microsoft's ``dion`` has this Muon; Ahn et al., 2025).
- Dion (Ahn et al., 2025, algorithm 2): of each matrix whose rows are sharded, an all-reduce of the factor [4 · embed, rank], and of
  the squared norms of the other factor's columns.

Under tensor parallelism over 2 by 4 devices the gradients of a shard are all-reduced over ``data`` and activations over ``model``,
whatever the optimizer: ``sends`` is relative to the step with SGD.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from tables import Table

import meshpar as mp

DEVICES = 8
FSDP = "batch: data; embed: data"
BY_MATRIX = "batch: data; opt.layers: data; embed: data"
TENSOR = "batch: data; mlp: model"
TENSOR_BY_MATRIX = "batch: data; opt.layers: model; mlp: model"
DIMS = {"*up": "layers embed mlp", "*down": "layers embed mlp", "x": "batch embed"}
RANK = 16

Params = dict[str, jax.Array]


class Factors(NamedTuple):
    """State of SOAP for a matrix [layers, m, n]: moments, covariances [layers, m, m] and [layers, n, n], and their eigenvectors."""

    mu: Any
    nu: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


def soap(rate: float, b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8) -> optax.GradientTransformation:
    """SOAP, *Improving and Stabilizing Shampoo using Adam* (Vyas et al., 2024), algorithm 3, with a new basis in every step."""

    def init(params: Params) -> Factors:
        def eye(x: jax.Array, dim: int) -> jax.Array:
            return jnp.broadcast_to(jnp.eye(x.shape[dim]), (x.shape[0], x.shape[dim], x.shape[dim]))

        zeros = jax.tree.map(jnp.zeros_like, params)
        left, right = (jax.tree.map(lambda x, d=d: eye(x, d), params) for d in (1, 2))
        return Factors(zeros, zeros, left, right, left, right)

    def one(g: jax.Array, s: Factors) -> tuple[jax.Array, Factors]:
        mu = b1 * s.mu + (1 - b1) * g
        left = b2 * s.left + (1 - b2) * jnp.einsum("lmn,lkn->lmk", g, g)
        right = b2 * s.right + (1 - b2) * jnp.einsum("lmn,lmk->lnk", g, g)
        rotated, rotated_mu = (jnp.einsum("lmn,lmi,lnj->lij", x, s.left_basis, s.right_basis) for x in (g, mu))
        nu = b2 * s.nu + (1 - b2) * rotated**2
        step = jnp.einsum("lij,lmi,lnj->lmn", rotated_mu / (jnp.sqrt(nu) + eps), s.left_basis, s.right_basis)
        bases = (jnp.linalg.qr(a @ q)[0] for a, q in ((left, s.left_basis), (right, s.right_basis)))
        return -rate * step, Factors(mu, nu, left, right, *bases)

    def update(gradients: Params, state: Factors, params: Any = None) -> tuple[Params, Factors]:
        found = {k: one(g, Factors(*(part[k] for part in state))) for k, g in gradients.items()}
        parts = ({k: s[i] for k, (_, s) in found.items()} for i in range(len(Factors._fields)))
        return {k: u for k, (u, _) in found.items()}, Factors(*parts)

    return optax.GradientTransformation(init, update)


class DionState(NamedTuple):
    """State of Dion for a matrix [layers, m, n]: the momentum, and the right factor [layers, m, rank] of its transpose."""

    mu: Any
    factor: Any


def dion(rate: float, rank: int = RANK, momentum: float = 0.95) -> optax.GradientTransformation:
    """Dion, *Distributed Orthonormalized Updates* (Ahn et al., 2025), algorithm 1, on transposed matrices: the factor that power
    iteration starts from has the rows, which FSDP shards."""

    def init(params: Params) -> DionState:
        keys = dict(zip(params, jax.random.split(jax.random.key(0), len(params)), strict=True))
        factor = {k: jax.random.normal(keys[k], (*x.shape[:2], rank), x.dtype) for k, x in params.items()}
        return DionState(jax.tree.map(jnp.zeros_like, params), factor)

    def one(g: jax.Array, s: DionState) -> tuple[jax.Array, DionState]:
        b = s.mu + g
        p = jnp.linalg.qr(jnp.einsum("lmn,lmr->lnr", b, s.factor))[0]
        r = jnp.einsum("lmn,lnr->lmr", b, p)
        mu = b - (1 - momentum) * jnp.einsum("lmr,lnr->lmn", r, p)
        q = r / (jnp.linalg.norm(r, axis=1, keepdims=True) + 1e-12)
        scale = rate * (g.shape[2] / g.shape[1]) ** 0.5
        return -scale * jnp.einsum("lmr,lnr->lmn", q, p), DionState(mu, q)

    def update(gradients: Params, state: DionState, params: Any = None) -> tuple[Params, DionState]:
        found = {k: one(g, DionState(state.mu[k], state.factor[k])) for k, g in gradients.items()}
        parts = ({k: s[i] for k, (_, s) in found.items()} for i in range(2))
        return {k: u for k, (u, _) in found.items()}, DionState(*parts)

    return optax.GradientTransformation(init, update)


class Case(NamedTuple):
    """An optimizer, its layouts for FSDP and tensor parallelism, and what its hand-written version adds to FSDP.

    Attributes:
      added: (weight bytes, layers, embed) → bytes that a device sends for the optimizer.
    """

    optimizer: Callable[[], Any]
    fsdp: str = FSDP
    tensor: str = TENSOR
    added: Callable[[float, int, int], float] = lambda weights, layers, embed: 0.0


def _owners(weights: float, layers: int, embed: int) -> float:
    return 2 * weights / DEVICES * (1 - 1 / DEVICES)


CASES = {
    "AdamW": Case(lambda: optax.adamw(1e-3)),
    "schedule-free AdamW": Case(lambda: optax.contrib.schedule_free_adamw(1e-3)),
    "Sophia": Case(
        lambda: optax.contrib.sophia(1e-3), FSDP, TENSOR, lambda weights, *_: 5 * weights * (1 - 1 / DEVICES)
    ),
    "Muon": Case(
        lambda: optax.contrib.muon(
            1e-3,
            muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), p),
        ),
        BY_MATRIX,
        TENSOR_BY_MATRIX,
        _owners,
    ),
    "SOAP": Case(lambda: soap(1e-3), BY_MATRIX, TENSOR_BY_MATRIX, _owners),
    "Dion": Case(
        lambda: dion(1e-3),
        FSDP,
        TENSOR,
        lambda weights, layers, embed: 2 * layers * 2 * (4 * embed * RANK + RANK) * 4 * (1 - 1 / DEVICES),
    ),
}


def loss_of(params: Params, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"].T, None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def step_of(optimizer: Any) -> Callable[..., Any]:
    """(state, batch) → (new state, loss)."""
    tx = optax.with_extra_args_support(optimizer)

    def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt = tx.update(gradients, state["opt"], state["params"], obj_fn=lambda p: loss_of(p, x))
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def create(optimizer: Any, layers: int, embed: int, key: jax.Array) -> dict[str, Any]:
    up, down = (jax.random.normal(k, (layers, embed, 4 * embed)) * embed**-0.5 / 2 for k in jax.random.split(key))
    params = {"up": up, "down": down}
    return {"params": params, "opt": optimizer.init(params)}


def plan_of(optimizer: Any, layers: int, embed: int, layout: str) -> mp.Plan:
    """The plan of a step of 4096 rows on 8 devices, 2 by 4 under tensor parallelism."""
    state = jax.eval_shape(lambda key: create(optimizer, layers, embed, key), jax.random.key(0))
    x = jax.ShapeDtypeStruct((4096, embed), jnp.float32)
    mesh = "data=2, model=4" if "model" in layout else f"data={DEVICES}"
    return mp.plan(step_of(optimizer), state, x, mesh=mesh, layout=layout, dims=DIMS, donate_argnames="state")


def share_of_state(plan: mp.Plan) -> float:
    """The share of the optimizer state that a device stores, over the share of the parameters that it stores."""
    local = {kind: plan.argument_bytes(kind) for kind in ("opt", "params")}
    sizes = {
        kind: sum(math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for v in plan.inputs if v.kind == kind)
        for kind in local
    }
    return local["opt"] / sizes["opt"] / (local["params"] / sizes["params"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--embed", type=int, default=1024)
    args = parser.parse_args()
    sizes = args.layers, args.embed
    weights = 2 * args.layers * 4 * args.embed**2 * 4.0
    tensor = plan_of(optax.sgd(1e-3), *sizes, TENSOR).bytes_sent
    table = Table("optimizer", "FSDP", "state", "sends", "tensor", "state", "sends / SGD's")
    for name, case in CASES.items():
        fsdp, split = (plan_of(case.optimizer(), *sizes, layout) for layout in (case.fsdp, case.tensor))
        hand = 3 * weights * (1 - 1 / DEVICES) + case.added(weights, *sizes)
        table.add_row(
            name, f"`{case.fsdp}`", f"{share_of_state(fsdp):.2f}", f"{fsdp.bytes_sent / hand:.2f}",
            f"`{case.tensor}`", f"{share_of_state(split):.2f}", f"{split.bytes_sent / tensor:.2f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
