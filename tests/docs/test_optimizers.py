"""Statements of the page on optimizers: with replicated matrices less is sent, to the byte of the compiled program."""

import blocks
import pytest
from collectives_of import planned_and_compiled

import meshpar as mp


@pytest.fixture(scope="module")
def page():
    """The names of the page's first block: the step, its arguments, layouts and dims."""
    names: dict = {"__name__": "optimizers"}
    first = blocks.blocks_of((blocks.ROOT / "docs" / "optimizers.md").read_text())[0]
    exec(compile(first.code, "optimizers.md", "exec"), names)
    return names


def test_what_is_planned_is_sent(page):
    sent = {}
    for name, layout in page["layouts"].items():
        _, planned, compiled = planned_and_compiled(
            page["muon_step"], page["state"], page["x"], layout=layout, dims=page["dims"], mesh="data=8"
        )
        sent[name] = sum(b * n for (_, b), n in compiled.items())
        assert sent[name] == sum(b * n for (_, b), n in planned.items())
    assert sent["FSDP, Muon by layers"] < 0.25 * sent["FSDP"]


def test_the_matmuls_of_the_iteration_send_nothing(page):
    def update(momentum):
        return {name: page["jax"].vmap(page["orthogonal"])(m) for name, m in momentum.items()}

    dims = {"momentum/*": "layers embed mlp"}
    momentum = page["state"]["opt"]
    replicated = mp.plan(update, momentum, mesh="data=8", layout="layers: data", dims=dims)
    split = mp.plan(update, momentum, mesh="data=8", layout="embed: data", dims=dims)
    assert replicated.bytes_sent == 0
    assert split.bytes_sent > 0
