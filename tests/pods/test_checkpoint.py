"""Checkpoints: complete or absent, restored on any mesh, and damage is detected."""

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pod_programs as programs
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.entry.cli import main
from meshpar._src.pods import digest
from meshpar._src.pods.checkpoint import facts_of, steps_of, verify
from meshpar._src.pods.foreign import from_safetensors, to_safetensors

pytestmark = pytest.mark.filterwarnings(  # a read of orbax may fail after another one, whose event loop is closed
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
LAYOUT = "embed: data; mlp: model"
SHARDINGS = [("data=4, model=2", LAYOUT), ("data=2, model=4", "mlp: data+model"), ("data=1", "embed: data")]


class Net(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def create(key):
    net = Net(nnx.Rngs(key))
    half = jax.random.normal(key, (16, 8)).astype(jnp.bfloat16)
    rest = {"half": half, "flags": jnp.arange(5) > 2, "key": jax.random.split(key, 3), "n": jnp.int8(-3)}
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param), rest


def make(where=SHARDINGS[0]):
    return mp.init(
        create, mesh=mp.mesh(where[0]), layout=mp.Layout(where[1], optional=True), dims={"2/half": "embed _"}
    )


def numbers(state):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(data(x)) for x in jax.tree.leaves(nnx.split(state)[1])]


def same(a, b):
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(numbers(a), numbers(b), strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, state) with checkpoints 0 and 1 of one state each."""
    folder = tmp_path_factory.mktemp("run") / "a"
    init = make()
    states = [init(jax.random.key(n)) for n in range(2)]
    with mp.Checkpoints(folder) as run:
        run.describe(init, jax.random.key(0))
        for n, state in enumerate(states):
            assert run.save(n, state, extra={"seed": n}) is False
    return folder, states


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it that a test may spoil."""
    shutil.copytree(saved[0], tmp_path / "a")
    return mp.Checkpoints(tmp_path / "a")


@pytest.mark.parametrize("where", SHARDINGS)
def test_any_layout_and_mesh(saved, where):
    init = make(where)
    state, at = mp.Checkpoints(saved[0]).restore(init.abstract(jax.random.key(5)))
    assert at == 2
    assert same(state, saved[1][1])
    found, wanted = (jax.tree.leaves(nnx.state(x[0])) for x in (state, init(jax.random.key(0))))
    assert [x.sharding for x in found] == [x.sharding for x in wanted]
    older, at = mp.Checkpoints(saved[0]).restore(init.abstract(jax.random.key(5)), step=0)
    assert at == 1
    assert same(older, saved[1][0])


def test_facts(saved):
    facts = facts_of(str(saved[0]), 1)
    assert (facts["step"], facts["next"], facts["processes"], facts["extra"]) == (1, 2, 1, {"seed": 1})
    assert facts["layout"] == LAYOUT
    assert facts["mesh"] == {"data": 4, "model": 2}
    leaf = facts["leaves"]["0/up/kernel"]
    want = {"shape": [16, 32], "dtype": "float32", "dims": "embed mlp", "spec": ["data", "model"]}
    assert want.items() <= leaf.items()


def test_plain_orbax_reads_it(saved):
    import orbax.checkpoint as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ocp.PyTreeCheckpointer().restore(saved[0] / "1" / "state")
    np.testing.assert_array_equal(tree["0"]["up"]["kernel"], saved[1][1][0].up.kernel[...])


