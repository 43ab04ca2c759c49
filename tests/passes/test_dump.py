"""The steps after each pass as files."""

from arrays import f32

import meshpar as mp


def step(params, x):
    return (x @ params["up"]) @ params["down"]


def test_each_pass_writes_the_steps_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHPAR_DUMP", str(tmp_path / "steps"))
    plan = mp.plan(
        step, {"up": f32(64, 256), "down": f32(256, 64)}, f32(32, 64), mesh="data=4, model=2", topology="v5e:2x4",
        layout="batch: data; mlp: model; embed: data", overlap="off",
        dims={"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"},
    )  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert names[0] == "000_planned.txt"
    assert names[1] == "001_choose_all_reduce.txt"
    assert [name[:3] for name in names] == [f"{k:03}" for k in range(len(names))]
    assert (tmp_path / "steps" / names[-1]).read_text("utf8") == plan.steps_text()
