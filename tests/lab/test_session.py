"""Replies of a lab: the numbers of ``mp.plan``, errors at the rules that cause them, and no evaluation of input."""

import html
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import lab_program
import pytest

import meshpar as mp
from meshpar._src.entry.cli import main
from meshpar._src.lab.session import MAX_RUNNING
from meshpar._src.units import format_bytes, format_memory, format_seconds
from meshpar.errors import MeshError, MeshparError, UnsupportedError


@pytest.fixture(scope="module")
def session():
    return lab_program.lab(layouts={"mine": "mlp: model; batch: data"}).session


def ask(session, rules, mesh=lab_program.MESH, topology=lab_program.TOPOLOGY, **more):
    rows = [{"text": r, "on": True} if isinstance(r, str) else {"text": r[0], "on": r[1]} for r in rules]
    request = {"ask": "plan", "mesh": mesh, "topology": topology, "rules": rows, "pinned": None, **more}
    reply = session.handle(json.loads(json.dumps(request)))
    json.dumps(reply, allow_nan=False)
    return reply


def done(session, request):
    job = session.handle(request)
    while (now := session.handle({"ask": "job", **job}))["running"]:
        session._jobs[job["job"]].wait(0.05)
    return now


def test_random_edits_have_the_figures_of_mp_plan(session):
    legal = 0
    for mesh, rows in lab_program.edits(25):
        reply = ask(session, rows, mesh)
        try:
            plan = lab_program.planned(mesh, "\n".join(text for text, on in rows if on))
        except MeshparError:
            assert reply["plan"] is None
            assert any(reply["errors"]["rules"])
            continue
        legal += 1
        metrics = reply["plan"]["metrics"]
        assert metrics["peak"] == plan.memory.peak
        assert metrics["seconds"] == plan.seconds
        assert metrics["sent"] == plan.bytes_sent
        assert format_memory(plan.memory.peak) in reply["plan"]["html"]["cards"]
        assert sum(row["sent"] for row in reply["plan"]["rules"] if row) <= plan.bytes_sent
        assert mp.Layout(reply["plan"]["layout"]).rules == plan.requested_layout.rules
    assert legal > 12


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("embed data", "has no `:`"),
        ("embed: dtaa", "names axis `dtaa`"),
        ("embd: data", "names dim `embd`"),
        ("embed: data+data", "asks for axis `data` twice"),
        ("layers: data+model", "does not divide"),
        ("oops.embed: data", "there is no scope"),
        ("__import__('os').abort(): data", "is not a dim"),
    ],
)
def test_an_error_is_at_its_rule(session, rule, says):
    reply = ask(session, ["batch: data", rule, "mlp: model"])
    assert reply["plan"] is None
    assert [bool(e) for e in reply["errors"]["rules"]] == [False, True, False]
    assert says in reply["errors"]["rules"][1]["headline"]
    off = ask(session, ["batch: data", (rule, False), "mlp: model"])
    assert off["plan"]["metrics"] == ask(session, ["batch: data", "mlp: model"])["plan"]["metrics"]
    assert off["plan"]["rules"][1] is None


def test_errors_of_the_mesh(session):
    for mesh, topology in (
        ("data=3, model=4", "v5e:4x4"),
        ("data", "v5e:4x4"),
        ("data=4, model=4", "v9:4x4"),
        ("data=99999999999", None),
        ("", None),
    ):
        reply = ask(session, lab_program.RULES, mesh, topology)
        assert reply["plan"] is None
        assert reply["errors"]["mesh"]["headline"]
        assert not any(reply["errors"]["rules"])


def test_without_a_topology_no_time_is_estimated(session):
    metrics = ask(session, lab_program.RULES, topology=None)["plan"]["metrics"]
    assert metrics["seconds"] is None
    assert metrics["peak"] > 0
    assert session.handle({"ask": "suggest", "topology": None})["failed"]


