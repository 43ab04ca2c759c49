"""The pictures of the README and the docs show the numbers that their plans have."""

import json
import re

import lab_program
import pictures
import pytest


@pytest.mark.parametrize(("mesh", "layout"), [(True, False), (False, True)])
def test_two_plans_side_by_side_have_their_computed_difference_and_a_mark_at_what_differs(mesh, layout, tmp_path):
    plans = [lab_program.planned("data=2, model=8", "batch: data; mlp: model")]
    plans.append(
        plans[0].replan(
            mesh="model=8, data=2" if mesh else "data=2, model=8", layout="batch: data" if layout else plans[0].layout
        )
    )
    pages = []
    for plan in plans:
        plan.save(tmp_path / "plan.html")
        pages.append((tmp_path / "plan.html").read_text())
    body = pictures.compared(pages, ("first", "second")).partition("<main")[2]
    first, second = body.split('<div class="side">')[1:]
    change = 100 * (plans[1].seconds / plans[0].seconds - 1)
    assert f"{change:+.0f} %".replace("-", "−") in second
    assert "%</span>" not in first
    assert [f"{1e3 * p.seconds:.3g} ms</b>" in side for p, side in zip(plans, (first, second), strict=True)] == [
        True
    ] * 2
    for plan, side in zip(plans, (first, second), strict=True):
        shown = dict(re.findall(r'<div><span>(?:<b>)?([^<]*).*?<span class="n">([\d.]+) ms', side))
        alone = {
            f"collectives: {a}": sum(c.total_seconds for c in plan.collectives if c.axes == (a,)) for a in plan.sizes
        }
        assert float(shown["kernels"]) + float(shown["exposed"]) == pytest.approx(float(shown["step"]))
        assert {a: shown.get(a) for a in alone} == {a: f"{1e3 * n:.3g}" if n else None for a, n in alone.items()}
    marks = [re.sub("<.*?>", "", m) for m in re.findall("<mark>(.*?)</mark>", second)]
    assert marks == ["model 8 data 2"] * mesh + ["batch: data"] * layout
    assert ("rules of both" in body) == (not layout)


def test_rounded_parts_add_up_to_the_rounded_sum():
    assert pictures.adding_up([0.1234, 0.1774]) == pytest.approx([0.123, 0.178])  # 123 + 177 are not 301
    assert pictures.adding_up([12.36, 0.04]) == pytest.approx([12.4, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PLANS)
def test_a_picture_shows_the_numbers_of_its_plan(name):
    assert (pictures.HERE / name.partition(",")[0]).exists()
    assert json.loads(pictures.NUMBERS.read_text())[name] == pictures.numbers(pictures.PLANS[name])
