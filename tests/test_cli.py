"""The command line: targets, defaults, reports, exit statuses, and what bad input says."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
import warnings
from pathlib import Path

import jax
import pytest

import meshpar as mp
from meshpar._src.entry import cli
from meshpar._src.entry.cli import GROUPS, _parser, main
from meshpar._src.entry.target import concrete, load_target, parse_options
from meshpar._src.lab.lab import Lab
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


@pytest.fixture
def run(capsys):
    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(argv)
        got = capsys.readouterr()
        return status, got.out, got.err

    return call


# -- plan


def test_defaults_are_one_axis_over_the_topology_and_fsdp_and_are_said(run, target):
    status, out, err = run("plan", f"{target}:small", "--topology", "v5e:2x4")
    assert status == 0
    assert "mesh     data=8 (default: one axis over all of v5e:2x4)" in err
    assert "layout   batch: data; embed: data (default: FSDP)" in err
    assert "8 devices" in out
    assert "a step takes" in out


def test_a_model_of_70_billion_weights_by_its_defaults_alone(run):
    llama = Path(__file__).parent.parent / "examples" / "llama.py"
    status, out, err = run("plan", f"{llama}:llama3_70b", "--topology", "v5p:8x8x8")
    assert (status, "data=512 (default" in err) == (0, True)
    lines = out.splitlines()
    assert any(line.startswith("each device needs") and "of the 95.74 GiB of a v5p" in line for line in lines)
    assert any(line.startswith("    compute: ") and "the largest is" in line for line in lines)
    assert sum("`batch` uses `data`" in line for line in lines) == 1
    assert len(lines) <= 58, "one screen"
    head = {line.split()[0]: line for line in lines[3:9] if line}
    assert "10.52 GiB of 95.74 GiB" in head["fits"]
    assert head["step"].split()[1:5] == ["6.15", "s,", "MFU", "69"]
    assert head["costliest"].split()[1:3] == ["batch:", "data"]


def test_plan_as_json_and_as_a_page(run, target, tmp_path):
    page = tmp_path / "plan.html"
    status, out, err = run("plan", f"{target}:small", "--mesh", "data=4, model=2", "--layout", "batch: data; mlp: model",
                           "--json", "--html", str(page))  # fmt: skip
    plan = json.loads(out)
    assert (status, err) == (0, "")
    assert plan["mesh"] == {"data": 4, "model": 2}
    assert plan["layout"] == "batch: data; mlp: model"
    assert plan["time"] is None
    assert "mlp:model" in page.read_text("utf8")


def test_a_layout_by_name_and_arguments_of_the_target(run, target):
    status, out, _ = run(
        "plan", f"{target}:small", "--mesh", "data=4", "--layout", "dp", "--set", "batch=64, mlp=16", "--json"
    )
    plan = json.loads(out)
    assert status == 0
    assert plan["layout"] == "batch: data"
    assert {h["path"]: h["shape"] for h in plan["inputs"]} == {
        "state/opt/m": [8, 16], "state/params/w": [8, 16], "batch": [64, 8],
    }  # fmt: skip


def test_the_state_is_overwritten_unless_other_arguments_are_named(run, target):
    def peak(*more: str) -> float:
        _, out, _ = run(
            "plan", f"{target}:small", "--mesh", "data=1", "--layout", "", "--set", "mlp=4096", "--json", *more
        )
        return json.loads(out)["memory"]["peak"]

    assert peak() == peak("--donate", "state") < peak("--donate", "batch")


def test_the_plan_of_a_lowering(run, target):
    def overlap(*more: str) -> list:
        how = [
            "--topology",
            "v5e:2x4",
            "--mesh",
            "data=1, model=8",
            "--layout",
            "batch: data; mlp: model",
            "--set",
            "mlp=64",
        ]
        status, out, _ = run("plan", f"{target}:small", *how, "--json", *more)
        assert status == 0
        return json.loads(out)

    by_default, named, xla = (overlap(*more) for more in ((), ("--lowering", "shard_map"), ("--lowering", "jit")))
    assert by_default["lowering"].pop("asked") == "auto"
    assert named["lowering"].pop("asked") == "shard_map"
    assert by_default == named
    assert (xla["lowering"]["lowering"], xla["lowering"]["estimate"], xla["overlap"]) == ("jit", True, [])
    ring = "plan", f"{target}:small", "--mesh", "data=4", "--layout", "dp", "--overlap", "ring"
    assert run(*ring)[0] == 0
    status, _, err = run(*ring, "--lowering", "jit")
    assert (status, "leave lowering out" in err) == (2, True)


def test_what_does_not_fit_says_so_first_and_has_status_one(run, target):
    big = ("--topology", "v5e:2x4", "--layout", "dp", "--set", "mlp=2000000000")
    status, out, _ = run("plan", f"{target}:small", *big)
    assert status == 1
    assert out.startswith("DOES NOT FIT  each device needs ")
    assert run("plan", f"{target}:small", *big, "--json")[0] == 1


def test_a_layout_of_those_for_every_model(run, target):
    status, out, err = run(
        "plan", f"{target}:small", "--mesh", "data=2, model=4", "--layout", "fsdp+megatron", "--json"
    )
    assert status == 0
    assert json.loads(out)["layout"] == str(mp.layouts.fsdp_megatron())
    status, out, _ = run("plan", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp", "--json")
    assert json.loads(out)["layout"] == "batch, embed: data"  # the target's own comes first
    status, _, err = run("plan", f"{target}:small", "--mesh", "data=4", "--layout", "fspd")
    assert (status, "fsdp_megatron" in err) == (2, True)


# -- diff, check, compile


def test_the_next_command_after_a_plan(run):
    """A known scheme that fits or is faster, on the same mesh, with its figures; else a search."""
    llama = str(Path(__file__).parent.parent / "examples" / "llama.py") + ":llama3_8b"
    where = ("--topology", "v5e:4x4", "--mesh", "data=16", "--set", "batch=16, layers=2")
    slow, fast = (
        run("plan", llama, *where, "--layout", layout)[1].splitlines()[-1] for layout in ("batch: data", "fsdp")
    )
    assert slow.startswith("next  --layout ")
    assert fast.startswith("next  meshpar search ")
    name = slow.split()[2].rstrip(":")
    found = json.loads(run("plan", llama, *where, "--layout", name, "--json")[1])
    assert f"{found['memory']['peak'] / 2**30:.2f} GiB" in slow


def test_diff(run, target, tmp_path):
    page = tmp_path / "diff.html"
    status, out, _ = run(
        "diff", f"{target}:small", "--mesh", "data=4", "--layout", "dp", "--layout", "fsdp", "--html", str(page)
    )
    assert status == 0
    assert "embed:data mlp" in out
    assert "<h1>Two plans</h1>" in page.read_text("utf8")
    _, out, _ = run("diff", f"{target}:small", "--mesh", "data=4", "--mesh", "data=8", "--layout", "dp", "--json")
    assert (json.loads(out)["a"]["mesh"], json.loads(out)["b"]["mesh"]) == ({"data": 4}, {"data": 8})


def test_names_of_a_target_without_dims(run, target, tmp_path):
    status, out, _ = run("names", f"{target}:without_dims", "--write", str(tmp_path / "names.json"))
    assert status == 0
    assert "dim 0 of batch, which is no weight" in out
    written = json.loads((tmp_path / "names.json").read_text())
    assert written["batch"].startswith("batch ")
    status, out, _ = run("names", f"{target}:small", "--json")
    assert status == 0
    names = {row["dim"]: row for row in json.loads(out)["names"]}
    assert (names["mlp"]["size"], names["mlp"]["certain"]) == ("32", "given")
    status, out, _ = run("plan", f"{target}:without_dims", "--topology", "v5e:2x4", "--layout", "batch: data")
    assert status == 0
    assert "`meshpar names` lists the names" in " ".join(out.split())


def test_other_names_for_those_of_the_model():
    from meshpar._src.entry.cli import _parser

    args = _parser().parse_args(["plan", "file.py:step", "--names", "act_batch=batch, act_emb=_"])
    assert args.names == {"act_batch": "batch", "act_emb": "_"}


def test_a_step_with_a_function_of_its_arguments(run, target, tmp_path):
    """A file without a target: the step and its arguments, and the names that `names` writes."""
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USERS_FILE))
    names = str(tmp_path / "names.json")
    assert run("names", f"{file}:update", "--args", "example", "--write", names)[0] == 0
    where = ("--topology", "v5e:2x4", "--mesh", "data=8", "--set", "rows=64", "--json")
    own = run("plan", f"{file}:update", "--args", "example", "--layout", "batch: data", *where)
    written = json.loads(Path(names).read_text())
    assert written == {"*/up": "embed mlp", "*/down": "mlp classes", "x": "batch embed"}
    Path(names).write_text(json.dumps({**written, "x": "rows embed"}))
    given = run(
        "plan", f"{file}:update", "--args", f"{file}:example", "--dims", names, "--layout", "rows: data", *where
    )
    sent = [sum(c["bytes"] * c["count"] for c in json.loads(out)["collectives"]) for _, out, _ in (own, given)]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "--args names a function that returns its arguments"),
        (("--args", "exampel"), "did you mean example?"),
        (("--args", "example", "--dims", "no-such-file"), "`meshpar names TARGET --write FILE` writes one"),
    ],
)
def test_a_step_without_its_arguments(run, tmp_path, more, says):
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USERS_FILE))
    status, _, err = run("plan", f"{file}:update", "--topology", "v5e:2x2", *more)
    assert status == 2
    assert says in " ".join(err.split())


def test_an_interrupt_is_no_traceback(run, target):
    assert run("plan", f"{target}:stopped", "--topology", "v5e:2x2") == (130, "", "interrupted\n")


def test_tune_and_what_it_fitted(run, target, tmp_path):
    kept, page = tmp_path / "here.json", tmp_path / "tuned.html"
    status, out, err = run(
        "calibrate", f"{target}:small", "--rounds", "1", "--calibration", str(kept), "--html", str(page)
    )
    assert (status, err) == (0, f"wrote {page}\n")
    assert {"batch: data", "batch, embed: data"} <= {line.strip() for line in out.splitlines()}
    assert page.read_text().count("<tr>") == 3
    status, out, _ = run("plan", f"{target}:small", "--mesh", "data=8", "--calibration", str(kept))
    assert "calibrated on cpu, jaxlib" in out
    how = (f"{target}:small", "--mesh", "data=4", "--layout", "dp", "--calibration", str(kept))
    status, out, _ = run("compile", *how, "--json")
    assert json.loads(out)["calibration"]["measured_on"].startswith("cpu, jaxlib")
    status, out, _ = run(
        "calibrate", f"{target}:small", "--rounds", "1", "--mesh", "data=4, model=2", "--layout", "dp", "--json"
    )
    assert [r["layout"] for r in json.loads(out)["rows"]] == ["batch: data"]
    status, _, err = run("search", f"{target}:small", "--topology", "v5e:2x2", "--calibration", str(kept))
    assert (status, "the calibration is of cpu" in err) == (2, True)
    kept.write_text("{}")
    status, _, err = run("calibrate", f"{target}:small", "--calibration", str(kept))
    assert (status, "is not a calibration file" in err) == (2, True)


def test_check(run, target):
    status, out, _ = run("check", f"{target}:small", "--layout", "fsdp", "--mesh", "data=4, idle=2")
    assert status == 0
    assert "1 of 1 runs equal" in out
    assert " shard_map " in out
    status, out, _ = run("check", f"{target}:small", "--layout", "fsdp", "--mesh", "data=4", "--lowering", "both")
    assert (status, "2 of 2 runs equal" in out, " jit " in out) == (0, True, True)
    status, out, _ = run("check", f"{target}:small", "--lowering", "shard_map", "--devices", "4", "--json")
    found = json.loads(out)
    assert (status, found["ok"]) == (0, True)
    assert [(r["mesh"], r["layout"], r["lowering"]) for r in found["rows"]] == [
        ("data=4", "batch, embed: data", "shard_map")
    ]


def test_a_check_that_fails_has_status_one(run, target, monkeypatch):
    from meshpar._src.verify.check import Report, Row

    wrong = Row("data=8", "batch: data", "jit", "0/w", 0.5, 3, error=mp.errors.CheckError("0/w differs"))
    raised = []
    monkeypatch.setattr(mp, "check", lambda *_, raises, **__: raised.append(raises) or Report(rows=[wrong]))
    status, out, _ = run("check", f"{target}:small", "--layout", "dp")
    assert status == 1
    assert raised == [False]  # differences are in the report
    assert "DIFFERS" in out


def test_compile_for_as_many_cpus_as_the_mesh_has(run, target, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path))
    status, out, err = run(
        "compile", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp", "--lowering", "shard_map", "--json"
    )
    found = json.loads(out)
    assert err.startswith("compiling step for cpu:")  # no terminal, and no silence
    assert status == 0
    assert found["topology"].startswith("cpu:")
    assert found["lowering"] == "shard_map"
    assert found["memory"]["peak"] > 0
    assert found["bytes_sent"] == pytest.approx(found["planned"]["bytes_sent"])


def test_what_the_compiler_refuses_has_status_one(run, target, monkeypatch):
    def refuse(*_, **__):
        raise mp.errors.OutOfMemoryError("step needs 200 GB of the 95 GB of a device")

    monkeypatch.setattr(mp, "compile", refuse)
    status, _, err = run("compile", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp")
    assert status == 1
    assert err.endswith("OutOfMemoryError: step needs 200 GB of the 95 GB of a device\n")


# -- bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["{}:smal", "--mesh", "data=4"], "has no function `smal`\n  fix     did you mean small"),
        (["{}:wrong", "--mesh", "data=4"], "returned a function\n  fix     it returns (step, arguments)"),
        (["{}:pair", "--mesh", "data=4"], "fix     it returns (step, arguments)"),
        (["{}:broken", "--mesh", "data=4"], "fails: RuntimeError: no such weights\n  at      {}:"),
        (["{}:broken_step", "--mesh", "data=4", "--layout", "a: data"], "fails: TypeError: dot_general"),
        (["nowhere.py:small", "--mesh", "data=4"], "there is no file nowhere.py"),
        (["no_such_module:small", "--mesh", "data=4"], "there is no module no_such_module"),
        (["{}", "--mesh", "data=4"], "is not `file.py:function`"),
        (["{}:small"], "no machine is given\n  fix     --topology"),
        (["{}:small", "--topology", "v5q:2x2"], "topology 'v5q:2x2' is not known"),
        (["{}:small", "--mesh", "data=4", "--layout", "fspd"], "the target's LAYOUTS are: fsdp, dp"),
        (["{}:small", "--mesh", "data=4", "--layout", "megatrn"], "did you mean megatron?"),
        (["{}:small", "--mesh", "data=4", "--layout", "batch=data"], "write `:` in rules: `batch: data`"),
        (["{}:step", "--mesh", "data=4"], "it returns (step, arguments)"),
        (["{}:small", "--mesh", "data=4", "--layout", "embd: data"], "did you mean `embed`?"),
        (["{}:small", "--mesh", "data=3", "--layout", "fsdp"], "does not divide over data=3"),
        (
            ["{}:small", "--mesh", "data=4", "--set", "mpl=3"],
            "unexpected keyword argument 'mpl'\n  fix     did you mean `mlp`?",
        ),
        (["{}:configured", "--mesh", "data=4", "--set", "layer=1"], "  fix     did you mean `layers`?"),
        (["{}:small", "--mesh", "data=4", "--set", "mlp"], "'mlp' is not `name=value`"),
        (["{}:nameless", "--mesh", "data=4"], "neither a dim `batch` nor a dim `embed`"),
        (["{}:small", "--mesh", "data=4", "--html", "/no/such/folder/plan.html"], "there is no folder /no/such/folder"),
        (["{}:small", "--mesh", "data=4", "--html", "plan.pdf"], "cannot be saved as `.pdf`"),
    ],
)
def test_bad_input_says_what_to_write_instead(run, target, argv, says):
    status, out, err = run("plan", *[a.replace("{}", target) for a in argv])
    assert status == 2
    assert out == ""
    assert says.replace("{}", target) in err
    assert "Traceback" not in err


def test_three_layouts_are_no_diff(run, target):
    status, _, err = run("diff", f"{target}:small", "--mesh", "data=4", *["--layout", "dp"] * 3)
    assert status == 2
    assert "stand once or twice" in err


def test_a_check_of_something_huge_is_refused(run, target):
    status, _, err = run("check", f"{target}:small", "--layout", "dp", "--set", "mlp=1000000000")
    assert status == 2
    assert "its arguments are 59.60 GiB" in err


def test_debug_lets_the_exception_through(target):
    with pytest.raises(TargetError) as e:
        main(["plan", f"{target}:broken", "--mesh", "data=4", "--debug"])
    assert isinstance(e.value.__cause__, RuntimeError)


# -- targets


def test_a_target_in_a_package(monkeypatch, target):
    monkeypatch.chdir(Path(target).parent)
    assert load_target("some_targets:small", {"mlp": 4}).args[0]["params"]["w"].shape == (8, 4)


def test_options():
    assert parse_options(["a=1, b=x", "c=2.5", "d=None"]) == {"a": 1, "b": "x", "c": 2.5, "d": None}


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


def test_it_runs_as_a_module(target):
    done = subprocess.run([sys.executable, "-m", "meshpar", "--help"], capture_output=True, text=True, check=True)
    assert "exit status: 0: success; 1: the answer is no" in done.stdout


def test_search_prints_the_choice_and_json(run, target):
    arguments = ["search", f"{target}:small", "--topology", "v5e:2x2", "--max-axes", "2", "--layout", "fsdp"]
    status, out, _ = run(*arguments)
    assert status == 0
    assert out.startswith("search  ")
    status, out, _ = run(*arguments, "--json")
    found = json.loads(out)
    assert found["fits"]
    assert any(row["name"] == "yours" and row["layout"] == "batch, embed: data" for row in found["rows"])
    status, out, _ = run(*arguments, "--memory-fraction", "1e-9")
    assert status == 1
    assert "NOTHING FITS" in out
    assert run(*arguments, "--forbid", "batsh")[0] == 2


def test_search_varies_the_target_and_writes_a_page(run, target, tmp_path):
    arguments = ["search", f"{target}:twice", "--topology", "v5e:2x2", "--max-axes", "1", "--choices", "times=1,3"]
    status, out, _ = run(*arguments, "--choices", "overlap=off,auto", "--html", str(tmp_path / "found.html"), "--json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert {r["variant"] for r in rows} == {f"times={n}, overlap={m}" for n in (1, 3) for m in ("off", "auto")}
    assert json.loads(out)["best"]["variant"].startswith("times=1")
    assert "<svg" in (tmp_path / "found.html").read_text()
    small = ["search", f"{target}:small", "--topology", "v5e:2x2"]
    assert "changes the arguments" in run(*small, "--choices", "batch=8,16")[2]
    for bad in ("times", "=1", "a=1,b=2"):
        assert run(*small, "--choices", bad)[0] == 2


def test_the_lab_is_served_until_ctrl_c(target):
    # what is started in the background of a script ignores Ctrl-C, and so would what it starts
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; import sys, meshpar._src.entry.cli; sys.exit(meshpar._src.entry.cli.main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "lab", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp", "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=20) as page:
                assert f"meshpar lab: {target}:small" in page.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_lab_that_cannot_be_opened(run, target):
    status, _, errors = run("lab", f"{target}:small", "--layout", "fsdp", "--no-browser")
    assert status == 2
    assert "no machine is given" in errors
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        status, _, errors = run("lab", f"{target}:small", "--mesh", "data=4", "--port", port, "--no-browser")
    assert status == 2
    assert port in errors


# -- every option arrives


class Arrived(mp.errors.MeshparError):
    """What a command calls was called; raised in its place."""


WHERE = [
    (["--mesh", "data=4"], "mesh", "data=4"),
    (["--layout", "embed: data"], "layout", "embed: data"),
    (["--topology", "v5e:2x2"], "topology", "v5e:2x2"),
]
STEP = [
    (["--donate", "state", "--donate", "batch"], "donate_argnames", ["state", "batch"]),
    (["--overlap", "off"], "overlap", "off"),
    (["--schedule", "gpipe"], "schedule", "gpipe"),
    (["--gather", "step"], "gather", "step"),
    (["--options", "off"], "options", "off"),
    (["--strict"], "strict", True),
]
LOWERING, MEASURED = (
    (["--lowering", "jit"], "lowering", "jit"),
    (["--calibration", "here.json"], "calibration", "here.json"),
)
READ = (["--calibration", "CALIBRATION"], "calibration", "CALIBRATION")
SEVERAL = [
    (["--mesh", "data=4", "--mesh", "data=8"], "meshes", ["data=4", "data=8"]),
    (["--layout", "embed: data", "--layout", "dp"], "layouts", ["embed: data", "batch: data"]),
    (["--tolerance", "0.5"], "tolerance", 0.5),
]
OPTIONS = {
    "plan": [*WHERE, *STEP, LOWERING, MEASURED],
    "lab": [*WHERE, *STEP, LOWERING, MEASURED],
    "compile": [*WHERE, *STEP, LOWERING, READ, (["--effort", "full"], "effort", "full")],
    "search": [
        *WHERE[::2],
        *STEP,
        LOWERING,
        MEASURED,
        (["--layout", "embed: data", "--layout", "dp"], "layouts", ["embed: data", "batch: data"]),
        (["--fixed", "batch: data"], "fixed", "batch: data"),
        (["--forbid", "mlp"], "forbid", "mlp"),
        (["--objective", "memory"], "objective", "memory"),
        (["--memory-fraction", "0.5"], "memory_fraction", 0.5),
        (["--max-axes", "1"], "max_axes", 1),
        (["--max-plans", "7"], "max_plans", 7),
        (["--time-limit", "2.5"], "time_limit", 2.5),
        (["--choices", "overlap=auto,xla"], "choices", {"overlap": ["auto", "xla"]}),
        (["--verify", "2"], "verify", 2),
    ],
    "calibrate": [*SEVERAL, *STEP, LOWERING, (["--rounds", "3"], "rounds", 3)],
    "check": [
        *SEVERAL,
        *STEP[1:],
        READ,
        (["--lowering", "jit"], "lowerings", ("jit",)),
        (["--lowering", "both"], "lowerings", ("jit", "shard_map")),
    ],
    "diff": [
        *STEP,
        LOWERING,
        MEASURED,
        (["--mesh", "data=4", "--mesh", "data=2"], "mesh", "data=4"),
        (["--layout", "embed: data", "--layout", "dp"], "layout", "embed: data"),
        WHERE[2],
    ],
}
"""command → (arguments, keyword of the call of the API that they set, its value)."""

ELSEWHERE = set(
    """--help --set --args --dims --names --json --debug --html --open --csv --steps --port --no-browser --devices --ints --tokens
    --write""".split()
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


@pytest.mark.parametrize(("command", "case"), [(c, case) for c, cases in OPTIONS.items() for case in cases],
                         ids=lambda x: x if isinstance(x, str) else x[0][0])  # fmt: skip
def test_an_option_arrives(run, target, monkeypatch, tmp_path, command, case):
    given, keyword, value = case
    measured = tmp_path / "measured.json"
    mp.types.Calibration("cpu", "0.1", 0.1, 0.2, 0.3).save(measured)
    given, value = ([str(measured) if x == "CALIBRATION" else x for x in xs] if isinstance(xs, list) else xs
                    for xs in (given, value))  # fmt: skip
    value = str(measured) if value == "CALIBRATION" else value
    argv = [command, f"{target}:small", *given]
    for option, default in (("--mesh", "data=4"), ("--layout", "dp"), ("--topology", "v5e:2x2")):
        asked = option in given or (command in ("calibrate", "check") and option == "--topology")
        if command == "compile" and "--calibration" in given and option == "--topology":
            continue  # of CPUs
        argv += [] if asked else [option, default]
    calls = recorded(monkeypatch, command)
    status, _, err = run(*argv)
    assert (status, "it arrived" in err) == (2, True), err
    assert (str(calls[keyword]) if command == "compile" and keyword == "layout" else calls[keyword]) == value
    without = dict(calls)
    calls.clear()
    rest = (
        [a for a in argv if a not in given]
        if keyword not in ("mesh", "meshes", "layout", "layouts", "topology")
        else None
    )
    if rest is not None:  # and is the option's doing
        run(*rest)
        assert calls[keyword] != without[keyword]


def test_every_option_has_a_row():
    from meshpar._src.entry.cli import _parser

    commands = next(a for a in _parser()._actions if a.choices and "plan" in a.choices).choices
    for command, cases in OPTIONS.items():
        known = {s for action in commands[command]._actions for s in action.option_strings if s.startswith("--")}
        shown = {a for given, _, _ in cases for a in given if a.startswith("--")}
        own = ELSEWHERE | ({"--calibration"} if command == "calibrate" else set())  # the file that it writes
        assert known - own == shown, command


@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_the_range_of_integers_of_a_step_that_is_run(run, target, monkeypatch, command):
    most = []

    def record(step, arguments, **how):
        most.append(int(arguments["tokens"].max()))
        raise Arrived("it arrived")

    monkeypatch.setattr(mp.hardware if command == "calibrate" else mp, command, record)
    for ints in ("2", "1000"):
        run(command, f"{target}:every_kind", "--layout", "a: data", "--mesh", "data=4", "--ints", ints)
    assert most[0] < 2 < most[1] < 1000


def test_the_port_and_the_browser_of_a_lab(run, target, monkeypatch):
    served = []
    monkeypatch.setattr(Lab, "serve", lambda self, port, browser: served.append((port, browser)))
    lab = "lab", f"{target}:small", "--mesh", "data=4", "--layout", "dp"
    assert [run(*lab, "--port", "81", "--no-browser")[0], run(*lab)[0]] == [0, 0]
    assert served == [(81, False), (0, True)]


def test_the_rates_of_a_step_that_generates_tokens(run, target):
    plan = "plan", f"{target}:small", "--mesh", "data=4", "--layout", "dp", "--topology", "v5e:2x2"
    assert "tokens a step" in " ".join(run(*plan, "--tokens", "batch")[1].split())
    assert "tokens a step" not in " ".join(run(*plan)[1].split())


# -- help, suggestions, files


def test_progress_of_a_search_in_a_pipe(target, monkeypatch, capsys):
    monkeypatch.setattr(cli, "PROGRESS_SECONDS", -1)
    cli.main(["search", f"{target}:small", "--topology", "v5e:2x2", "--max-plans", "3"])
    assert "searching v5e:2x2" in capsys.readouterr().err


def test_a_terminated_search_is_interrupted():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), cli._terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_warnings_of_commands_do_not_have_the_line_of_the_command(target, capsys):
    cli.main(["plan", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp", "--topology", "v5e:2x2"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cli._show_warning(mp.errors.RepeatedWarning("repeated"), mp.errors.RepeatedWarning, "meshpar", 8)
    assert not said
    assert capsys.readouterr().err.endswith("RepeatedWarning: repeated\n")


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_help_has_the_width_of_the_terminal(columns, monkeypatch, capsys):
    """No line of prose is longer, and the flags of a command are in three groups."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["--help"], *([name, "--help"] for name in ("plan", "search", "check"))):
        with pytest.raises(SystemExit):
            main(words)
        text = capsys.readouterr().out
        assert all(len(line) <= columns for line in text.splitlines() if not line.startswith("  meshpar "))
        if words[0] != "--help":
            assert text.index("what to plan:") < text.index("output:") < text.index("less common:")


