"""Two plans side by side: metrics, tensors and collectives that differ, as text, JSON and a page."""

import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import meshpar as mp
from meshpar._src.report.diff import Metric
from meshpar._src.units import format_bytes, format_memory, format_seconds

DIMS = {"w": "embed mlp", "x": "batch embed"}
ARGS = (jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32))


def step(w, x):
    return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)


def planned(layout: str, mesh: str = "data=8", topology: str | None = "v5e:2x4") -> mp.Plan:
    return mp.plan(step, *ARGS, mesh=mesh, topology=topology, layout=layout, dims=DIMS, overlap="xla")


@pytest.fixture(scope="module")
def found():
    return planned("batch: data").diff(planned("batch: data; embed: data"))


def test_what_differs(found):
    facts, weight = json.loads(found.to_json()), 256 * 512 * 4
    assert facts["a"]["layout"] == "batch: data"
    assert facts["metrics"]["peak memory of a device"]["a"] == found.a.memory.peak
    assert facts["metrics"]["step"]["b"] == found.b.seconds
    assert found.tensors == [("w", "embed mlp", "embed:data mlp", weight, weight / 8)]
    sent = weight * 7 / 8
    assert sorted(found.collectives) == [
        ("all-gather", "data", "embed mlp", 0, sent),
        ("all-reduce", "data", "embed mlp", 2 * sent, 0),
        ("reduce-scatter", "data", "embed mlp", 0, sent),
    ]
    metrics = {f.name: f for f in found.metrics}
    assert (metrics["  all-reduce"].a, metrics["  all-reduce"].b) == (2 * sent, 0)
    changes = [metrics[name].change for name in ("sent by a device in a step", "  all-reduce", "  all-gather")]
    assert changes == ["same", "−100.0 %", ""]  # an all-reduce is a reduce-scatter and an all-gather


def seconds_of(text: str) -> float:
    """The number of a difference, ``−3.2 ms``."""
    number, unit = re.fullmatch(r"([+−][\d.]+)\s(s|ms|µs)", text).groups()
    return float(number.replace("−", "-")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_the_verdict_says_which_step_is_shorter_and_its_parts_add_up():
    fast, slow = planned("", "data=8"), planned("batch: data", "data=8")  # communication takes longest
    verdict = fast.diff(slow).verdict
    assert slow.seconds / fast.seconds > 2
    idle = "no value of {} is split over `data`: its devices all do the same work; "
    ratio = slow.seconds / fast.seconds
    assert verdict.startswith(f"{idle.format('a')}b takes {ratio:.3g} × as long as a, +")
    back = slow.diff(fast)
    assert back.verdict.startswith(f"{idle.format('b')}b is {ratio:.3g} × as fast as a, −")
    assert " ".join(str(back).split()).startswith(" ".join(back.verdict.split()))
    assert back.verdict in back._repr_html_()
    total, parts = back.verdict.split(" as fast as a, ")[1].split(" a step, bound by ")
    named = {name: seconds_of(n) for name, n in re.findall(r"(\D+?) ([+−][\d.]+\s\S+?)(?:, |$)", parts)}
    assert max(named, key=lambda k: abs(named[k])) == "exposed communication over data"
    assert seconds_of(total) == pytest.approx(fast.seconds - slow.seconds, rel=6e-3)
    assert sum(named.values()) == pytest.approx(fast.seconds - slow.seconds, rel=0.01)
    mfu = next(m for m in back.metrics if m.name == "MFU")
    assert mfu.change == "same" or mfu.change == f"+{round(100 * mfu.b) - round(100 * mfu.a)} points"
    assert Metric("MFU", 0.524, 0.526, "share").change == "+1 points"
    assert Metric("MFU", 0.241, 0.238, "share").change == "same"


def test_the_verdict_of_other_programs_and_devices_says_so():
    where = {"mesh": "data=8", "topology": "v5e:2x4", "layout": "batch: data", "dims": {"x": "batch embed"}}
    small, large = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, 128))

    def double(x):
        return 2 * x

    def negative(x):
        return -x

    a = mp.plan(double, small, **where)
    for b, says in (
        (mp.plan(negative, small, **where), "two programs, a: double, b: negative; "),
        (mp.plan(double, large, **where), "the arguments have different shapes; "),
        (a.replan(mesh="data=8", topology="h100:8"), "different devices, a: v5e:2x4, b: h100:8; "),
    ):
        assert a.diff(b).verdict.startswith(says)


def test_the_verdict_without_a_chip_or_without_a_difference():
    unknown = planned("batch: data", topology=None).diff(planned("", topology=None))
    assert not any("–" in line for line in str(unknown).partition("change")[2].split("argument")[0].splitlines())
    assert unknown.verdict.endswith(f"; b sends 0 B a step, a {format_bytes(unknown.a.bytes_sent)}")
    same = planned("batch: data").diff(planned("batch: data"))
    assert same.verdict.startswith("b takes as long as a, ")
    assert (same.tensors, same.collectives) == ([], [])
    assert "the same plan" in str(same)
    assert "The same plan." in same._repr_html_()


@pytest.mark.parametrize(
    ("a", "b", "change"), [(103, 1.62e6, ""), (1e6, 3.1e6, "+210 %"), (1e6, 1.5e6, "+50.0 %"), (1e6, 2.5e7, "+2,400 %")]
)
def test_a_change_from_next_to_nothing_is_no_ratio(a, b, change):
    assert Metric("sent", a, b, "bytes").change == change


def test_less_is_green_and_more_is_red_in_the_terminal(found):
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(found)
    assert re.search(r"\x1b\[32m *−100\.0 %", out.getvalue())
    assert "dim" in Metric("sent", 1.0, 1.0, "bytes").cell.css
    assert Metric("sent", 1.0, 2.0, "bytes").cell.terminal.style == "red"


def test_a_page_draws_the_argument_that_differs_most_and_both_times(opened, tmp_path):
    """The grids are those of the plans, and a plan whose axes run elsewhere on the chips shows where."""
    a = planned("batch: data", "data=2, model=8", "v5e:4x4")
    b = planned("batch: data; embed: data; mlp: model", "model=8, data=2", "v5e:4x4")
    assert a.torus != b.torus
    a.diff(b).save(tmp_path / "diff.html")
    page = opened((tmp_path / "diff.html").as_uri())
    drawings = page.locator(".drawing")
    assert drawings.locator("h3 code").all_inner_texts() == ["w", "w"]
    sharded = ["embed 0:128 of 256", "mlp 0:64 of 512"]
    assert drawings.locator("li").all_inner_texts() == ["embed all 256", "mlp all 512", *sharded]
    texts = [*(format_seconds(p.seconds) for p in (a, b)), *(format_memory(p.memory.peak) for p in (a, b))]
    assert page.locator(".bars .n").all_inner_texts() == texts
    widths = page.locator(".bars .track").evaluate_all(
        "all => all.map((track) => [...track.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
    )
    assert max(widths[:2]) == pytest.approx(100)
    assert min(widths[:2]) / 100 == pytest.approx(min(a.seconds, b.seconds) / max(a.seconds, b.seconds), rel=1e-4)
    assert widths[3] / widths[2] == pytest.approx(b.memory.peak / a.memory.peak, rel=1e-4)
    assert page.locator(".torus").count() == 2
