"""The command line: targets, defaults, reports, exit statuses, and what bad input says."""

import contextlib
import csv
import functools
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.ansi import AnsiDecoder

import meshpar as mp
from meshpar._src.entry import cli
from meshpar._src.entry.cli import command_parser, main
from meshpar._src.entry.cli_target import concrete, load_target
from meshpar._src.lab.lab import Lab
from meshpar._src.units import format_memory, format_seconds
from meshpar.errors import TargetError

TARGETS = """
import jax
import jax.numpy as jnp
import numpy as np

LAYOUTS = {"fsdp": "batch: data; embed: data", "dp": "batch: data"}
DIMS = {"state/params/w": "embed mlp", "state/opt/m": "embed mlp", "batch": "batch embed"}

def step(state, batch):
    loss, g = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(batch @ w)).mean())(state["params"]["w"])
    m = 0.9 * state["opt"]["m"] + g
    return {"params": {"w": state["params"]["w"] - 0.1 * m}, "opt": {"m": m}}, loss

def small(batch=16, embed=8, mlp=32):
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((embed, mlp), (batch, embed)))
    return step, ({"params": {"w": w}, "opt": {"m": w}}, x), DIMS

def nameless():
    return (lambda x: x * 2), (jax.ShapeDtypeStruct((8, 8), jnp.float32),), {"x": "rows columns"}

def twice(times=1):
    def more(state, batch):
        for _ in range(times):
            state, loss = step(state, batch)
        return state, loss

    return more, *small()[1:]

def wrong():
    return step

def without_dims():
    return small()[:2]

def pair():
    return step, 1

def stopped():
    raise KeyboardInterrupt

def broken():
    raise RuntimeError("no such weights")

def broken_step():
    return (lambda x: x @ x), (jax.ShapeDtypeStruct((2, 3), jnp.float32),), {"x": "a b"}

class Config:
    def __init__(self, layers=2):
        self.layers = layers

def configured(batch=8, **changes):
    return small(batch + Config(**changes).layers)

def every_kind():
    s = jax.ShapeDtypeStruct
    args = {"params": {"w": s((4, 6), jnp.bfloat16), "scale": s((6,), jnp.float32)}, "opt": {"nu": s((4, 6), jnp.float32)},
            "tokens": s((5, 7), jnp.int32), "mask": s((9,), jnp.bool_), "key": s((), jax.random.key(0).dtype),
            "count": s((), jnp.int32), "table": np.arange(3)}
    return (lambda x: x), (args,), {}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("targets") / "some_targets.py"
    path.write_text(textwrap.dedent(TARGETS))
    return str(path)


USERS_FILE = """
    import jax, jax.numpy as jnp

    def update(weights, x):
        def loss(weights):
            return (jax.nn.relu(x @ weights["up"]) @ weights["down"]).var()
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    def example(rows=16):
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        return {"up": shape(32, 128), "down": shape(128, 8)}, shape(rows, 32)
"""


NNX_FILE = """
    import jax, jax.numpy as jnp
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            self.up = nnx.Linear(16, 64, kernel_init=init, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(64, 16, use_bias=False, rngs=rngs)

    def target():
        model = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
        loss = lambda model, x: (model.down(nnx.relu(model.up(x))) ** 2).mean()
        return loss, (model, jax.ShapeDtypeStruct((8, 16), jnp.float32))

    def training():
        import optax
        create = lambda: (model := Mlp(nnx.Rngs(0)), nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
        loss, (model, x) = target()
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(loss)(model, x))
        return step, (*nnx.eval_shape(create), x)
"""


@pytest.fixture
def run(capsys, target):
    def call(text: str, *more: str) -> tuple[int, str, str]:
        """(status, output, errors) of ``COMMAND FUNCTION …``, where the function is one of the targets."""
        command, function, *words = [*shlex.split(text), *more]
        capsys.readouterr()
        return main([command, f"{target}:{function}", *words]), *capsys.readouterr()

    return call


@pytest.fixture
def command(capsys):
    """(status, output, errors) of a command line."""
    return lambda *argv: (capsys.readouterr(), (main(argv), *capsys.readouterr()))[1]


@pytest.fixture
def planned(run):
    """The plan that ``--json`` prints."""

    def call(text: str, *more: str) -> dict:
        status, out, _ = run(f"plan {text} --json", *more)
        assert status == 0
        return json.loads(out)

    return call


# -- plan


def test_defaults_are_one_axis_over_the_topology_and_fsdp_and_are_said(run):
    status, out, err = run("plan small --topology v5e:2x4")
    assert status == 0
    assert err == "default  mesh: data=8, one axis over all of v5e:2x4\ndefault  layout: batch: data; embed: data\n"
    assert "layout    batch, embed: data\n" in out
    assert "8 devices" in out
    assert "a step takes" in out


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("hsdp", "slice=2, data=8"),
        ("zero1", "data=16"),
        ("batch: dp; embed: tp", "dp=4, tp=4"),
        ("mlp: model; batch: slice+data", "slice=2, data=2, model=4"),
    ],
)
def test_the_default_mesh_of_two_nodes_has_the_axes_of_the_layout(run, layout, mesh):
    status, out, err = run(f"plan small --topology '2x h100:8' --layout '{layout}'")
    assert (status, f"default  mesh: {mesh}, " in err) == (0, True)
    assert f"layout {mp.Layout(layout)} " in " ".join(out.split())


@pytest.mark.parametrize(("mlp", "embed"), [(32, "data"), (40960, "slice+data")])
def test_the_default_layout_of_two_slices_is_hsdp_where_it_fits(run, mlp, embed):
    """On 2 × 4 chips of 15.75 GiB, with 8 MiB or 10 GiB of weights, and as much momentum."""
    status, _, err = run(f"plan small --topology '2x v5e:2x2' --set embed=65536,mlp={mlp}")
    assert err.startswith("default  mesh: slice=2, data=4, the slices of 2x v5e:2x2, and one axis in each\n")
    assert err.endswith(f"default  layout: batch: slice+data; embed: {embed}\n")
    assert (status, "does not fit" in err) == (0, embed != "data")


def test_names_in_metadata_of_nnx_and_names_that_are_inferred_beside_them(command, tmp_path):
    (tmp_path / "some_nnx.py").write_text(textwrap.dedent(NNX_FILE))
    where = ("--mesh", "data=4", "--layout", "batch: data", "--json")
    for more, down in (((), "mlp _"), (("--dims", "auto"), "mlp classes")):
        status, out, _ = command("plan", f"{tmp_path / 'some_nnx.py'}:target", *where, *more)
        dims = {row["path"]: row["dims"] for row in json.loads(out)["inputs"]}
        assert (status, dims) == (0, {"model/up/kernel": "embed mlp", "model/down/kernel": down, "x": "batch embed"})


def test_nnx_objects_that_an_optimizer_updates_are_donated(command, tmp_path):
    (tmp_path / "some_nnx.py").write_text(textwrap.dedent(NNX_FILE))
    where = ("--mesh", "data=4", "--layout", "batch: data")
    for function, label in (("training", "parameters (donated)"), ("target", "parameters ")):
        status, out, _ = command("plan", f"{tmp_path / 'some_nnx.py'}:{function}", *where)
        assert (status, label in out, "donate_argnames" in out) == (0, True, False)
        assert ("(donated)" in out) == (function == "training")


def test_plan_as_json_and_as_a_page(run, tmp_path):
    page = tmp_path / "plan.html"
    how = "plan small --mesh 'data=4, model=2' --layout 'batch: data; mlp: model'"
    status, out, err = run(how, "--json", "--html", str(page))
    plan = json.loads(out)
    assert (status, err) == (0, "")
    assert plan["mesh"] == {"data": 4, "model": 2}
    assert plan["layout"] == "batch: data; mlp: model"
    assert plan["time"] is None
    assert "mlp:model" in page.read_text("utf8")


def test_the_state_is_overwritten_unless_other_arguments_are_named(planned):
    def peak(more: str = "") -> float:
        return planned(f"small --mesh data=1 --layout '' --set mlp=4096 {more}")["memory"]["peak"]

    assert peak() == peak("--donate state") < peak("--donate batch")


def test_what_does_not_fit_says_so_first_and_has_status_one(run):
    big = "plan small --topology v5e:2x4 --layout dp --set mlp=2000000000"
    status, out, _ = run(big)
    assert status == 1
    assert out.startswith("DOES NOT FIT  each device needs ")
    assert out.splitlines()[1].startswith("fix  no layout fits: ")
    assert not re.search(r"^  step |MFU", out, re.MULTILINE)
    assert run(f"{big} --json")[0] == 1
    *_, purpose, following = out.splitlines()
    command = shlex.split(following)[1:]
    assert purpose == "next  enough devices for the state:"
    where = re.search(r"They fit on \d+ devices: (.*)", out)[1]
    assert (command[0], command[command.index("--topology") + 1]) == ("search", where)


# -- diff, check, compile


def test_the_next_command_after_a_plan(command, monkeypatch):
    """A known scheme that fits or is faster, with its figures, where nothing fits also on one axis; else a search with the user's
    options of the step. Only commands are longer than the terminal."""
    llama = str(Path(__file__).parent.parent / "examples" / "llama.py") + ":llama3_8b"
    monkeypatch.setenv("COLUMNS", "60")
    where = ("--topology", "v5e:4x4", "--set", "batch=16, layers=2", "--mesh")
    options = ["--names", "head_dim=_,layers=_", "--overlap", "off", "--strict", "--donate", "state"]
    cases = (
        ("dp=16", "batch: dp"),
        ("data=16", "fsdp", *options),
        ("data=4, model=4", "batch: data", "--set", "batch=256"),
    )
    outputs = (command("plan", llama, *where, mesh, "--layout", *more)[1] for mesh, *more in cases)
    (slow, again), (fast, search), (misfit, one_axis) = (out.splitlines()[-2:] for out in outputs)
    assert mp.Layout(shlex.split(again)[-1]).rules[0].axes == ("dp",)
    assert shlex.split(one_axis)[-4:] == ["--mesh", "data=16", "--layout", "fsdp"]
    for purpose, line in ((slow, again), (misfit, one_axis)):
        found = json.loads(command(*shlex.split(line)[1:], "--json")[1])
        assert f"next  {format_seconds(found['time']['seconds'])} a step" in purpose
        assert f"{found['memory']['peak'] / 2**30:.2f} GiB of memory:" in purpose
    assert fast == "next  other meshes and layouts:"
    assert search.startswith("      meshpar search ")
    assert set(options) < set(shlex.split(search))


def test_diff(run, tmp_path):
    page = tmp_path / "diff.html"
    status, out, _ = run("diff small --mesh data=4 --layout dp --layout fsdp --html", str(page))
    assert status == 0
    assert "embed:data mlp" in out
    assert "<h1>Two plans</h1>" in page.read_text("utf8")
    _, out, _ = run("diff small --mesh data=4 --mesh data=8 --layout dp --json")
    assert (json.loads(out)["a"]["mesh"], json.loads(out)["b"]["mesh"]) == ({"data": 4}, {"data": 8})
    status, _, err = run("diff small --mesh data=4" + " --layout dp" * 3)
    assert (status, "stand once or" in err) == (2, True)


def test_run_plan(run, tmp_path):
    (tmp_path / "prices.toml").write_text("v5e = 1.5")
    page, prices = str(tmp_path / "run.html"), str(tmp_path / "prices.toml")
    where = "run-plan small --layout dp --step-tokens 1e3 --topologies 'v5e:2x2, 2x v5e:2x2'"
    status, out, _ = run(f"{where} --tokens 1e9 --mtbf 40000h --json --price", prices, "--html", page)
    assert status == 0
    found = json.loads(out)
    rows = [(r["topology"], r["mesh"], r["chips"]) for r in found["rows"]]
    assert rows == [("v5e:2x2", "data=4", 4), ("2x v5e:2x2", "data=8", 8)]
    assert found["options"]["mtbf"] == 40000 * 3600
    assert found["rows"][0]["job"]["steps"] == 10**6
    assert found["rows"][0]["cost"]["median"] == pytest.approx(found["rows"][0]["days"]["median"] * 24 * 4 * 1.5)
    assert 'data-draw="drawRuns"' in (tmp_path / "run.html").read_text("utf8")
    anywhere = where.replace("--layout dp ", "")
    status, out, err = run(f"{anywhere} --search --tokens 1e9 --restart 0 --compile-time 0 --json")
    assert status == 0, err
    searched = json.loads(out)
    assert searched["name"] == found["name"] == "small"
    for row, fixed in zip(searched["rows"], found["rows"], strict=True):
        assert row["job"]["step"] <= fixed["job"]["step"]
    status, _, err = run(f"{where} --search --tokens 1e9")
    assert (status, "--search chooses mesh and layout" in err) == (2, True)
    status, _, err = run(f"{where} --tokens 1e9 --mtbf soon")
    assert (status, "'soon' is no duration" in err) == (2, True)
    status, _, err = run("run-plan small --layout dp --tokens 1e9 --topologies v5e:2x2")
    assert (status, "--step-tokens" in err) == (2, True)


def test_other_names_for_those_of_the_model():
    args = command_parser().parse_args(["plan", "file.py:step", "--names", "act_batch = batch, act_emb=_"])
    assert args.names == {"act_batch": "batch", "act_emb": "_"}


def test_a_step_with_a_function_of_its_arguments(command, tmp_path):
    """A file without a target: the step and its arguments, and the names that `names` writes."""
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USERS_FILE))
    names = str(tmp_path / "names.json")
    assert command("names", f"{file}:update", "--args", "example", "--write", names)[0] == 0
    where = ("--topology", "v5e:2x4", "--mesh", "data=8", "--set", "rows=64", "--json")
    own = command("plan", f"{file}:update", "--args", "example", "--layout", "batch: data", *where)
    written = json.loads(Path(names).read_text())
    assert written == {"*/up": "embed mlp", "*/down": "mlp classes", "x": "batch embed"}
    Path(names).write_text(json.dumps({**written, "x": "rows embed"}))
    given = command(
        "plan", f"{file}:update", "--args", f"{file}:example", "--dims", names, "--layout", "rows: data", *where
    )
    sent = [sum(c["bytes"] * c["count"] for c in json.loads(out)["collectives"]) for _, out, _ in (own, given)]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "--args names a function that returns its arguments"),
        (("--args", "exampel"), "did you mean `example`?"),
        (("--args", "example", "--dims", "no-such-file"), "`meshpar names TARGET --write FILE` writes one"),
    ],
)
def test_a_step_without_its_arguments(command, tmp_path, more, says):
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USERS_FILE))
    status, _, err = command("plan", f"{file}:update", "--topology", "v5e:2x2", *more)
    assert status == 2
    assert says in " ".join(err.split())


def test_an_interrupt_is_no_traceback(run):
    assert run("plan stopped --topology v5e:2x2") == (130, "", "interrupted\n")


def test_tune_and_what_it_fitted(run, tmp_path):
    kept, page = tmp_path / "here.json", tmp_path / "tuned.html"
    status, out, err = run(f"calibrate small --rounds 1 --calibration {kept} --html {page}")
    assert (status, err) == (0, f"wrote {page}\n")
    assert {"batch: data", "batch, embed: data"} <= {line.strip() for line in out.splitlines()}
    assert page.read_text().count("<tr>") == 3
    assert "calibrated on cpu, jaxlib" in run(f"plan small --mesh data=8 --calibration {kept}")[1]
    _, out, _ = run(f"compile small --mesh data=4 --layout dp --calibration {kept} --json")
    assert json.loads(out)["calibration"]["measured_on"].startswith("cpu, jaxlib")
    _, out, _ = run("calibrate small --rounds 1 --mesh 'data=4, model=2' --layout dp --json")
    assert [r["layout"] for r in json.loads(out)["rows"]] == ["batch: data"]
    status, _, err = run(f"search small --topology v5e:2x2 --calibration {kept}")
    assert (status, "the calibration is of cpu" in " ".join(err.split())) == (2, True)
    kept.write_text("{}")
    status, _, err = run(f"calibrate small --calibration {kept}")
    assert (status, "is not a calibration file" in " ".join(err.split())) == (2, True)


def test_check(run):
    status, out, _ = run("check small --layout fsdp --mesh 'data=4, idle=2'")
    assert status == 0
    assert out.splitlines()[0].startswith("✓ 1 of 1 runs of `batch, embed: data` equal")
    assert re.match(r"✓ data=4, idle=2  (no difference|largest difference .* in )", out.splitlines()[1])
    status, out, _ = run("check small --layout fsdp --layout dp --mesh data=4 --lowering both")
    assert (status, "4 of 4 runs equal" in out, " jit " in out) == (0, True, True)
    assert "✓ data=4  batch, embed: data  " in out
    status, out, _ = run("check small --lowering shard_map --devices 4 --json")
    found = json.loads(out)
    assert (status, found["ok"]) == (0, True)
    (row,) = found["rows"]
    assert (row["mesh"], row["layout"], row["lowering"]) == ("data=4", "batch, embed: data", "shard_map")


def test_prove(run):
    status, out, _ = run("prove small --layout fsdp --mesh 'data=4, idle=2'")
    assert status == 0
    assert out.startswith("✓ proven")
    status, out, _ = run("prove small --layout fsdp --mesh data=4 --json")
    found = json.loads(out)
    assert (status, found["status"], found["share"], found["failed"]) == (0, "proven", 1.0, [])
    status, _, err = run("prove small --layout fsdp --mesh data=4 --lowering jit")
    assert status != 0
    assert "XLA partitions the program" in err


def test_a_check_that_fails_has_status_one(run, monkeypatch):
    from meshpar._src.verify.check import Report, Row

    wrong = Row("data=8", "batch: data", "jit", "0/w", 0.5, 3, error=mp.errors.CheckError("0/w differs"))
    raised = []
    monkeypatch.setattr(mp, "check", lambda *_, raises, **__: raised.append(raises) or Report(rows=[wrong]))
    status, out, err = run("check small --layout dp")
    assert status == 1
    assert "default  mesh: all shapes of 8 devices, since no --mesh is given" in err
    assert raised == [False]  # differences are in the report
    assert [line[:26] for line in out.splitlines()[:2]] == ["✗ 0 of 1 runs of `batch: d", "✗ data=8  largest differen"]


def test_compile_for_as_many_cpus_as_the_mesh_has(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path))
    status, out, err = run("compile small --mesh data=4 --layout fsdp --lowering shard_map --json")
    found = json.loads(out)
    assert err.startswith("compiling step for cpu:")  # no terminal, and no silence
    assert status == 0
    assert found["topology"].startswith("cpu:")
    assert found["lowering"] == "shard_map"
    assert found["memory"]["peak"] > 0
    assert found["bytes_sent"] == pytest.approx(found["planned"]["bytes_sent"])
    html = tmp_path / "c.html"
    status, out, _ = run("compile small --mesh data=4 --layout fsdp --lowering shard_map --html", str(html))
    page = html.read_text("utf8")
    assert (status, "http" in page, "<h1>step " in page) == (0, False, True)
    assert f">{format_memory(found['memory']['peak'])}</td>" in page
    assert [op in page for op in ("all-gather", "reduce-scatter")] == [
        op in out for op in ("all-gather", "reduce-scatter")
    ]


def test_what_the_compiler_refuses_has_status_one(run, monkeypatch):
    def refuse(*_, **__):
        raise mp.errors.OutOfMemoryError("step needs 200 GB of the 95 GB of a device")

    monkeypatch.setattr(mp, "compile", refuse)
    status, _, err = run("compile small --mesh data=4 --layout fsdp")
    assert status == 1
    assert err.endswith("OutOfMemoryError: step needs 200 GB of the 95 GB of a device\n")


def test_tuned_options_are_written_and_read(run, monkeypatch, tmp_path):
    file = tmp_path / "tuned.json"

    def compile_with(*_, compiler_options, **how):
        assert how["effort"] == "full"
        seconds = 0.9 if "xla_latency_hiding_scheduler_rerun" in compiler_options else 1.0
        return SimpleNamespace(scheduled_seconds=seconds, memory=SimpleNamespace(peak=1))

    monkeypatch.setattr(mp, "compile", compile_with)
    status, out, err = run("tune-options small --topology v5p:2x2x2 --out", str(file), "--json")
    found = json.loads(out)
    assert (status, found["values"]) == (0, {"xla_latency_hiding_scheduler_rerun": 2}), err
    assert (found["seconds"], found["auto_seconds"], found["chip"]) == (0.9, 1.0, "v5p")
    status, out, _ = run("plan small --topology v5p:2x2x2 --options", str(file), "--json")
    assert json.loads(out)["options"]["values"]["xla_latency_hiding_scheduler_rerun"] == 2
    monkeypatch.setattr(
        mp, "compile", lambda *_, **__: SimpleNamespace(scheduled_seconds=1.0, memory=SimpleNamespace(peak=1))
    )
    assert run("tune-options small --topology v5p:2x2x2")[0] == 1
    status, _, err = run("tune-options small --mesh data=4")
    assert (status, "only the TPU compiler" in err) == (2, True)


# -- bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("smal --mesh data=4", "has no function `smal`\n  fix     did you mean `small`"),
        ("wrong --mesh data=4", "returned a function\n  fix     it returns (step, arguments)"),
        ("pair --mesh data=4", "fix     it returns (step, arguments)"),
        ("step --mesh data=4", "it returns (step, arguments)"),
        ("broken --mesh data=4", "fails: RuntimeError: no such weights\n  at      {}:"),
        ("broken_step --mesh data=4 --layout 'a: data'", "fails: TypeError: dot_general"),
        ("small", "no machine is given\n  fix     --topology"),
        ("small --topology v5q:2x2", "topology 'v5q:2x2' is not known"),
        ("small --mesh data=4 --layout fspd", "the target's LAYOUTS are: fsdp, dp"),
        ("small --mesh data=4 --layout megatrn", "did you mean `megatron`?"),
        ("small --mesh data=4 --layout batch=data", "write `:` in rules: `batch: data`"),
        ("small --mesh data=4 --layout 'batch data'", "fix did you mean `batch: data`?"),
        (
            "small --mesh dp_replicate=2,dp_shard=2 --layout hsdp",
            "of the scheme `hsdp` names axis `slice`, which the mesh (dp_replicate=2, dp_shard=2) does not have "
            'rule batch: slice+data fix --mesh "slice=2, data=2" or --layout "batch: dp_replicate+dp_shard; embed?: dp_shard"',
        ),
        (
            "small --mesh dp_replicate=2,dp_shard=2 --layout 'batch: slice+data'",
            "fix write `batch: dp_replicate+dp_shard`",
        ),
        ("small --mesh data=4 --layout 'embd: data'", "did you mean `embed`?"),
        ("small --mesh data=3 --layout fsdp", "does not divide over data=3"),
        ("small --mesh data=4 --layout 'mlp: tp'", 'give the mesh that axis: --mesh "data=2, tp=2"'),
        ("small --mesh data=4 --layout 'batch: dp'", "  fix     write `batch: data`"),
        ("small --mesh data=4 --topology v5e:2x4", 'make the sizes multiply to 8: --mesh "data=8", or'),
        ("small --mesh data=4 --set mpl=3", "keyword argument 'mpl'\n  fix     did you mean `mlp`?"),
        ("configured --mesh data=4 --set layer=1", "  fix     did you mean `layers`?"),
        ("small --mesh data=4 --set mlp", "'mlp' is not `name=value`"),
        ("nameless --mesh data=4", "neither a dim `batch` nor a dim `embed`"),
        ("small --mesh data=4 --html /no/such/folder/plan.html", "there is no folder /no/such/folder"),
        ("small --mesh data=4 --html plan.pdf", "cannot be saved as `.pdf`"),
    ],
)
def test_bad_input_says_what_to_write_instead(run, target, words, says):
    status, out, err = run(f"plan {words}")
    assert (status, out) == (2, "")
    assert " ".join(says.replace("{}", target).split()) in " ".join(err.split())
    assert "Traceback" not in err


def test_an_error_in_a_terminal_has_colours_and_is_wrapped_in_its_column(run, monkeypatch):
    _, _, plain = run("plan small --mesh data=3 --layout fsdp")
    assert not [line for line in plain.splitlines() if line != line.rstrip()]
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    run("plan small --mesh data=3 --layout fsdp")
    text = terminal.getvalue()
    assert "\x1b[1;31mDivisibilityError\x1b[0m: " in text
    lines = [line.plain.rstrip() for line in AnsiDecoder().decode(text[text.index("\x1b[1;31mDiv") :])]
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()) == " ".join(plain[plain.index("DivisibilityError") :].split())
    fixes = lines[next(k for k, line in enumerate(lines) if line.startswith("  fix")) :]
    assert all(line[:10] in ("  fix     ", " " * 10) for line in fixes if line)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("nowhere.py:small", "there is no file nowhere.py"),
        ("no_such_module:small", "there is no module no_such_module"),
        (__file__, "is not `file.py:function`"),
        ("pathlib:Path", "Path is a class"),
    ],
)
def test_a_target_that_is_not_there(where, says):
    with pytest.raises(TargetError, match=re.escape(says)):
        load_target(where)


def test_a_check_of_something_huge_is_refused(run):
    status, _, err = run("check small --layout dp --set mlp=1000000000")
    assert status == 2
    assert "its arguments are 59.60 GiB" in " ".join(err.split())
    sizes = re.search(r'smaller sizes: --set "(.*)"', err)[1]
    assert sizes == "mlp=64"
    assert run(f"check small --layout dp --mesh data=2 --set '{sizes}'")[0] == 0


def test_debug_lets_the_exception_through(target):
    with pytest.raises(TargetError) as e:
        main(["plan", f"{target}:broken", "--mesh", "data=4", "--debug"])
    assert isinstance(e.value.__cause__, RuntimeError)


# -- targets


def test_a_target_in_a_package(monkeypatch, target):
    monkeypatch.chdir(Path(target).parent)
    assert load_target("some_targets:small", {"mlp": 4}).args[0]["params"]["w"].shape == (8, 4)


def test_a_target_that_is_loaded_again_adds_nothing_to_the_path(monkeypatch, target):
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_target(f"{target}:small")
    before = list(sys.path)
    for _ in range(3):
        load_target(f"{target}:small")
    assert sys.path == before


def test_arguments_get_numbers_that_a_step_can_use(target):
    (args,) = concrete(load_target(f"{target}:every_kind"), ints=4)
    (again,) = concrete(load_target(f"{target}:every_kind"), ints=4)
    assert str(args["params"]["w"].dtype) == "bfloat16"
    assert float(abs(args["params"]["w"].astype("float32")).max()) > 0
    assert not args["opt"]["nu"].any()  # second moments must not be negative
    assert set(args["tokens"].flatten().tolist()) <= set(range(4))
    assert len(set(args["tokens"].flatten().tolist())) > 1
    assert args["mask"].dtype == bool
    assert jax.random.uniform(args["key"], ()) >= 0
    assert int(args["count"]) == 0
    assert args["table"].tolist() == [0, 1, 2]
    assert (args["params"]["w"] == again["params"]["w"]).all()


def test_search_prints_the_choice_the_next_command_and_json(run, capsys):
    small = "search small --topology v5e:2x2 --max-axes 2 --layout fsdp"
    status, out, _ = run(small)
    assert status == 0
    assert out.startswith("search  ")
    found = json.loads(run(f"{small} --json")[1])
    assert found["fits"]
    assert any(row["name"] == "yours" and row["layout"] == "batch, embed: data" for row in found["rows"])
    again = shlex.split(out.splitlines()[-1])[1:]
    assert again[0] == "plan"
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["seconds"] == pytest.approx(found["best"]["seconds"])
    status, out, _ = run(f"{small} --memory-fraction 1e-9")
    assert status == 1
    assert "NOTHING FITS" in out
    assert run(f"{small} --forbid batsh")[0] == 2


def test_search_varies_the_target_and_writes_a_page(run, tmp_path):
    page = tmp_path / "found.html"
    choices = "--choices times=1,3 --choices overlap=off,auto"
    status, out, _ = run(f"search twice --topology v5e:2x2 --max-axes 1 {choices} --html {page} --json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert {r["variant"] for r in rows} == {f"times={n}, overlap={m}" for n in (1, 3) for m in ("off", "auto")}
    assert json.loads(out)["best"]["variant"].startswith("times=1")
    assert "<svg" in page.read_text()
    small = "search small --topology v5e:2x2 --choices"
    assert "changes the arguments" in run(small, "batch=8,16")[2]
    for bad in ("times", "=1", "a=1,b=2"):
        assert run(small, bad)[0] == 2


def test_the_lab_is_served_until_ctrl_c(target):
    """By ``python -m meshpar``. What is started in the background of a script ignores Ctrl-C, and so would what it starts."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; import runpy; runpy.run_module('meshpar', run_name='__main__')"
    words = ["lab", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp", "--no-browser"]
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=20) as page:
                assert f"meshpar lab: {target}:small" in page.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_lab_that_cannot_be_opened(run):
    status, _, errors = run("lab small --layout fsdp --no-browser")
    assert status == 2
    assert "no machine is given" in errors
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        status, _, errors = run(f"lab small --mesh data=4 --port {port} --no-browser")
    assert status == 2
    assert port in errors


# -- every option arrives


class Arrived(mp.errors.MeshparError):
    """What a command calls was called; raised in its place."""


EVERY = [
    ("--mesh data=4", "mesh", "data=4"),
    ("--layout 'embed: data'", "layout", "embed: data"),
    ("--topology v5e:2x2", "topology", "v5e:2x2"),
    ("--donate state --donate batch", "donate_argnames", ["state", "batch"]),
    ("--overlap off", "overlap", "off"),
    ("--schedule gpipe", "schedule", "gpipe"),
    ("--gather step", "gather", "step"),
    ("--options off", "options", "off"),
    ("--strict", "strict", True),
    ("--lowering jit", "lowering", "jit"),
    ("--calibration CALIBRATION", "calibration", "CALIBRATION"),
    ("--effort full", "effort", "full"),
    ("--rounds 3", "rounds", 3),
    ("--tolerance 0.5", "tolerance", 0.5),
    ("--fixed 'batch: data'", "fixed", "batch: data"),
    ("--forbid mlp", "forbid", "mlp"),
    ("--objective memory", "objective", "memory"),
    ("--memory-fraction 0.5", "memory_fraction", 0.5),
    ("--max-axes 1", "max_axes", 1),
    ("--max-plans 7", "max_plans", 7),
    ("--time-limit 2.5", "time_limit", 2.5),
    ("--choices overlap=auto,xla", "choices", {"overlap": ["auto", "xla"]}),
    ("--verify 2", "verify", 2),
]
"""(arguments, keyword of the call of the API that they set, its value) of the commands that have the flag."""
TWO, LISTED = "--layout 'embed: data' --layout dp", ["embed: data", "batch: data"]
SEVERAL = [("--mesh data=4 --mesh data=8", "mesh", ["data=4", "data=8"]), (TWO, "layout", LISTED)]
BOTH = [("--lowering jit", "lowerings", ("jit",)), ("--lowering both", "lowerings", ("jit", "shard_map"))]
OWN = {
    **dict.fromkeys(("plan", "lab", "prove", "compile"), ()),
    "search": [("--mesh data=4", "mesh", "data=4"), (TWO, "layouts", LISTED)],
    "calibrate": SEVERAL,
    "check": [*SEVERAL, *BOTH],
    "diff": [("--mesh data=4 --mesh data=2", "mesh", "data=4"), (TWO, "layout", "embed: data")],
}
"""Command → the same of its own flags, in place of those above."""


@functools.cache
def flags_of(command):
    return {flag for action in command_parser().commands[command]._actions for flag in action.option_strings}


def cases_of(command):
    """The rows of a command."""
    given = {text.split()[0] for text, *_ in OWN[command]} | ({"--calibration"} if command == "calibrate" else set())
    return [*OWN[command], *(row for row in EVERY if row[0].split()[0] in flags_of(command) - given)]


ELSEWHERE = set(
    """--help --set --args --dims --names --json --debug --html --open --csv --steps --port --no-browser --devices --ints --tokens
    --write --brief --verbose""".split()
)
"""Options that no call of the API takes; they have tests of their own."""


def recorded(monkeypatch, command: str) -> dict:
    """The keywords of the one call that a command makes of the API, which is not made."""
    calls: dict = {}

    def record(*_, **keywords):
        calls.update(keywords)
        raise Arrived("it arrived")

    if command in ("plan", "diff"):
        monkeypatch.setattr("meshpar._src.entry.cli.plan_of", record)
    else:
        monkeypatch.setattr(mp.hardware if command == "calibrate" else mp, command, record)
    return calls


@pytest.mark.parametrize(("command", "text", "keyword", "value"), [(c, *row) for c in OWN for row in cases_of(c)])
def test_an_option_arrives(run, monkeypatch, tmp_path, command, text, keyword, value):
    measured = str(tmp_path / "measured.json")
    mp.types.Calibration("cpu", "0.1", 0.1, 0.2, 0.3).save(measured)
    given = shlex.split(text.replace("CALIBRATION", measured))
    others: list[str] = []
    for option, default in (("--mesh", "data=4"), ("--layout", "dp"), ("--topology", "v5e:2x2")):
        of_cpus = command in ("calibrate", "check") or (command == "compile" and "--calibration" in given)
        if option not in given and not (of_cpus and option == "--topology"):
            others += [option, default]
    calls = recorded(monkeypatch, command)
    status, _, err = run(f"{command} small", *given, *others)
    assert (status, "it arrived" in err) == (2, True), err
    arrived = calls[keyword]
    expected = measured if value == "CALIBRATION" else value
    assert (str(arrived) if isinstance(arrived, mp.Layout) else arrived) == expected
    if not set(given) & {"--mesh", "--layout", "--topology"}:  # which have to be given
        calls.clear()
        run(f"{command} small", *others)
        assert calls[keyword] != arrived, "it is the option's doing"


def test_every_option_has_a_row():
    for command in OWN:
        shown = {word for text, *_ in cases_of(command) for word in text.split() if word.startswith("--")}
        own = ELSEWHERE | ({"--calibration"} if command == "calibrate" else set())  # the file that it writes
        assert {flag for flag in flags_of(command) if flag.startswith("--")} - own == shown, command


@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_the_range_of_integers_of_a_step_that_is_run(run, monkeypatch, command):
    most = []

    def record(step, arguments, **how):
        most.append(int(arguments["tokens"].max()))
        raise Arrived("it arrived")

    monkeypatch.setattr(mp.hardware if command == "calibrate" else mp, command, record)
    for ints in ("2", "1000"):
        run(f"{command} every_kind --layout 'a: data' --mesh data=4 --ints {ints}")
    assert most[0] < 2 < most[1] < 1000


def test_the_port_the_browser_and_the_json_of_a_lab(run, monkeypatch):
    served = []
    monkeypatch.setattr(Lab, "serve", lambda self, port, browser, as_json: served.append((port, browser, as_json)))
    lab = "lab small --mesh data=4 --layout dp"
    assert [run(f"{lab} --port 81 --no-browser")[0], run(f"{lab} --json")[0]] == [0, 0]
    assert served == [(81, False, False), (0, True, True)]


def test_the_rates_of_a_step_that_generates_tokens(run):
    plan = "plan small --mesh data=4 --layout dp --topology v5e:2x2"
    assert "tokens a step" in " ".join(run(f"{plan} --tokens batch")[1].split())
    assert "tokens a step" not in " ".join(run(plan)[1].split())


# -- help, suggestions, files


def test_a_terminated_search_is_interrupted():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), cli._terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_warnings_of_commands_do_not_have_the_line_of_the_command(capsys):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cli._show_warning(mp.errors.RepeatedWarning("repeated"), mp.errors.RepeatedWarning, "meshpar", 8)
    assert not said
    assert capsys.readouterr().err.endswith("RepeatedWarning: repeated\n")


