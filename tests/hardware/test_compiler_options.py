"""Options of the TPU compiler: the options of a plan, which collectives they make asynchronous, and their effect."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.compat.installed_versions import installed_version
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.compiler_options import GROUPS, TunedOptions, choose_options, read_tuned
from meshpar._src.hardware.topology import topology_devices
from meshpar._src.report.document import shown_text
from meshpar._src.report.plan_terminal_text import plan_renderable
from meshpar.errors import UnsupportedError

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, which is in libtpu"
)
GATHERS = next(g for g in GROUPS if "all-gather" in g.frees)
LAYERS, EMBED, MLP, BATCH = 4, 1024, 4096, 1024
DIMS = {"state/up": "layers embed mlp", "state/down": "layers mlp embed", "x": "batch embed"}
HOW = {"layout": "batch: data; embed: data", "dims": DIMS, "donate_argnames": "state"}
STATE = {"up": bf16(LAYERS, EMBED, MLP), "down": bf16(LAYERS, MLP, EMBED)}
X = bf16(BATCH, EMBED)


def step(state, x):
    def loss(w):
        def layer(x, w):
            return jnp.tanh(x @ w["up"]) @ w["down"], None

        return (jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - g.astype(p.dtype), state, grads), value


def planned(topology, **options):
    return mp.plan(step, STATE, X, mesh="data=-1", topology=topology, **HOW, **options)


def test_nothing_is_set_where_nothing_is_to_be_gained(mesh):
    for topology in ("h100:8", "tpu7x:2x2x1"):
        assert planned(topology).options.values == {}
    made = mp.jit(step, mesh=mesh, **HOW)
    assert made.plan(STATE, X).options.values == {}
    assert made.lower(STATE, X).compile().as_text()


def test_a_plan_shows_its_options_and_waits_for_what_they_leave():
    plan, off = planned("v5p:2x2x2"), planned("v5p:2x2x2", options="off")
    assert dict(GATHERS.values).items() <= plan.options.values.items()
    assert off.options.values == {}
    assert off.sync_collectives == CHIPS["v5p"].compiler.sync_collectives
    assert "all-gather" in off.sync_collectives - plan.sync_collectives
    assert plan.seconds < off.seconds
    assert json.loads(plan.to_json())["options"]["values"] == plan.options.values
    text = " ".join(shown_text(plan_renderable(plan, verbose=True)).split())
    assert all(group.name in text for group in plan.options.groups)
    assert all(f"{name}={value}" in text for name, value in plan.options.values.items())
    assert plan.replan(options="off").options.values == {}
    assert plan.replan(layout="batch: data").options.mode == "auto"


def test_what_the_user_gives_wins():
    name = next(iter(GATHERS.values))
    plan = planned("v5p:2x2x2", compiler_options={name: False, "xla_mine": 3})
    assert plan.options.values[name] is False
    assert plan.options.values["xla_mine"] == 3
    assert "all-gather" in plan.sync_collectives
    by_hand = planned("v5p:2x2x2", options=None, compiler_options=dict.fromkeys(GATHERS.values, "true"))
    assert by_hand.options.groups == ()
    assert "all-gather" not in by_hand.sync_collectives
    assert planned("v5p:2x2x2", options="off").replan().sync_collectives == CHIPS["v5p"].compiler.sync_collectives


def test_options_that_a_compiler_does_not_know_are_left_out_as_a_group_and_said():
    name = next(iter(GATHERS.values))
    chosen = choose_options(CHIPS["v5p"], {"all-gather"}, unknown=lambda values: {name: "no such option"})
    assert not set(GATHERS.values) & set(chosen.values)
    assert (GATHERS, "no such option") in chosen.left_out
    assert "all-gather" in chosen.sync_collectives(CHIPS["v5p"])


TUNED = TunedOptions(
    "llama.py", "v5p", installed_version("libtpu") or "0.0.42", {"xla_tpu_rwb_fusion": False}, 0.8, 1.0
)


def test_a_file_of_tuned_options_adds_to_those_of_the_plan(tmp_path, mesh):
    TUNED.write(file := tmp_path / "tuned.json")
    plan, auto = planned("v5p:2x2x2", options=file), planned("v5p:2x2x2")
    assert plan.options.values == auto.options.values | TUNED.values
    assert planned("v5p:2x2x2", options=str(file), compiler_options={"xla_tpu_rwb_fusion": True}).options.values == (
        auto.options.values | {"xla_tpu_rwb_fusion": True}
    )
    assert auto.replan(options=file).options.values == plan.replan(layout="batch: data; embed: data").options.values
    assert json.loads(plan.to_json())["options"]["mode"] == str(file)
    assert "llama.py: 1000.0 → 800.0 ms" in json.loads(plan.to_json())["options"]["groups"][-1]["measured"]
    made = mp.jit(step, mesh=mesh, options=file, **HOW)  # on CPUs, which do not know the option
    made.lower(STATE, X).compile()
    assert "searched for v5p, not for this machine" in " ".join(str(made.plan(STATE, X)).split())


@pytest.mark.parametrize(
    ("chip", "compiler", "says"),
    [("v5e", "0.0.42", "searched for v5p, not for v5e"), ("v5p", "0.0.41", "0.0.42 is installed")],
)
def test_tuned_options_of_another_chip_or_compiler_are_left_out_and_said(chip, compiler, says, monkeypatch):
    monkeypatch.setattr("meshpar._src.hardware.compiler_options.installed_version", lambda package: "0.0.42")
    tuned = dataclasses.replace(TUNED, compiler=compiler)
    chosen = choose_options(CHIPS[chip], {"all-gather"}, tuned)
    assert chosen.groups == choose_options(CHIPS[chip], {"all-gather"}).groups
    (group, reason), *_ = chosen.left_out
    assert (group.values, says in reason) == (TUNED.values, True)


def test_files_that_are_no_tuned_options(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name in ("other.json", "none.json"):
        with pytest.raises(UnsupportedError, match="not a file of tuned options"):
            read_tuned(tmp_path / name)


def test_a_mode_that_does_not_exist_is_refused(mesh):
    with pytest.raises(UnsupportedError, match="compiler_options="):
        mp.jit(step, mesh=mesh, options={"xla_mine": 3}, **HOW)
    with pytest.raises(UnsupportedError, match="there is no options='atuo'"):
        planned("v5p:2x2x2", options="atuo")


@tpu
@pytest.mark.parametrize("chip", sorted(c.name for c in CHIPS.values() if c.compiler.option_groups))
def test_the_compiler_at_hand_knows_every_option_of_the_table(chip):
    from meshpar._src.compat.compile_only_devices import unknown_options

    (device, *_) = topology_devices(f"{chip}:{'x'.join(map(str, CHIPS[chip].shapes(4)[0]))}")
    values = {k: v for g in GROUPS if g.name in CHIPS[chip].compiler.option_groups for k, v in g.values.items()}
    refused = unknown_options(device, {**values, "xla_tpu_no_such_option": True})
    assert list(refused) == ["xla_tpu_no_such_option"]
