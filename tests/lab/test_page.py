"""The lab's page in a browser: edits by mouse, keyboard or as text show the numbers of ``mp.plan``."""

import contextlib
import json
import re

import lab_program
import pytest
from browser import CONTRASTS

from meshpar._src.lab.server import Server
from meshpar._src.lab.session import Draft
from meshpar._src.report.document import front_end
from meshpar._src.units import format_bytes, format_memory, format_seconds
from meshpar.errors import MeshparError


@pytest.fixture(scope="module")
def server():
    server = Server(lab_program.resizable(layouts={"mine": "mlp: model; batch: data"}).session)
    server.start()
    yield server
    server.stop()


CLIPBOARD = ["clipboard-read", "clipboard-write"]


@pytest.fixture
def page(opened, server):
    """A page, which requests nothing from other servers."""
    page, others = opened(viewport={"width": 1400, "height": 1000}, permissions=CLIPBOARD), []
    own = (f"http://127.0.0.1:{server.server_port}/", "data:")
    page.on("request", lambda r: None if r.url.startswith(own) else others.append(r.url))
    page.lab = server.url
    page.goto(server.url)
    page.locator("main[data-metrics]").wait_for()
    page.locator(".start[aria-busy=false]").wait_for()
    yield page
    assert others == []


@pytest.fixture
def opened_lab(opened):
    """A function that opens the page of a lab, and returns its session as well."""
    with contextlib.ExitStack() as stack:

        def open_lab(lab):
            server = Server(lab.session)
            server.start()
            stack.callback(server.stop)
            return opened(server.url, permissions=CLIPBOARD), lab.session

        yield open_lab


def wait_until_drawn(page):
    page.locator('main[aria-busy="false"]').wait_for()


def metrics(page):
    wait_until_drawn(page)
    return json.loads(page.locator("main").get_attribute("data-metrics"))


def state(page):
    """Mesh and layout as the page's controls show them."""
    wait_until_drawn(page)
    inputs = page.locator(".rules input.mono").evaluate_all("all => all.map((x) => x.value)")
    on = page.locator(".rules input[type=checkbox]").evaluate_all("all => all.map((x) => x.checked)")
    return page.get_by_label("mesh", exact=True).input_value(), [
        text for text, holds in zip(inputs, on, strict=True) if holds
    ]


def agrees(page):
    """Assert that the page shows the numbers of ``mp.plan``; returns whether the layout can be planned."""
    mesh, rules = state(page)
    try:
        plan = lab_program.planned(mesh, "\n".join(rules))
    except MeshparError:
        assert page.locator("main.stale").count() == 1
        assert page.locator(".rules .error:visible").count() >= 1
        return False
    assert page.locator("main.stale").count() == 0
    shown = metrics(page)
    assert (shown["peak"], shown["seconds"], shown["sent"]) == (plan.memory.peak, plan.seconds, plan.bytes_sent)
    cards = page.locator(".metrics .card b").all_inner_texts()
    assert cards[:2] == [format_memory(plan.memory.peak), format_seconds(plan.seconds)]
    assert cards[3] == format_bytes(plan.bytes_sent)
    return True


def rule(page, k):
    return page.locator(".rules > li").nth(k)


def test_a_rule_is_edited_and_broken(page):
    before = metrics(page)
    assert agrees(page)
    rule(page, 2).get_by_label("rule", exact=True).fill("embed: model")
    assert agrees(page)
    assert metrics(page)["peak"] != before["peak"]
    rule(page, 2).get_by_label("rule", exact=True).fill("embed: modle")
    wait_until_drawn(page)
    assert "names axis modle" in rule(page, 2).locator(".error").inner_text()
    assert page.locator(".rules .error:visible").count() == 1
    assert page.get_by_role("button", name="Compile this").is_disabled()
    rule(page, 2).get_by_label("rule", exact=True).fill("embed: data")
    assert agrees(page)
    assert metrics(page) == before
    assert page.locator(".error:visible").count() == 0


def test_rules_are_ordered_by_keyboard_and_mouse(page):
    _, first = state(page)
    rule(page, 0).locator(".grip").press("ArrowDown")
    assert state(page)[1] == [first[1], first[0], first[2]]
    assert agrees(page)
    assert page.evaluate("document.activeElement.className") == "grip"
    page.keyboard.press("ArrowUp")
    assert state(page)[1] == first
    grip, last = rule(page, 0).locator(".grip").bounding_box(), rule(page, 2).bounding_box()
    page.mouse.move(grip["x"] + 5, grip["y"] + 5)
    page.mouse.down()
    page.mouse.move(grip["x"] + 5, last["y"] - 20, steps=5)
    page.mouse.move(grip["x"] + 5, last["y"] + last["height"], steps=5)
    page.mouse.up()
    assert state(page)[1] == [first[1], first[2], first[0]]
    assert agrees(page)
    page.get_by_role("button", name="Undo").click()
    assert state(page)[1] == first


