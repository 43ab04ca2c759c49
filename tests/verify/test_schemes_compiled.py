"""Compiled programs of the preset layouts: kinds, counts and bytes of collectives equal the plan's."""

import functools

import planned_transformer as model
import pytest
import quick

import meshpar as mp
from plan_vs_compiler import differences


@pytest.mark.parametrize(
    "layout",
    [
        f"{model.MEGATRON}; embed: data; seq: model",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("batch: data; opt.embed: data", "batch: data; embed: data", "seq: data")
        ),
    ],
)
def test_the_compiled_program_sends_what_the_plan_lists(layout):
    step = functools.partial(model.train_step, rename=layout == "seq: data")
    compiled = mp.compile(
        step, model.STATE, model.TOKENS, mesh=mp.mesh("data=4, model=2"), layout=layout, dims=model.DIMS,
        lowering="shard_map", cache=False, progress=lambda _: None, compiler_options=quick.OPTIONS,
    )  # fmt: skip
    # The maximum of the logits and an index column stand twice in the program (optax's loss); XLA makes one of equal operands.
    for d in differences(compiled.plan, compiled.collectives):
        assert d.merged
        assert d.bytes <= 2 * 8 * 16 * 4
