"""Public names of ``meshpar``, and messages for former names."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.cli import main


def test_dir_lists_the_public_names():
    shown = {name for name in dir(mp) if not name.startswith("_")}
    assert shown == set(mp.__all__)
    assert all(hasattr(mp, name) for name in mp.__all__)
    assert all(isinstance(getattr(mp.types, name), type) for name in mp.types.__all__)
    assert all(issubclass(getattr(mp.errors, name), mp.MeshparError | UserWarning) for name in mp.errors.__all__)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tune", "calibrate"), ("accumulate", "accumulate_gradients"), ("microbatches", "microbatches_for"),
        *((name, f"errors.{name}") for name in mp.errors.__all__ if name not in ("MeshparError", "JoinWarning")),
        *((name, f"types.{name}") for name in mp.types.__all__),
    ],
)  # fmt: skip
def test_a_former_name_says_what_it_is_called_now(old: str, new: str):
    with pytest.raises(AttributeError, match=rf"`mp\.{new}`"):
        getattr(mp, old)
    assert not hasattr(mp, old)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'meshpar' has no attribute 'jitt'"):
        mp.jitt  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("old", "new"),
    [("most", "max_plans"), ("seconds", "time_limit"), ("margin", "memory_fraction"), ("vary", "choices"), ("axes", "max_axes")],
)  # fmt: skip
def test_a_former_option_of_search_is_a_type_error(old: str, new: str, capsys: pytest.CaptureFixture[str]):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(TypeError, match=rf"`{old}` is now `{new}`"):
        mp.search(jnp.sin, x, topology="v5e:2x2", dims={"x": "a b"}, **{old: 1})
    for flag in ([f"--{old}", "1"], [f"--{old}=1"]):
        with pytest.raises(SystemExit) as ended:
            main(["search", "anything.py:f", "--topology", "v5e:2x2", *flag])
        assert ended.value.code == 2
        assert f"--{new.replace('_', '-')}" in capsys.readouterr().err


def test_an_argument_of_the_step_may_have_the_name_of_a_former_option():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def step(x: jax.Array, most: jax.Array) -> jax.Array:
        return x + most

    found = mp.search(step, x, most=x, topology="v5e:2x2", dims={"x": "a b"}, max_plans=2, progress=False)
    assert [h.path for h in found.plan().inputs] == ["x", "most"]


def test_the_former_command_names_the_new_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "anything.py:f"])
    assert ended.value.code == 2
    assert "`calibrate`" in capsys.readouterr().err


def test_the_import_loads_no_notebook_server_or_module_library():
    """Of the modules that ``import meshpar`` adds to jax, flax and optax: the slow ones are loaded when they are used."""
    program = """
import json, sys
import jax, flax, optax
before = set(sys.modules)
import meshpar
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = set(json.loads(run.stdout))
    assert "meshpar.api" in added
    assert not added & {
        "IPython",
        "http.server",
        "flax.nnx",
        "treescope",
        "anywidget",
        "orbax.checkpoint",
        "rich.progress",
    }