def test_without_arguments_there_are_commands_to_start_with(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([]) == 0
    text = capsys.readouterr().out
    lines = [
        re.split(" {4}(?!examples)", line.strip())[0].split()
        for line in text.splitlines()
        if line.startswith("  meshpar ")
    ]
    assert [line[1] for line in lines] == ["plan", "search", "lab", "plan"]
    for line in lines:
        assert command_parser().parse_args(shlex.split(" ".join(line[1:]))).topology


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plen"], "there is no command `plen`; did you mean `plan`?"),
        (["foo"], "there is no command `foo`; commands there are: calibrate, check, "),
        (["plan", "TARGET", "--layuot", "fsdp"], "did you mean --layout?"),
        (["search", "TARGET", "--topology", "v5e:2x2", "--max-plan=3", "--zzz"], "error: there is no option --zzz\n"),
        (["--verzion", "plan", "TARGET"], "error: there is no option --verzion; did you mean --version?\n"),
        (["plan", "TARGET", "--mesh", "data=4,", "model=2"], "error: `model=2` belongs to no option: quote a value"),
        (["plan", "TARGET", "--lowering", "jitt"], "there is no --lowering `jitt`; did you mean `jit`?"),
        (["diff"], "error: missing: TARGET, file.py:function"),
    ],
)
def test_misspelled_words_of_a_command_line(words, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith("error: ")
    assert err.endswith(" --help lists the options\n")


def test_collectives_as_csv_and_the_page_in_a_browser(run, target, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    table, page = tmp_path / "plan.csv", tmp_path / "plan.html"
    small = "plan small --mesh data=4 --layout fsdp --open"
    assert run(f"{small} --csv {table} --html {page}")[0] == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    made = load_target(f"{target}:small")
    plan = mp.plan(made.step, *made.args, dims=made.dims, mesh="data=4", layout="batch: data; embed: data")
    assert sum(float(row["total_bytes"]) for row in rows) == plan.bytes_sent > 0
    assert all(float(row["bytes"]) * int(row["calls"]) == float(row["total_bytes"]) for row in rows)
    assert {row["seconds"] for row in rows} == {""}  # the chip is not known
    assert opened == [page.resolve().as_uri()]
    status, _, err = run(small)
    assert (status, "--html FILE writes one" in err) == (2, True)


def test_names_lists_dims_without_a_name(command, tmp_path):
    file = tmp_path / "fused.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(params, x):\n"
        "    gate, up = jnp.split(x @ params['layers_0']['w13'], 2, -1)\n"
        "    return x + (gate * up) @ params['layers_0']['w2']\n"
        "def target():\n"
        "    shape = jax.ShapeDtypeStruct\n"
        "    return step, ({'layers_0': {'w13': shape((8, 32), float), 'w2': shape((16, 8), float)}},\n"
        "                  shape((4, 8), float)), {'*/w13': 'embed _', 'x': 'batch embed'}\n"
    )
    found = json.loads(command("names", f"{file}:target", "--json")[1])["unnamed"]
    assert ("params/layers_*/w13", "[8, 32]", "_") in {(r["path"], r["shape"], r["dims"].split()[1]) for r in found}
    assert "No rule shards a dim without a name." in command("names", f"{file}:target")[1]


def test_a_value_that_a_literal_type_excludes(command, tmp_path):
    llama = str(Path(__file__).parent.parent / "examples" / "llama.py")
    status, _, error = command("plan", f"{llama}:tiny", "--topology", "v5e:2x4", "--set", "attention=flash")
    assert status == 2
    assert "--set attention=flash: `attention` is one of splash, xla, ring, ulysses, gathered" in " ".join(
        error.split()
    )


@pytest.mark.parametrize(("axis", "usual"), [("dta", "data"), ("modl", "model"), ("rows", None)])
def test_a_new_axis_of_a_default_mesh_that_is_similar_to_a_usual_one(run, axis, usual):
    _, _, error = run(f"plan small --topology v5e:2x4 --layout 'batch: {axis}'")
    assert f"default  mesh: {axis}=8, " in error
    assert ("is new" in error) is (usual is not None)
    assert usual is None or f"axis `{axis}` is new: did you mean `{usual}`?" in error
