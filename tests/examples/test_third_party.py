"""Models from packages, unedited: the same state as the unsharded run, from path patterns alone."""

import jax
import pytest

import meshpar as mp

third_party = pytest.importorskip("third_party")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("gpt2", ["batch: data", "batch: data; heads, mlp, vocab: model; embed: data"]),
        ("resnet", ["batch: data; features, classes: model"]),
    ],
)
def test_same_state(name, layouts):
    case = third_party.CASES[name]()
    state = jax.jit(case.create)(jax.random.key(0))
    dims = {f"state/{pattern}": names for pattern, names in case.weights.items()} | case.data
    report = mp.check(
        case.step, state, case.batch, layouts=layouts, meshes=["data=4, model=2", "data=2, model=2, idle=2"], dims=dims
    )
    assert report.ok


def test_weights_are_split(capsys):
    losses = third_party.main(["gpt2", "--steps", "2"])["gpt2"]
    assert losses[1] < losses[0]
    text = capsys.readouterr().out
    assert "mlp:model embed:data" in text
    assert "vocab:model embed:data" in text