def test_a_pinned_plan_is_compared(session):
    pinned = {"mesh": lab_program.MESH, "topology": lab_program.TOPOLOGY, "layout": "batch: data; mlp: model"}
    (comparison,) = ask(session, lab_program.RULES, pinned=[pinned])["plan"]["pinned"]
    before = lab_program.planned(lab_program.MESH, pinned["layout"])
    now = lab_program.planned(lab_program.MESH, "; ".join(lab_program.RULES))
    assert comparison["texts"] == [format_seconds(before.seconds), format_memory(before.memory.peak)]
    for plan in (before, now):
        assert format_memory(plan.memory.peak) in comparison["html"]
    longer = now.seconds - before.seconds
    kind = "slower" if longer > 0 else "faster"
    assert comparison["question"] == f"Why is this plan {kind} by {format_seconds(abs(longer))}?"
    why = html.unescape(comparison["why"]).replace("\u00a0", " ")
    number = r'<td [^>]*data-v="([^"]+)">[^<]*</td>'
    rows = re.findall(f"<td>([^<]+)</td>{3 * number}", why)
    assert "exposed communication over data" in [name for name, *_ in rows]  # `embed: data` gathers over it
    for column, expected in enumerate((before.seconds, now.seconds, longer), 1):
        assert sum(float(row[column]) for row in rows) == pytest.approx(expected, rel=1e-4)
    same = ask(session, ["batch: data", "mlp: model"], pinned=[pinned])["plan"]["pinned"]
    assert (same[0]["why"], same[0]["question"]) == ("", "")


def test_the_lowering_is_switched(session):
    for lowering in ("jit", "shard_map", "auto"):
        plan = lab_program.planned(lab_program.MESH, "; ".join(lab_program.RULES), lowering=lowering)
        reply = ask(session, lab_program.RULES, lowering=lowering)["plan"]
        assert (reply["metrics"]["seconds"], reply["metrics"]["sent"]) == (plan.seconds, plan.bytes_sent)
        assert f'lowering="{plan.lowering}"' in reply["python"]
    assert "lowering" in ask(session, [], lowering="pmap")["failed"]
    ask(session, lab_program.RULES)