def test_what_is_not_there_or_of_another_shape(saved):
    run = mp.Checkpoints(saved[0])
    like = lambda *shape, dtype=np.float32, name="kernel": {"0": {"up": {name: jnp.ones(shape, dtype)}}}  # noqa: E731
    wanted = r"saved as float32\[16, 32\] \(embed mlp\), and is wanted as "
    for state, options, says in [
        (like(16, 32, name="kernl"), {"partial": True}, r"has no `0/up/kernl`(.|\n)*did you mean `0/up/kernel`"),
        (like(16, 16), {"partial": True}, rf"{wanted}float32\[16, 16\]"),
        (like(16, 32, dtype=jnp.bfloat16), {"partial": True}, rf"{wanted}bfloat16\[16, 32\]"),  # nothing is converted
        (like(16, 32, dtype=np.int32), {"partial": True}, rf"{wanted}int32\[16, 32\]"),
        (like(16, 32), {}, r"`0/drop/rngs/count` and \d+ more, which is not wanted"),
        (like(16, 32), {"step": 7}, "it has 0, 1"),
    ]:
        with pytest.raises(mp.errors.CheckpointError, match=says):
            run.restore(state, **options)
    state, _ = run.restore(like(16, 32), partial=True)
    np.testing.assert_array_equal(state["0"]["up"]["kernel"], saved[1][1][0].up.kernel[...])


def test_it_keeps_the_newest_and_waits_for_its_time(tmp_path):
    with mp.Checkpoints(tmp_path / "a", keep=2, every=3) as run:
        for n in range(11):
            run.save(n, {"w": jnp.full(3, n)})
        assert run.save(11, {"w": jnp.full(3, 11)}) is False
        run.wait()
        assert run.steps() == [8, 11]
    with pytest.raises(mp.errors.CheckpointError, match="there is no checkpoint"):
        mp.Checkpoints(tmp_path / "b").restore({"w": jnp.ones(3)})
    with pytest.raises(mp.errors.CheckpointError, match="all must be at least 1"):
        mp.Checkpoints(tmp_path / "b", every=0)


def test_a_restored_run_continues_with_the_next_batch(tmp_path, mesh):
    def data():
        rows = [{"x": np.full(2, k)} for k in range(64)]
        return mp.data.batches(rows, batch=4, mesh=mesh, layout="batch: data", dims={"x": "batch _"})

    init = mp.init(lambda: {"w": jnp.ones(3)}, mesh=mesh, layout="")
    with mp.Checkpoints(tmp_path, data=data()) as run:
        run.save(4, init())
    restored = data()
    with mp.Checkpoints(tmp_path, data=restored) as run:
        _, first = run.restore_or(init)
    assert first == restored.position == 5


# -- damage


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def spoil(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: draw.randrange(len(data))] if data else data)
    elif data:
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["bit", "truncated", "missing"])
def test_damage_is_found_and_the_older_one_restored(saved, tmp_path, how):
    """In any file: the state that comes back is one that was saved, and a damaged one is said and put aside."""
    draw = random.Random(how)
    like = make().abstract(jax.random.key(0))
    found = set()
    paths = [p.relative_to(saved[0] / "1") for p in files_of(saved[0] / "1") if p.stat().st_size]
    leaves = [p for p in paths if "d" in p.parts]
    for k, path in enumerate(paths + leaves * (2 if how == "bit" else 0)):
        shutil.copytree(saved[0], tmp_path / str(k))
        spoil(tmp_path / str(k) / "1" / path, how, draw)
        run = mp.Checkpoints(tmp_path / str(k))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", mp.errors.CheckpointWarning)
            try:
                state, at = run.restore(like)
            except mp.errors.CheckpointError as error:
                if path.name != "_METADATA" or "cannot be read now" not in str(error):
                    raise  # only orbax's own metadata, which it reads without checks, may fail without a proof of damage
                assert run.steps() == [0, 1]
                state, at = run.restore(like, step=0)
                assert same(state, saved[1][0])
                continue
        assert same(state, saved[1][at - 1]), path
        warned = [w for w in said if w.category is mp.errors.CheckpointWarning]
        if at == 1:
            assert run.steps() == [0]
            assert (tmp_path / str(k) / "1.damaged").exists()
            assert len(warned) == 1
            assert "checkpoint 1 in" in str(warned[0].message)
            found.add(str(path) if path.parent.name != "d" else str(path.parent))
        run.close()
    read = {"state/d", "state/manifest.ocdbt", "meshpar/metadata"}  # the rest is not read, or is there twice
    assert read <= found if how != "bit" else {"state/d", "meshpar/metadata"} <= found


