"""The page of a plan in a browser: filters, tooltips, drawings of shards, downloads, links, widths and colour schemes."""

import csv
import io
import json
import math

import lab_program
import pytest
from browser import CONTRASTS

from meshpar._src.entry.cli import main
from meshpar._src.report.facts import rules_of
from meshpar._src.report.timeline import COMPUTE, LOOP, timeline
from meshpar._src.units import format_memory, format_seconds

LAYOUT = "; ".join(lab_program.RULES)


@pytest.fixture(scope="module")
def plan():
    return lab_program.planned(lab_program.MESH, LAYOUT)


@pytest.fixture(scope="module")
def address(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    plan.save(path)
    return path.as_uri()


@pytest.fixture
def page(opened, address):
    return opened(address, viewport={"width": 1300, "height": 900})


def visible_rows(page):
    return page.locator("#collectives tbody tr:visible").all_inner_texts()


def test_the_filter_shows_the_collectives_with_its_words(page, plan):
    groups = page.locator("#collectives details")
    assert groups.count() == len({plan.rule_of(c) for c in plan.collectives})
    groups.evaluate_all("all => all.forEach((group) => { group.open = true; })")
    every = visible_rows(page)
    page.get_by_label("filter collectives").fill("ALL-gather embed")
    shown = visible_rows(page)
    assert 0 < len(shown) < len(every)
    assert all("all-gather" in row for row in shown)
    page.get_by_label("filter collectives").fill("no such collective")
    assert visible_rows(page) == []
    assert "0 of" in page.locator("#collectives [role=status]").inner_text()
    page.get_by_label("filter collectives").fill("")
    assert visible_rows(page) == every


def test_a_link_to_a_closed_group_opens_it(page):
    page.locator("#collectives details").evaluate_all("all => all.forEach((group) => { group.open = false; })")
    assert visible_rows(page) == []
    link = page.locator("tr[data-rule='1'] a")
    link.click()
    assert page.evaluate("location.hash") == "#sent-1"
    assert page.locator("#sent-1").get_attribute("open") is not None
    assert page.locator("#sent-0").get_attribute("open") is None
    page.goto(page.url.split("#")[0] + "#no-such-section")  # is ignored
    assert page.locator("h1").is_visible()


def test_pointing_at_a_rule_highlights_its_arguments(page, plan):
    def lit():
        paths = page.locator("#arguments tr.lit button.path").all_inner_texts()
        return sorted(paths)

    assert lit() == []
    for k in range(len(plan.layout.rules)):
        page.locator(f"tr[data-rule='{k}']").hover()
        want = sorted(h.path for h in plan.inputs if k in rules_of(plan, h))
        assert lit() == want
        page.mouse.move(0, 0)
        page.locator(f"tr[data-rule='{k}']").focus()
        assert lit() == want
        page.evaluate("document.activeElement.blur()")
    assert lit() == []


def test_the_drawing_has_the_slice_of_every_device(page, plan):
    sharded = next(h for h in plan.inputs if h.path == "state/w")
    page.get_by_role("button", name="state/w", exact=True).click()
    drawing = page.locator(".drawing")
    sizes = plan.sizes
    for device in ({"data": 0, "model": 0}, {"data": 3, "model": 1}, {"data": 1, "model": 0}):
        for axis, at in device.items():
            drawing.get_by_label(f"index along {axis}").fill(str(at))
        want = []
        for (name, axes), n in zip(sharded.split, sharded.shape, strict=True):
            shards, k = math.prod(sizes[a] for a in axes), 0
            for axis in axes:
                k = k * sizes[axis] + device[axis]
            size = n // shards
            want.append(f"{name} {k * size}:{(k + 1) * size} of {n}" if shards > 1 else f"{name} all {n}")
        assert drawing.locator("li").all_inner_texts() == want
        assert drawing.locator("rect.same").count() == 16 // math.prod(
            sizes[a] for _, axes in sharded.split for a in axes
        )
    page.get_by_role("button", name="x", exact=True).click()
    assert drawing.locator("rect.same").count() == 4  # only `data` shards it
    drawing.locator("svg.devices rect").nth(6).click()
    assert drawing.get_by_label("index along data").input_value() == "2"
    assert drawing.get_by_label("index along model").input_value() == "1"


def drawn(page, lane):
    """(seconds at its start, seconds) of the boxes of a lane of the timeline."""
    boxes = page.locator(f"#timeline .lane[aria-label='{lane}'] i")
    return boxes.evaluate_all("all => all.map((i) => [Number(i.dataset.start), Number(i.dataset.seconds)])")


def test_the_timeline_ends_with_the_step(page, plan):
    """The boxes of the complete step, and of one iteration of a loop, are where the plan's schedule has them."""
    assert format_seconds(plan.seconds) in page.locator("#timeline [role=status]").inner_text()
    line = timeline(plan)
    lanes = {s.lane for s, _ in line.walk()} - {LOOP}
    assert page.locator("#timeline .lane[role=group]").count() == len(lanes)
    end = max(start + seconds for lane in lanes for start, seconds in drawn(page, lane))
    assert end == pytest.approx(plan.seconds)
    loop = next(s for s in line.spans if s.body is not None)
    page.get_by_role("button", name="one iteration of layers: forward").click()
    want = sorted((loop.start + s.start, s.seconds) for s in loop.body.spans if s.lane == COMPUTE)
    inside = [b for b in drawn(page, COMPUTE) if loop.start <= b[0] < loop.start + loop.body.seconds * (1 - 1e-9)]
    for box, span in zip(inside, want, strict=True):
        assert box == pytest.approx(span)
    page.get_by_role("button", name="whole step").click()
    assert max(start + seconds for start, seconds in drawn(page, COMPUTE)) <= plan.seconds * (1 + 1e-9)