def test_sizes_of_the_target():
    session = lab_program.resizable().session
    layout = "; ".join(lab_program.RULES)
    for n in (64, 128, 256):
        plan = lab_program.planned(lab_program.MESH, layout, x=lab_program.batch_of(n))
        metrics = ask(session, lab_program.RULES, sizes=f"batch={n}")["plan"]["metrics"]
        assert (metrics["seconds"], metrics["peak"]) == (plan.seconds, plan.memory.peak)
    rows = done(session, {"ask": "start", "topology": lab_program.TOPOLOGY, "sizes": "batch=256"})["result"]
    for row in rows:
        plan = lab_program.planned(row["mesh"], row["layout"], x=lab_program.batch_of(256))
        assert (row["seconds"], row["peak"]) == (plan.seconds, plan.memory.peak)
    assert session.plan().memory.peak == metrics["peak"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("batch", "is not `name=size`"), ("batch=", "is not `name=size`"), ("batch=0", "is not `name=size`"),
        ("batch=-1", "is not `name=size`"), ("batch=1.5", "is not `name=size`"), ("batch=True", "is not `name=size`"),
        ("batch=__import__('os').abort()", "is not `name=size`"), ("seq=3", "`seq` is no size of this target"),
        ("batch=99999999999999999", "is not `name=size`"), ("batch=6", "does not divide"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(sizes, says):
    reply = ask(lab_program.resizable().session, lab_program.RULES, sizes=sizes)
    assert reply["plan"] is None
    errors = [reply["errors"]["sizes"], reply["errors"]["layout"], *reply["errors"]["rules"]]
    assert says in next(e for e in errors if e)["headline"]


def test_the_command_line_offers_the_integers_of_the_target(monkeypatch, tmp_path):
    target = tmp_path / "target.py"
    target.write_text(
        "from lab_program import DIMS, STATE, train_step, batch_of\n\n"
        "def t(batch=64, name='x', fast=True, **changes):\n    return train_step, (STATE, batch_of(batch)), DIMS\n"
    )
    served = []
    monkeypatch.setattr(mp.types.Lab, "serve", lambda self, *args, **options: served.append(self))
    words = ["--topology", lab_program.TOPOLOGY, "--mesh", lab_program.MESH, "--layout", "batch: data; mlp: model"]
    assert main(["lab", f"{target}:t", *words, "--set", "batch=128, depth=3"]) == 0
    session = served[0].session
    assert session.handle({"ask": "open"})["sizes"] == {"batch": 128, "depth": 3}
    for n in (128, 64):
        plan = lab_program.planned(lab_program.MESH, "batch: data", x=lab_program.batch_of(n))
        assert ask(session, ["batch: data"], sizes=f"batch={n}")["plan"]["metrics"]["peak"] == plan.memory.peak


def test_text_is_escaped(session):
    reply = ask(session, ['"*/<img src=x>".embed?: data', "batch: data"])
    assert "<img" not in json.dumps(reply["plan"]["html"])


@pytest.mark.parametrize(
    "request_",
    [
        None, [], "plan", {}, {"ask": "eval"}, {"ask": ["plan"]}, {"ask": "plan"},
        {"ask": "plan", "mesh": "data=2", "rules": "batch: data"}, {"ask": "plan", "mesh": "data=2", "rules": [1]},
        {"ask": "plan", "mesh": "data=2", "rules": [], "pinned": "batch: data"},
        {"ask": "plan", "mesh": "data=2", "rules": [], "pinned": ["batch: data"]},
        {"ask": "plan", "mesh": "data=2", "rules": [], "lowering": ["jit"]},
        {"ask": "plan", "mesh": "data=2", "rules": [], "sizes": 3},
        {"ask": "job", "job": 12345}, {"ask": "stop", "job": "1"},
    ],
)  # fmt: skip
def test_what_no_page_asks_has_no_reply(session, request_):
    assert set(session.handle(request_)) == {"failed"}


def test_the_python_to_copy_runs_the_plan_that_is_shown(session, mesh):
    reply = ask(session, ["batch: data", ("seq: model", False), "mlp?: model; embed: data"], "data=4, model=2", None)
    names = {"train_step": lab_program.train_step, "dims": lab_program.DIMS}
    exec(reply["plan"]["python"], names)
    plan = names["step"].plan(lab_program.STATE, lab_program.X)
    assert plan.bytes_sent == reply["plan"]["metrics"]["sent"]
    assert str(plan.requested_layout) == reply["plan"]["layout"]


def test_known_layouts_and_a_search_that_is_at_least_as_good(session):
    known = done(session, {"ask": "start", "topology": lab_program.TOPOLOGY})["result"]
    assert known[0]["name"] == "mine"
    assert len(known) > 2
    assert not any("expert" in row["layout"] for row in known)
    found, *others = done(session, {"ask": "suggest", "topology": lab_program.TOPOLOGY})["result"]
    assert found["fits"]
    assert len(others) > 2
    for row in (*known, *others[:3]):
        plan = lab_program.planned(row["mesh"], row["layout"])
        assert (row["seconds"], row["peak"], row["sent"]) == (plan.seconds, plan.memory.peak, plan.bytes_sent)
    assert found["seconds"] <= 1.03 * min(row["seconds"] for row in known)


def test_pages_go_before_a_search_and_a_search_can_be_stopped(session):
    job = session.handle({"ask": "suggest", "topology": lab_program.TOPOLOGY})
    want = ask(session, lab_program.RULES)["plan"]["metrics"]
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: ask(session, lab_program.RULES), range(4)))
    assert all(reply["plan"]["metrics"] == want for reply in replies)
    session.handle({"ask": "stop", **job})
    session._jobs[job["job"]].wait(60)
    reply = session.handle({"ask": "job", **job})
    assert not reply["running"]
    assert [row["name"] for row in reply["result"] if row["name"] == "search result"] == ["search result"]


def test_the_compilers_numbers_are_compared_with_the_estimate(session):
    where = {"mesh": "data=4, model=2", "topology": None, "layout": "batch: data; mlp: model"}
    reply, plan = done(session, {"ask": "compile", **where}), lab_program.planned(where["mesh"], where["layout"], None)
    rows = {what: (estimate, compiled) for what, estimate, compiled in reply["result"]["rows"]}
    assert rows["peak memory of a device"][0] == format_memory(plan.memory.peak)
    assert rows["sent by each device"] == (format_bytes(plan.bytes_sent),) * 2
    assert reply["result"]["peak"] > 0