def test_without_arguments_there_are_three_commands_to_start_with(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  meshpar ")] == ["plan", "search", "lab"]


def test_the_commands_are_listed_in_groups(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    groups = [text.index(f"{group}:") for group in GROUPS]
    assert groups == sorted(groups)
    assert {name for names in GROUPS.values() for name in names} == set(_parser().commands)
    assert all(f"\n  {name} " in text for names in GROUPS.values() for name in names)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plen"], "there is no command `plen`; did you mean `plan`?"),
        (["plan", "TARGET", "--layuot", "fsdp"], "did you mean --layout?"),
        (["search", "TARGET", "--topology", "v5e:2x2", "--max-plan=3", "--zzz"], "unrecognized arguments: --zzz"),
        (["--verzion", "plan", "TARGET"], "unrecognized arguments: --verzion"),
    ],
)
def test_misspelled_words_of_a_command_line(words, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_collectives_as_csv_and_the_page_in_a_browser(target, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    table, page = tmp_path / "plan.csv", tmp_path / "plan.html"
    words = ["plan", f"{target}:small", "--mesh", "data=4", "--layout", "fsdp"]
    assert main([*words, "--csv", str(table), "--html", str(page), "--open"]) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    small = load_target(f"{target}:small")
    plan = mp.plan(small.step, *small.args, dims=small.dims, mesh="data=4", layout="batch: data; embed: data")
    assert sum(float(row["total_bytes"]) for row in rows) == plan.bytes_sent > 0
    assert all(float(row["bytes"]) * int(row["calls"]) == float(row["total_bytes"]) for row in rows)
    assert {row["seconds"] for row in rows} == {""}  # the chip is not known
    assert opened == [page.resolve().as_uri()]
    assert main([*words, "--open"]) == 2
    assert "--html FILE writes one" in capsys.readouterr().err