def test_dragging_and_keys_zoom(page, plan):
    def shown():
        return page.locator("#timeline [role=status]").inner_text()

    whole = shown()
    lane = page.locator("#timeline .lane.kernels").bounding_box()
    middle = lane["y"] + lane["height"] / 2
    page.locator("#timeline").scroll_into_view_if_needed()
    lane = page.locator("#timeline .lane.kernels").bounding_box()
    middle = lane["y"] + lane["height"] / 2
    page.mouse.move(lane["x"] + lane["width"] / 4, middle)
    page.mouse.down()
    page.mouse.move(lane["x"] + lane["width"] / 2, middle, steps=4)
    page.mouse.up()
    quarter = [format_seconds(plan.seconds * part) for part in (1 / 4, 1 / 2)]
    assert shown().startswith(" to ".join(quarter))
    page.locator("#timeline .lane.kernels i").first.focus()
    page.keyboard.press("0")
    assert shown() == whole
    page.keyboard.press("+")
    assert shown() != whole
    page.keyboard.press("-")
    assert shown() == whole


def test_the_memory_over_the_step(page, plan):
    """The keys walk through the ops; the tallest stack is the peak; the passes are below."""
    plot = page.locator(".plot")
    assert f"peak {format_memory(plan.memory.peak)}" in plot.inner_text()
    assert page.locator(".plot path").count() == page.locator(".plot path[d]").count() > 2
    plot.focus()
    page.keyboard.press("Home")
    sizes = []
    for _, size, name in plan.memory.curve:
        lines = page.locator(".tip:visible").inner_text().split("\n")
        assert lines[0].startswith(f"{format_memory(size)} after {name}")
        sizes.append(size)
        page.keyboard.press("ArrowRight")
    assert max(sizes) == plan.memory.peak
    assert page.locator(".passes i").all_inner_texts() == ["forward", "backward", "optimizer"]
    assert "capacity 15.75 GiB" in plot.inner_text()


def test_the_downloads_are_those_of_the_command_line(page, plan, tmp_path):
    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    with open(download.value.path(), encoding="utf8") as file:
        assert json.load(file) == json.loads(plan.to_json())
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    with open(download.value.path(), newline="", encoding="utf8") as file:
        got = list(csv.DictReader(file))
    target = tmp_path / "target.py"
    target.write_text(
        "from lab_program import DIMS, STATE, X, train_step\n\ndef t():\n    return train_step, (STATE, X), DIMS\n"
    )
    words = ["plan", f"{target}:t", "--topology", lab_program.TOPOLOGY, "--mesh", lab_program.MESH, "--layout", LAYOUT]
    assert main([*words, "--csv", str(tmp_path / "plan.csv"), "--json"]) == 0
    want = list(csv.DictReader(io.StringIO((tmp_path / "plan.csv").read_text("utf8"))))
    numbers = ("bytes", "calls", "total_bytes", "seconds")
    assert [{**row, **{k: float(row[k]) for k in numbers}} for row in got] == [
        {**row, **{k: float(row[k]) for k in numbers}} for row in want
    ]


def test_it_fits_and_no_card_is_alone_in_its_row(page):
    for width in (360, 700, 1000, 1300):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tops = page.locator(".card").evaluate_all("all => all.map((card) => card.getBoundingClientRect().top)")
        assert {tops.count(top) for top in tops} <= {2, 4}


def test_the_picture_of_a_pipeline(opened, tmp_path):
    """The area of each color is the number of its slots, and the picture scrolls by itself where the page is narrow."""
    plan = lab_program.pipelined(stages=4, microbatches=8)
    plan.save(tmp_path / "plan.html")
    page = opened((tmp_path / "plan.html").as_uri(), viewport={"width": 360, "height": 900})
    width = page.locator("#pipeline svg").evaluate("svg => svg.viewBox.baseVal.width")
    for kind in ("p0", "p1"):
        widths = page.locator(f"#pipeline svg .{kind} rect").evaluate_all(
            "all => all.map((r) => r.width.baseVal.value)"
        )
        filled = sum(math.ceil(w / 20) for w in widths)
        assert filled == 4 * 8
    assert width == 20 * plan.pipeline.ticks
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    numbers = page.locator("#pipeline svg text:not(.tick)").all_text_contents()
    ticks = page.locator("#pipeline svg text.tick").all_text_contents()
    assert ticks == [str(t) for t in range(plan.pipeline.ticks)]
    slots = 2 * 4  # forward and backward on four stages
    assert sorted(numbers) == sorted(str(m) for m in range(8) for _ in range(slots))
    label = page.locator("#pipeline svg").get_attribute("aria-label")
    assert "4 stages" in label
    assert f"{plan.pipeline.ticks} ticks" in label


def test_every_control_has_a_name_and_every_text_can_be_read(page):
    """Also the boxes of the timeline, the circles of the roofline and the cursor of the memory, in both colour schemes."""
    focusable = page.locator("button, input, [tabindex]")
    nameless = focusable.evaluate_all(
        "all => all.filter((x) => !(x.getAttribute('aria-label') || x.textContent.trim() || x.labels?.length)).length"
    )
    assert focusable.count() > 20
    assert nameless == 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in ("whole step", "one iteration of layers: backward"):
            page.get_by_role("button", name=name).click()
            assert page.evaluate(CONTRASTS) == []