def test_where_it_begins(mesh):
    assert lab_program.lab(mesh=None, layout=None).session.start.mesh == "data=16"
    assert lab_program.lab(mesh=None, layout=None).session.start.layout == "batch?: data; embed?: data"
    assert lab_program.lab(mesh=mesh, topology=None).session.start.mesh == "data=4, model=2"
    with pytest.raises(MeshError, match="no mesh is given, and none is set"):
        lab_program.lab(mesh=None, topology=None)
    with pytest.raises(UnsupportedError):
        mp.lab("no function", topology="v5e:4x4")


def test_the_number_of_running_jobs_is_bounded(session):
    session._jobs.clear()
    with session._turns.turn():  # jobs wait for their turn
        begun = [session.handle({"ask": "start", "topology": lab_program.TOPOLOGY}) for _ in range(MAX_RUNNING + 3)]
        assert all("job" in reply for reply in begun[:MAX_RUNNING])
        said = f"{MAX_RUNNING} jobs are running: stop one, or wait until one has ended"
        assert {reply.get("failed") for reply in begun[MAX_RUNNING:]} == {said}
        for reply in begun[:MAX_RUNNING]:
            session.handle({"ask": "stop", **reply})
    for reply in begun[:MAX_RUNNING]:
        session._jobs[reply["job"]].wait(60)
    done(session, {"ask": "start", "topology": lab_program.TOPOLOGY})


def test_jobs_that_begin_at_once_have_numbers_of_their_own(session, monkeypatch):
    """Several threads begin jobs, which end at once, while others ask for their state."""
    monkeypatch.setitem(session._begin.__func__.__globals__, "MAX_RUNNING", 400)
    session._jobs.clear()

    def page(_):
        for _ in range(50):
            begun = session._begin(lambda job: None)
            reply = session.handle({"ask": "job", **begun})
            assert "RuntimeError" not in f"{reply}"  # of a dictionary that changes under a thread
            yield begun["job"]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = [n for numbers in threads.map(lambda k: list(page(k)), range(8)) for n in numbers]
    finally:
        sys.setswitchinterval(before)
    assert len(set(found)) == len(found) == 8 * 50
    for job in session._jobs.values():  # those that run are not dropped
        job._thread.join()
    session._begin(lambda job: None)
    assert len(session._jobs) <= 17


def test_inferred_names_are_changed():
    session = lab_program.lab(dims="auto").session
    names = {row[0]: row[1:] for row in session.handle({"ask": "open"})["names"]}
    assert list(names) == ["embed", "layers", "mlp", "batch"]
    assert names["mlp"][:3] == ["512", "2", "yes"]
    assert "a loop runs over it" in names["layers"][3]
    given = ask(session, lab_program.RULES)["plan"]
    assert given["metrics"] == ask(lab_program.lab().session, lab_program.RULES)["plan"]["metrics"]
    assert "dims" not in given["python"]
    assert '"x": "batch embed"' in given["dims"]
    renamed = ask(session, ["batch: data", "ffn: model", "embed: data"], names="mlp=ffn")["plan"]
    assert renamed["metrics"] == given["metrics"]
    assert "embed ffn" in renamed["dims"]
    assert renamed["dims"] in renamed["python"]
    assert "dims=dims" in renamed["python"]
    errors = ask(session, lab_program.RULES, names="mlp=ffn")["errors"]
    assert errors["rules"][1]["headline"].startswith("rule `mlp: model`")


@pytest.mark.parametrize(
    ("names", "says"),
    [("mlp=embed", "stands twice"), ("mlp=a:b", "is not a name"), ("mpl=ffn", "no inferred name"), ("mlp", "no pairs")],
)
def test_names_that_cannot_be(names, says):
    assert says in ask(lab_program.lab(dims="auto").session, [], names=names)["errors"]["names"]["headline"]


def test_names_of_the_user_are_not_changed_by_the_page(session):
    assert session.handle({"ask": "open"})["names"] == []
    assert "names of their own" in ask(session, [], names="mlp=ffn")["errors"]["names"]["headline"]