def test_rules_are_switched_added_removed_and_take_axes(page):
    before = metrics(page)
    rule(page, 2).get_by_role("checkbox").uncheck()
    assert agrees(page)
    assert metrics(page)["peak"] > before["peak"]
    rule(page, 2).get_by_role("checkbox").check()
    assert metrics(page) == before
    rule(page, 2).get_by_role("button", name="model", exact=True).click()
    assert state(page)[1][2] == "embed: data+model"
    assert agrees(page)
    page.get_by_role("button", name="layers", exact=True).click()
    assert state(page)[1][3] == "layers?: model"
    assert agrees(page)
    rule(page, 3).get_by_role("button", name="remove").click()
    assert len(state(page)[1]) == 3


def test_the_mesh_is_dragged_and_stepped(page):
    seam = page.locator(".seam")
    box, bar = seam.bounding_box(), page.locator(".mesh").bounding_box()
    page.mouse.move(box["x"] + 7, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(bar["x"] + 20, box["y"] + 20, steps=12)
    page.mouse.up()
    assert state(page)[0] == "data=1, model=16"
    assert agrees(page)
    seam.focus()
    page.keyboard.press("ArrowRight")
    assert state(page)[0] == "data=2, model=8"
    page.keyboard.press("End")
    assert state(page)[0] == "data=16, model=1"
    assert seam.get_attribute("aria-valuetext") == "data 16, model 1"
    assert agrees(page)
    page.get_by_role("button", name="remove axis model").click()
    wait_until_drawn(page)
    assert page.locator(".rules .error:visible").count() == 1
    page.get_by_role("button", name="add axis model").click()
    assert state(page)[0] == "data=16, model=1"
    assert agrees(page)
    page.get_by_label("mesh", exact=True).fill("data=5, model=3")
    wait_until_drawn(page)
    assert page.locator(".error:visible").count() == 1
    page.get_by_label("mesh", exact=True).fill("data=4, model=4")
    page.get_by_label("topology").fill("v5e:8x8")
    page.get_by_label("topology").press("Enter")
    assert state(page)[0] == "data=16, model=4"


def test_the_layout_as_text(page):
    page.get_by_role("button", name="As text").click()
    text = page.get_by_label("layout as text")
    assert text.input_value().splitlines() == lab_program.RULES
    text.fill("batch: data\n\n# a note\nmlp: modle\nembed data")
    wait_until_drawn(page)
    error = page.locator(".error:visible")
    assert error.count() == 1
    assert "names axis modle" in error.inner_text()
    assert "did you mean model?" in error.inner_text()
    assert "has no :" in error.inner_text()
    assert text.get_attribute("aria-invalid") == "true"
    assert error.get_by_role("button").all_inner_texts() == ["line 4", "line 5"]
    for line, name in (("mlp: modle", "line 4"), ("embed data", "line 5")):
        error.get_by_role("button", name=name).click()
        assert text.evaluate("x => x.value.slice(x.selectionStart, x.selectionEnd)") == line
    assert page.locator("main.stale").count() == 1
    text.fill("mlp: model; batch: data\n# embed: data")
    page.get_by_role("button", name="As text").click()
    assert state(page)[1] == ["mlp: model", "batch: data"]
    assert page.locator(".rules > li").count() == 3
    assert agrees(page)


def test_what_the_compiler_says(page):
    """A topology that nobody compiles for: the reason is shown."""
    page.get_by_label("topology").fill("")
    page.get_by_label("topology").blur()
    wait_until_drawn(page)
    page.get_by_label("mesh", exact=True).fill("data=32, model=2")
    wait_until_drawn(page)
    page.get_by_role("button", name="Compile this").click()
    page.get_by_text("not compiled:").wait_for()
    assert "needs 64 devices" in page.locator(".results .error").inner_text()
    page.get_by_label("mesh", exact=True).fill("data=4, model=2")
    wait_until_drawn(page)
    page.get_by_role("button", name="Compile this").click()
    page.get_by_role("columnheader", name="compiler").wait_for(timeout=300_000)
    assert (
        format_bytes(metrics(page)["sent"])
        in page.locator("section", has=page.get_by_text("Compiled program")).inner_text()
    )


def open_link(page, fragment):
    """Another page with this fragment, as a link opens it."""
    page.goto("about:blank")
    page.goto(page.lab + fragment)
    page.locator("main[data-metrics]").wait_for()
    wait_until_drawn(page)


def test_a_link_has_the_state(page):
    rule(page, 2).get_by_label("rule", exact=True).fill("embed: model")
    rule(page, 1).get_by_role("checkbox").uncheck()
    page.get_by_label("lowering", exact=True).select_option("jit")
    page.get_by_label("mesh", exact=True).fill("data=8, model=2")
    page.locator("[data-size=batch]").fill("128")
    page.locator("[data-size=batch]").blur()
    shown, there = metrics(page), state(page)
    plan = lab_program.planned(there[0], "; ".join(there[1]), x=lab_program.batch_of(128), lowering="jit")
    assert (shown["seconds"], shown["peak"], shown["sent"]) == (plan.seconds, plan.memory.peak, plan.bytes_sent)
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    open_link(page, "#" + link.split("#", 1)[1])
    assert metrics(page) == shown
    assert state(page) == there
    assert page.locator(".rules > li").count() == 3  # the disabled rule too
    assert page.get_by_label("lowering", exact=True).input_value() == "jit"
    assert page.locator("[data-size=batch]").input_value() == "128"
    assert page.locator(".error:visible").count() == 0


LAYOUT = "layout=batch%3A+data"
UNREADABLE = {
    "#mesh=data%3D16": "its field layout is absent",
    f"#{LAYOUT}": "its field mesh is absent",
    f"#mesh=data%3D16&{LAYOUT}&lowering=pmap": "lowering pmap does not exist: they are auto, jit, shard_map",
    f"#mesh=%3Cimg+src%3Dx%3E&{LAYOUT}&%3Cb%3E=1": "it has no field <b>",
}


def test_links_that_cannot_be_read(page):
    before = metrics(page)
    for fragment, says in UNREADABLE.items():
        open_link(page, fragment)
        notice = page.locator(".notice").inner_text()
        assert "the link cannot be read" in notice
        assert says in notice
        assert metrics(page) == before


def test_a_link_with_a_layout_that_cannot_be_planned_and_of_another_target(page):
    page.evaluate("location.hash = '#mesh=data%3D16&topology=v5e%3A4x4&layout=batch%3A+dtaa&target=other.py%3Astep'")
    page.locator("main.stale").wait_for()
    assert "names axis dtaa" in rule(page, 0).locator(".error").inner_text()
    assert "the link is of the target other.py:step" in page.locator(".notice").inner_text()
    page.get_by_role("button", name="Undo").click()
    assert agrees(page)


def test_sizes_are_edited(page):
    before = metrics(page)
    size = page.locator("[data-size=batch]")
    for n in ("no number", "0", "6"):
        size.fill(n)
        size.press("Enter")
        page.locator("main.stale").wait_for()
        assert page.locator(".error:visible").count() == 1
    size.fill("256")
    size.press("Enter")
    plan = lab_program.planned(lab_program.MESH, "; ".join(lab_program.RULES), x=lab_program.batch_of(256))
    assert metrics(page)["peak"] == plan.memory.peak
    page.locator(".start[aria-busy=false]").wait_for()
    size.fill("64")
    size.press("Enter")
    assert metrics(page) == before


def test_known_layouts_and_the_candidates_of_a_search_are_chosen(page):
    page.get_by_role("button", name="mine").click()
    assert state(page)[1] == ["mlp: model", "batch: data"]
    assert agrees(page)
    known = metrics(page)["seconds"]
    page.get_by_role("button", name="Search for a better layout").click()
    page.get_by_role("progressbar").wait_for()
    page.get_by_role("button", name="search result").wait_for()
    wait_until_drawn(page)
    assert page.get_by_role("progressbar").count() == 0
    assert "candidates" in page.locator(".searched").inner_text()
    assert "search result" in "".join(page.locator(".start tbody tr[aria-current=true]").all_inner_texts())
    assert metrics(page)["seconds"] <= known
    assert agrees(page)
    points = page.locator(".candidates a")
    assert points.count() > page.locator(".start tbody tr").count()
    assert page.locator(".candidates a[tabindex='0']").count() == 1
    assert f"usable {format_memory(0.85 * lab_program.planned(*state(page)).chip.per_device().hbm)}" in text_of_plot(
        page
    )
    times, sizes = (re.findall(rf"([\d.]+) {unit}\b", text_of_plot(page)) for unit in ("[mµ]?s", "[KMG]iB"))
    assert min(len(times), len(sizes)) >= 3  # ticks
    other = page.locator(".candidates a[aria-checked=false]").nth(5)
    label = other.get_attribute("aria-label")
    link = other.get_attribute("href")
    other.dispatch_event("click")
    assert agrees(page)
    assert page.locator(".candidates a[aria-checked=true]").first.get_attribute("aria-label") == label
    shown = state(page)
    assert shown[0] in label
    points.first.focus()
    page.keyboard.press("ArrowRight")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    assert agrees(page)
    assert format_seconds(metrics(page)["seconds"]) in label
    open_link(page, link)  # as a tab that the browser opens
    assert state(page) == shown


def text_of_plot(page):
    return page.locator(".candidates").text_content()


def test_hints_are_dismissed_once(browser, server):
    """In this browser also for a lab at another port; in another browser they are there."""
    other = Server(server.session)
    other.start()
    context = browser.new_context()
    for url, seen in ((server.url, 2), (other.url, 2), (server.url, 0)):
        page = context.new_page()
        page.goto(url)
        page.locator("main[data-metrics]").wait_for()
        hints = page.locator(".hint:visible")
        assert hints.count() == seen
        if url == other.url and seen:
            texts = " ".join(hints.all_inner_texts())
            assert "Search plans" in texts
            assert "Pin this plan" in texts
            hints.first.get_by_role("button", name="Got it").click()
            assert hints.count() == 0
        page.close()
    context.close()
    other.stop()


def test_it_fits_and_follows_the_colour_scheme(page):
    for width in (360, 700, 1300):
        page.set_viewport_size({"width": width, "height": 900})
        page.reload()
        page.locator("main[data-metrics]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator(".lane.kernels").bounding_box()["width"] > width / 3
        tops = page.locator(".metrics .card").evaluate_all("all => all.map((card) => card.getBoundingClientRect().top)")
        assert {tops.count(top) for top in tops} <= {2, 4}
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 28)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_texts_have_the_contrast_of_wcag_and_every_control_has_a_name_and_shows_the_focus(page):
    """4.5 to 1 in both colour schemes, hints and the texts of the plot included; without disabled controls and hatched bars."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        wait_until_drawn(page)
        assert page.locator(".hint:visible").count() == 2
        assert page.evaluate(CONTRASTS) == []
    nameless = page.locator("button, input, textarea").evaluate_all(
        "all => all.filter((x) => !(x.getAttribute('aria-label') || x.textContent.trim() || x.labels?.length)).length"
    )
    assert nameless == 0
    for _ in range(40):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "(({ outlineStyle, outlineWidth }) => outlineStyle + outlineWidth)(getComputedStyle(document.activeElement))"
        )
        inside = page.evaluate("document.querySelector('main').contains(document.activeElement)")
        assert not inside or style == "solid2px"


def test_the_page_in_a_notebook_asks_through_the_kernel(opened):
    """The widget's half that a browser runs, with a model that is bound to a session."""
    session, page = lab_program.lab().session, opened()
    page.expose_function("answer", session.handle)
    page.set_content("<div id='cell'></div>")
    page.evaluate(
        """async (js) => {
            const { default: widget } = await import(URL.createObjectURL(new Blob([js], { type: "text/javascript" })));
            const heard = [];
            const model = {
                on: (what, f) => heard.push(f), off: () => heard.pop(),
                send: async ({ number, request }) => {
                    const reply = await answer(request);
                    for (const f of heard) f({ number, reply });
                },
            };
            widget.render({ model, el: document.querySelector("#cell") });
        }""",
        front_end("lab")[1],
    )
    page.locator("#cell[data-metrics]").wait_for()
    shown = json.loads(page.locator("#cell").get_attribute("data-metrics"))
    plan = lab_program.planned(lab_program.MESH, "; ".join(lab_program.RULES))
    assert (shown["peak"], shown["seconds"]) == (plan.memory.peak, plan.seconds)


def test_without_a_layout_the_page_opens_with_the_best_known_one(opened_lab):
    page, session = opened_lab(lab_program.lab(mesh=None, layout=None))
    page.locator(".start tr.now").first.wait_for()
    wait_until_drawn(page)
    known = session._known(session._jobs[1], Draft("", lab_program.TOPOLOGY, ""))
    seconds = [row["seconds"] for row in known]
    assert metrics(page)["seconds"] == min(seconds)
    page.get_by_role("button", name="Undo").click()
    page.wait_for_timeout(300)
    assert metrics(page)["seconds"] > min(seconds)
