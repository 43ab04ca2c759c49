"""The schemes of a layout in the compiled program: kinds, counts and bytes are those of the plan."""

import functools
import importlib.util
from pathlib import Path

import pytest

import meshpar as mp
from meshpar.verify.agreement import differences

MEGATRON = "batch: data; heads, mlp, vocab: model"


@pytest.fixture(scope="module")
def model():
    path = Path(__file__).parent.parent / "plan" / "test_schemes.py"
    spec = importlib.util.spec_from_file_location("model_of_test_schemes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "layout",
    [
        "batch: data",
        MEGATRON,
        "batch: data; embed: data",
        f"{MEGATRON}; embed: data",
        f"{MEGATRON}; embed: data; seq: model",
        "batch: data; opt.embed: data",
        "seq: data",
    ],
)
def test_the_compiled_program_sends_what_the_plan_lists(model, layout):
    step = functools.partial(model.train_step, rename=layout == "seq: data")
    compiled = mp.compile(
        step, model.STATE, model.TOKENS, mesh=mp.mesh("data=4, model=2"), layout=layout, dims=model.DIMS,
        lowering="shard_map", cache=False, progress=lambda _: None,
    )  # fmt: skip
    # The maximum of the logits and an index column stand twice in the program (optax's loss); XLA makes one of equal operands.
    for d in differences(compiled.plan, compiled.collectives):
        assert d.merged
        assert d.bytes <= 2 * 8 * 16 * 4
