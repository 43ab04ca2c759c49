"""A plan of a program that was planned before is that of a program that was not, whatever was planned in between."""

import functools
import itertools
import random
from dataclasses import replace
from pathlib import Path

import jax
import planned_transformer as model
import pytest

import meshpar as mp
from meshpar._src.entry.target import load_target
from meshpar._src.plan.text import plan_steps
from meshpar._src.plan.verify import verify
from meshpar.errors import MeshparError

EXAMPLES = Path(__file__).parents[2] / "examples"
MESHES = ["data=4, model=4", "data=8, model=2"]


def microbatches():
    """A transformer's gradients in two microbatches, whose sums a loop carries unreduced."""

    def step(state, batch):
        loss, gradients = mp.train.accumulate_gradients(jax.value_and_grad(model.loss_of), 2)(state["params"], batch)
        updates, opt_state = model.OPTIMIZER.update(gradients, state["opt_state"], state["params"])
        return {"params": jax.tree.map(lambda p, u: p + u, state["params"], updates), "opt_state": opt_state}, loss

    return step, (model.STATE, model.TOKENS), model.DIMS


def example(file, name, **options):
    target = load_target(f"{EXAMPLES / file}:{name}", options)
    return target.step, target.args, target.dims


PROGRAMS = {
    "microbatches": microbatches,
    "deepseek": functools.partial(example, "deepseek.py", "tiny", batch=16, seq=64),
}


def traced(name):
    step, args, dims = PROGRAMS[name]()
    return mp.plan(
        step, *args, mesh=MESHES[0], topology="v5e:4x4", layout="batch: data", dims=dims, donate_argnames="state"
    )


def layouts(dims, number, rng):
    """Random rules, with scopes."""
    for _ in range(number):
        rules = [
            f"{rng.choice(['', '', '', 'opt.', 'params.'])}{dim}?: {rng.choice(['data', 'model', 'data+model', 'model+data'])}"
            for dim in rng.sample(dims, min(len(dims), rng.randint(1, 6)))
        ]
        yield "; ".join([*rules, "batch: data"] if rng.random() < 0.5 else ["batch: data", *rules])


def figures(plan):
    """Steps, notes, memory, seconds, decisions and what is held and sent."""
    verify(plan)
    time = plan.time
    return (
        plan_steps(plan), plan.notes, plan.memory.to_dict(), time and time.to_dict(), [o.to_dict() for o in plan.overlaps],
        [h.to_dict() for h in (*plan.inputs, *plan.outputs)], [c.to_dict() for c in plan.collectives],
    )  # fmt: skip


def replanned(plan, layout, mesh, overlap):
    try:
        return figures(plan.replan(layout=layout, mesh=mesh, topology="v5e:4x4", overlap=overlap))
    except MeshparError as e:
        return str(e)


def check_replans(name, number, seed):
    rng = random.Random(seed)
    plan = traced(name)
    dims = sorted(plan.program.all_names())
    cases = [
        (text, rng.choice(MESHES), overlap)
        for text, overlap in zip(layouts(dims, number, rng), itertools.cycle(["off", "auto"]), strict=False)
    ]
    fresh = {
        case: replanned(replace(plan, program=replace(plan.program.original or plan.program)), *case) for case in cases
    }
    again = cases * 2
    rng.shuffle(again)
    for case in again:
        assert replanned(plan, *case) == fresh[case], case
    assert sum(isinstance(found, tuple) for found in fresh.values()) > number // 2  # the others cannot be planned


@pytest.mark.parametrize(("name", "number"), [("microbatches", 4), ("deepseek", 2)])
def test_a_replan_is_the_plan_of_a_program_that_was_not_planned_before(name, number):
    """Golden plans (``test_golden.py``), of which most are replans, show it for other models."""
    check_replans(name, number, seed=1)


def test_a_replan_is_the_plan_of_a_program_traced_anew():
    plan = traced("microbatches")
    cases = [(text, MESHES[0], "auto") for text in layouts(sorted(plan.program.all_names()), 2, random.Random(2))]
    found = [replanned(plan, *case) for case in cases for _ in range(2)]
    assert found == [figures for case in cases for figures in [replanned(traced("microbatches"), *case)] * 2]


def test_another_mesh_keeps_nothing_of_the_first():
    plan = traced("microbatches")
    layout = "batch: data; heads, mlp, vocab: model; embed: data"
    first = figures(plan.replan(layout=layout))
    other = figures(plan.replan(layout=layout, mesh="model=4, data=4", topology="v5e:4x4"))
    assert figures(plan.replan(layout=layout)) == first != other
