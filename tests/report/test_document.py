"""Reports as text: at the width and in the colours of the terminal that shows them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.console import PLAIN_WIDTH
from meshpar._src.report.colours import AxisColours


@pytest.fixture(scope="module")
def plan():
    weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 1024), (64, 256)))
    dims = {"w": "embed mlp", "x": "batch embed"}
    where = {"mesh": "data=4, model=4", "topology": "v5e:4x4", "layout": "batch, embed: data; mlp: model"}
    return mp.plan(lambda w, x: jnp.tanh(x @ w), weights, x, dims=dims, **where)


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours(plan, terminal, variables, coloured, monkeypatch, tmp_path):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert ("\x1b[" in str(plan)) is coloured
    plan.save(tmp_path / "plan.txt")
    assert "\x1b[" not in (tmp_path / "plan.txt").read_text("utf8")  # a file has no colours


def test_colours_of_axes_do_not_depend_on_their_order():
    """``data`` and ``fsdp`` want the same colour; unknown axes may."""
    axes = ["fsdp", "data", "rows", "columns", "depth"]
    assert AxisColours(axes).of == AxisColours(reversed(axes)).of
    assert len(set(AxisColours(axes).of.values())) == 5


def test_output_in_a_pipe_has_the_width_of_columns(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert 80 < max(map(len, str(plan).splitlines())) <= 90
    monkeypatch.setenv("COLUMNS", "no number")
    assert 110 < max(map(len, str(plan).splitlines())) <= PLAIN_WIDTH


@pytest.mark.parametrize("term", ["dumb"])
def test_forced_colours_reach_every_report_and_no_spinner(term):
    """In a pipe, whatever the terminal's type; the progress of a check writes no control codes."""
    code = """
import jax.numpy as jnp, meshpar as mp
mp.virtual_devices(2)
print(mp.check(lambda x: x * 2, jnp.ones((4, 4)), layout="batch: data", mesh="data=2", dims={"x": "batch _"}))
"""
    env = os.environ | {"FORCE_COLOR": "1", "TERM": term}
    env.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "\x1b[" in done.stdout
    assert "\x1b[" not in done.stderr, done.stderr
    assert done.returncode == 0