def test_a_checkpoint_of_others_stays_where_it_is(run):
    shutil.rmtree(Path(run.path) / "1" / "meshpar")
    with pytest.raises(mp.errors.CheckpointError, match=r"mp\.Checkpoints did not write it"):
        run.restore(make().abstract(jax.random.key(0)))
    assert (Path(run.path) / "1").exists()


def test_one_number_changed_is_a_digest_error(saved, tmp_path):
    """Bits that decode well: another array under the same name."""
    import orbax.checkpoint as ocp

    shutil.copytree(saved[0], tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = tmp_path / "a" / "1" / "state"
        tree = ocp.PyTreeCheckpointer().restore(state)
        kernel = np.array(tree["0"]["up"]["kernel"])
        kernel.view(np.uint32)[3, 4] ^= 1
        tree["0"]["up"]["kernel"] = kernel
        shutil.rmtree(state)
        ocp.PyTreeCheckpointer().save(state, tree)
    run = mp.Checkpoints(tmp_path / "a")
    with pytest.raises(mp.errors.DigestError, match="`0/up/kernel` differs from its saved digest"):
        run.restore(make().abstract(jax.random.key(0)), step=1)
    with pytest.warns(mp.errors.CheckpointWarning, match="`0/up/kernel`"):
        _, at = run.restore(make().abstract(jax.random.key(0)))
    assert at == 1
    run.save(1, make()(jax.random.key(1)))  # the place is free again
    run.close()
    assert steps_of(str(tmp_path / "a")) == [0, 1]


@pytest.mark.parametrize(("spec", "small"), [(P(), 1 << 20), (P("data"), 0)])
def test_replicas_that_disagree_are_not_saved(tmp_path, monkeypatch, spec, small):
    """One element of one copy, on the last device, is another number: found by the devices, and by the host."""
    monkeypatch.setattr(digest, "SMALL", small)
    mesh = mp.mesh("data=4, model=2")
    right = jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), NamedSharding(mesh, spec))
    parts = [shard.data for shard in right.addressable_shards]
    spoilt = np.array(parts[-1])
    spoilt[0, 1] += 1
    parts[-1] = jax.device_put(spoilt, parts[-1].device)
    wrong = jax.make_array_from_single_device_arrays(right.shape, right.sharding, parts)
    with mp.Checkpoints(tmp_path / "a") as run:
        run.save(0, {"w": right, "v": right})
        run.save(1, {"w": wrong, "v": right})
        with pytest.raises(mp.errors.DigestError, match="the copies of `w` on the devices differ") as caught:
            run.wait()
        assert caught.value.path == "w"
    assert steps_of(str(tmp_path / "a")) == [0]


def test_facts_that_were_edited(run):
    path = Path(run.path) / "1" / "meshpar" / "metadata"
    text = path.read_text()
    assert '"next": 2' in text
    for edited in (text.replace('"next": 2', '"next": 3'), "[]", "null"):
        path.write_text(edited)
        with pytest.raises(mp.errors.CheckpointError, match="its checksum differs"):
            run.restore(make().abstract(jax.random.key(0)), step=1)


def test_the_command_line(saved, tmp_path, capsys):
    folder = str(saved[0])
    assert main(["checkpoint", "ls", folder]) == 0
    out = capsys.readouterr().out
    assert "data=4, model=2" in out
    assert len(out.splitlines()) == 2
    assert main(["checkpoint", "show", folder, "--step", "0"]) == 0
    assert "embed mlp" in capsys.readouterr().out
    assert main(["checkpoint", "verify", folder]) == 0
    assert main(["checkpoint", "verify", os.path.relpath(folder)]) == 0
    assert main(["checkpoint", "show", folder, "--step", "9"]) == 2
    assert "it has 0, 1" in capsys.readouterr().err
    shutil.copytree(folder, tmp_path / "a")
    (data,) = max((tmp_path / "a" / "1" / "state" / "d",), key=lambda p: p.stat().st_size).iterdir()
    spoil(data, "truncated", random.Random(0))
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 1
    assert "1  DAMAGED" in capsys.readouterr().out
    assert main(["checkpoint", "convert", folder, str(tmp_path / "w.safetensors"), "--only", "0/up/*"]) == 0
    from safetensors.numpy import load_file

    found = load_file(tmp_path / "w.safetensors")
    assert sorted(found) == ["0.up.bias", "0.up.kernel"]
    np.testing.assert_array_equal(found["0.up.kernel"], saved[1][1][0].up.kernel[...])


