"""Schemes of transformers: their compiled programs send what the plans list; no scheme changes a number, dropout included."""

import planned_transformer
import pytest
import quick
import small_transformer

import meshpar as mp
from plan_vs_compiler import differences


def test_the_compiled_program_sends_what_the_plan_lists():
    """Kinds, counts and bytes; the lowered programs of other schemes: `tests/lower/test_shard_map.py`."""
    model = planned_transformer
    options = {"lowering": "shard_map", "cache": False, "compiler_options": quick.OPTIONS}
    compiled = mp.compile(
        model.train_step,
        *(model.STATE, model.TOKENS),
        mesh="data=4, model=2",
        layout=f"{model.MEGATRON}; embed: data; seq: model",
        dims=model.DIMS,
        progress=lambda _: None,
        **options,
    )
    # The maximum of the logits and an index column stand twice in the program (optax's loss); XLA makes one of equal operands.
    for d in differences(compiled.plan, compiled.collectives):
        assert d.merged
        assert d.bytes <= 2 * 8 * 16 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "mesh"), [("+ sequence parallel", "data=2, model=4"), ("context parallel", "data=1, model=8")]
)
def test_scheme(scheme, mesh):
    model = small_transformer
    step = model.step_of(rename=scheme == "context parallel")
    report = mp.check(step, *model.create(), layout=[model.LAYOUTS[scheme]], mesh=[mesh], dims=model.DIMS)
    assert report.ok
    assert len(report.rows) == 1
