"""Pipelines combined with every known scheme equal the unsharded step: the complete new state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import llama
import meshpar as mp
import mixtral
from meshpar._src.verify.hlo import walk
from meshpar._src.verify.hlo_text import parse

MICROBATCHES = 4


def training(module, config, model):
    """(step, its arguments): the model of an example with four layers, AdamW after clipping, several microbatches."""
    config = dataclasses.replace(config, layers=4, loss_chunks=2)
    model, optimizer = model(config), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))

    def create(key):
        params = module.create_state(config, key)["params"]
        return {"params": params, "opt": optimizer.init(params)}

    def loss_of(params, batch):
        return model.apply({"params": params}, batch["inputs"], batch["targets"])

    def step(state, batch):
        loss, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), MICROBATCHES)(
            state["params"], batch
        )
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, config.vocab, (16, 8), dtype=np.int32) for name in ("inputs", "targets")}
    return step, (jax.jit(create)(jax.random.key(0)), batch)


def check(training, mesh, layout, schedule, lowering):
    """A pipeline against the unsharded run."""
    step, args = training
    run = mp.jit(step, mesh=mesh, layout=layout, dims=llama.DIMS, schedule=schedule)
    pipeline = run.plan(*args).pipeline
    assert pipeline is not None
    assert (pipeline.layers, pipeline.microbatches) == (4, MICROBATCHES)
    report = mp.check(run, *args, layout=layout, mesh=mesh, lowerings=[lowering], tolerance=1e-5)
    assert report.ok
    assert not [path for row in report.rows for path in row.explained], "within the tolerance, not explained"


def test_a_llama_under_all_schemes_and_stages():
    layout = "batch, embed: data; heads, kv_heads, mlp, seq: model; vocab: stage+model; layers: stage"
    case = training(llama, llama.TINY, llama.Llama)
    check(case, "stage=2, data=2, model=2", layout, "1f1b-overlap", "shard_map")


def test_a_mixtral_with_experts_inside_of_stages():
    case = training(mixtral, mixtral.TINY, mixtral.Mixtral)
    check(case, "stage=2, idle=2, model=2", "expert, batch: model; layers: stage", "zb", "jit")


@pytest.mark.parametrize(("schedule", "stages", "rounds"), [("gpipe", 2, 1), ("zb", 4, 1), ("1f1b", 4, 2)])
def test_the_compiled_step_runs_as_many_layers_as_the_schedule_has_slots(schedule, stages, rounds):
    """(v · M + K − 1) · L / (v · K) forward layers on a device, counted by the only tanh of a layer in the compiled program."""
    layers, microbatches = 8, 4

    def loss_of(params, x):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["w"])
        return jnp.mean(h * h)

    def step(params, x):
        loss, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    args = {"w": np.ones((layers, 16, 16), np.float32)}, np.ones((16, 16), np.float32)
    run = mp.jit(
        step,
        mesh=f"stage={stages}, data=2, idle={4 // stages}",
        layout=f"batch: data; layers: stage*{rounds}",
        dims={"params/w": "layers _ embed", "x": "batch embed"},
        schedule=schedule,
    )
    module = parse(run.lower(*args).compile().as_text())
    counts = [r.count for r in walk(module, len) if r.instruction.opcode == "tanh"]
    assert sum(counts) == (rounds * microbatches + stages - 1) * layers // (rounds * stages)