# -- weights of others


def test_safetensors_by_dims(tmp_path):
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(0)
    layers, embed, heads, head_dim, vocab = 3, 16, 4, 8, 32
    q = rng.normal(size=(layers, heads * head_dim, embed)).astype(np.float32)
    table = rng.normal(size=(vocab, embed)).astype(np.float32)
    save_file({f"model.layers.{k}.q.weight": q[k] for k in range(layers)}, tmp_path / "a.safetensors")
    save_file({"model.embed.weight": table}, tmp_path / "b.safetensors")

    def create(key):
        of_layers = {"q": jnp.zeros((layers, embed, heads, head_dim))}
        return {"layers": of_layers, "embed": jnp.zeros((vocab, embed)), "norm": jnp.ones(embed)}

    dims = {"layers/q": "layers embed heads head_dim", "embed": "vocab embed", "norm": "embed"}
    init = mp.init(create, mesh=mp.mesh("data=4, model=2"), layout="heads, vocab: model; embed: data", dims=dims)
    rules = {
        "model.layers.{layers}.q.weight": ("layers/q", "(heads head_dim) embed"),
        "model.embed.weight": ("embed", "vocab embed"),
    }
    state = from_safetensors(tmp_path, init, jax.random.key(0), rules=rules)
    np.testing.assert_array_equal(state["layers"]["q"], q.transpose(0, 2, 1).reshape(layers, embed, heads, head_dim))
    np.testing.assert_array_equal(state["embed"], table)
    np.testing.assert_array_equal(state["norm"], np.ones(embed))
    assert state["layers"]["q"].sharding == init.abstract(jax.random.key(0))["layers"]["q"].sharding
    for wrong, says in [
        ({"model.embed.wight": ("embed", "vocab embed")}, "did you mean `model.embed.weight`"),
        ({"model.embed.weight": ("embd", "vocab embed")}, "did you mean `embed`"),
        ({"model.embed.weight": ("embed", "embed vocab")}, "needs"),
        ({"model.embed.weight": ("embed", "vocab mlp")}, "differ from the dims of `embed`"),
    ]:
        with pytest.raises(mp.errors.MeshparError, match=says):
            from_safetensors(tmp_path, init, jax.random.key(0), rules=wrong)

    with mp.Checkpoints(tmp_path / "run") as run:
        run.describe(init, jax.random.key(0))
        run.save(1, state)
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    target = str(tmp_path / "back.safetensors")
    assert main(["checkpoint", "convert", str(tmp_path / "run"), target, "--rules", str(tmp_path / "rules.json")]) == 0
    back = load_file(target)
    assert len(back) == layers + 1
    for k in range(layers):
        np.testing.assert_array_equal(back[f"model.layers.{k}.q.weight"], q[k])
    np.testing.assert_array_equal(back["model.embed.weight"], table)
    with pytest.raises(mp.errors.MeshparError, match="no array of checkpoint 1 matches 'embd'"):
        to_safetensors(str(tmp_path / "run"), 1, target, rules={"x": ("embd", "vocab embed")})


# -- processes


@pytest.mark.slow
def test_one_two_and_four_processes(pods, tmp_path):
    _, want, _, want_state = programs.save_and_restore(str(tmp_path / "alone"), "fsdp+tensor", 6)
    losses = []
    for k, (count, scheme) in enumerate([(2, "fsdp+tensor"), (1, "dp"), (4, "fsdp")]):
        arguments = str(tmp_path / "a"), scheme, 2
        if count == 1:
            results = [programs.save_and_restore(*arguments)]
        else:
            end = pods.run(count, programs.save_and_restore, *arguments)
            assert end.codes == [0] * count, end.texts
            results = end.results
        at, more, digests, state = results[0]
        assert at == 2 * k
        assert all(r[2] == digests for r in results)
        losses += more
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    for x, y in zip(state, want_state, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)
    assert verify(str(tmp_path / "a"), 5) == []


