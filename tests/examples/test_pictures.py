"""The pictures of the README and the docs show the numbers that their plans have."""

import json
import re

import lab_program
import pictures
import pytest

from meshpar._src.units import format_seconds


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
    assert [f"{format_seconds(p.seconds)}</b>" in side for p, side in zip(plans, (first, second), strict=True)] == [
        True
    ] * 2
    for plan, side in zip(plans, (first, second), strict=True):
        shown = dict(re.findall(r'<div><span>(?:<b>)?([^<]*).*?<span class="n">([^<]*)', side))
        alone = {
            f"collectives: {a}": sum(c.total_seconds for c in plan.collectives if c.axes == (a,)) for a in plan.sizes
        }
        text = f"kernels {shown['kernels']} · communication not hidden {shown['exposed']} "
        assert text in " ".join(str(plan).split())  # rounded once, though 108 + 178 are not 287
        assert {a: shown.get(a) for a in alone} == {a: format_seconds(n) if n else None for a, n in alone.items()}
    marks = [re.sub("<.*?>", "", m) for m in re.findall("<mark>(.*?)</mark>", second)]
    assert marks == ["model 8 data 2"] * mesh + ["batch: data"] * layout
    assert ("rules of both" in body) == (not layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PLANS)
def test_a_picture_shows_the_numbers_of_its_plan(name):
    assert (pictures.HERE / name.partition(",")[0]).exists()
    assert json.loads(pictures.NUMBERS.read_text())[name] == pictures.numbers(pictures.PLANS[name])