def test_the_same_run_again_is_the_same_bit_for_bit(pods, tmp_path):
    ends = [pods.run(2, programs.save_and_restore, str(tmp_path / name), "fsdp", 1) for name in "ab"]
    assert ends[0].results == ends[1].results
    assert ends[0].codes == [0, 0], ends[0].texts


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(pods, tmp_path):
    """Three kills: the newest checkpoint is always complete; ``benchmarks/soak.py`` kills for as long as it is asked to."""
    draw, count = random.Random(2), 2
    folder = tmp_path / "a"
    for k in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        group = pods.start(count, programs.save_for_ever, str(folder), timeout=30.0)
        group.wait_for("saving 2;")
        time.sleep(draw.uniform(0.0, 0.25))
        for p in range(count):
            group.signal(p, signal.SIGKILL)
        group.end()
        steps = steps_of(str(folder))
        assert steps, k
        assert verify(str(folder), steps[-1]) == [], k
        run = mp.Checkpoints(folder)
        state, at = run.restore({"w": jnp.zeros((64, 64)), "n": jnp.int32(0)})
        assert at == steps[-1] + 1
        assert int(state["n"]) == steps[-1]
        assert (np.asarray(state["w"]) == steps[-1]).all()
        run.save(at, state)  # what was left half written is in nobody's way
        run.close()
        assert steps_of(str(folder))[-1] == at


def test_when_stopped_all_processes_save_the_same_step(pods, tmp_path):
    group = pods.start(2, programs.until_told_to_stop, str(tmp_path / "a"))
    group.wait_for("under way")
    group.signal(1, signal.SIGTERM)
    end = group.end()
    assert end.codes == [75, 75], end.texts
    (n,) = steps_of(str(tmp_path / "a"))
    assert all(f"saved {n} [{n}]\n" in text for text in end.texts)
    assert verify(str(tmp_path / "a"), n) == []


@pytest.mark.slow
def test_every_row_once_over_four_and_three_processes(pods, tmp_path):
    folder = str(tmp_path / "a")
    first = pods.run(4, programs.read_rows, folder, 9, 7, 2, devices=12)
    assert first.codes[2] == -signal.SIGKILL, first.texts
    last = pods.run(3, programs.read_rows, folder, 9, devices=12)
    assert last.codes == [0, 0, 0], last.texts
    assert [r[:2] for r in last.results] == [[6, 10]] * 3
    had: dict[int, list[list[int]]] = {}
    for at in (0, 6):
        seen: dict[int, list[int]] = {}
        for path in sorted(tmp_path.glob(f"a-{at}-*.txt")):
            for line in path.read_text().splitlines():
                n, *rows = map(int, line.split())
                seen.setdefault(n, []).extend(rows)
        for n, rows in seen.items():
            if len(rows) == 12:
                had.setdefault(n, []).append(sorted(rows))
    assert sorted(had) == list(range(10))
    assert all(x == each[0] for each in had.values() for x in each)  # what was done again is what was done
    for epoch in (range(5), range(5, 10)):
        assert sorted(r for n in epoch for r in had[n][0]) == list(range(60))
    assert had[0] != had[5]
    assert last.results[0][3] == sum(3 * i for i in range(60)) * 2  # and each was used once
    read = [r[2] for r in last.results]
    assert all(n <= 4 * (4 + 3) for n in read)  # 4 of 12 rows of 4 batches, and of those that were read ahead


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("orbax.checkpoint", lambda tmp: mp.Checkpoints(tmp / "a").save(0, {"w": jnp.ones(3)})),
        ("safetensors", lambda tmp: from_safetensors(tmp / "w.safetensors", None, rules={})),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, tmp_path, package, use):
    (tmp_path / "w.safetensors").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(mp.errors.CheckpointError, match=r'pip install "meshpar\[checkpoint\]"'):
        use(tmp_path)
