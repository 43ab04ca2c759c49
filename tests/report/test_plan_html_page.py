"""Pages of plans: well-formed, complete, nothing from the network, text escaped, no estimate without a topology."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.report import plan_page
from meshpar._src.units import format_bytes, format_memory, format_seconds
from meshpar.errors import UnsupportedError

VOID = {"meta", "link", "br", "img", "input", "hr"}
DIMS = {"w": "layers embed mlp", "v": "layers mlp embed", "x": "batch embed"}
ARGS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 256, 512), (4, 512, 256), (64, 256))]


def step(w, v, x):
    def layer(x, weights):
        return jnp.tanh(x @ weights[0]) @ weights[1], None

    return jax.grad(lambda w: jax.lax.scan(layer, x, (w, v))[0].sum())(w)


def planned(layout="batch: data; mlp: model; embed: data", topology=None, mesh="data=4, model=2") -> mp.Plan:
    return mp.plan(step, *ARGS, mesh=mesh, topology=topology, layout=layout, dims=DIMS)


class Reader(html.parser.HTMLParser):
    """Text by section, tags that do not close, and addresses of anything that would be loaded."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self.rows: dict[str, int] = {}
        self.now = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.now = ""
        if tag == "script" and ("id", "plan") in attrs:
            self.now = "script"
        self.ids += [v for k, v in attrs if k == "id"]
        if tag == "tr":
            self.rows[self.now] = self.rows.get(self.now, 0) + 1
        self.loads += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.now = data
        if self.open and self.open[-1] == "a" and data == "#":
            return
        self.sections[self.now] = self.sections.get(self.now, "") + data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    plan = planned(topology="v5e:2x4")
    plan.save(path)
    return plan, path.read_text("utf8")


def test_it_is_well_formed_and_loads_nothing(page):
    _, text = page
    read = Reader(text)
    assert read.wrong == []
    assert read.open == []
    icon, *links = read.loads
    assert icon == "data:,"  # an empty one: a browser requests none
    assert all(link.startswith("#") and link[1:] in read.ids for link in links)
    assert len(read.loads) > 10
    assert len(set(read.ids)) == len(read.ids)
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_it_shows_the_plans_own_figures(page):
    plan, text = page
    read = Reader(text)
    assert format_memory(plan.memory.peak) in read.sections[""]
    assert format_bytes(plan.bytes_sent) in read.sections[""]
    for rule in plan.layout.rules:
        assert str(rule) in read.sections["Rules"]
    distinct = {(c.op, c.axes, c.dims, c.dtype, c.bytes, c.cause, c.source) for c in plan.collectives}
    causes = {plan.rule_of(c) for c in plan.collectives}
    assert len(causes) > 1
    assert read.rows["Collectives"] == len(causes) + len(distinct)  # a row of headings for each rule
    for c in plan.collectives:
        assert c.cause.replace("`", "") in read.sections["Collectives"]
    assert "<code>embed: data</code>" in text.split('id="collectives"')[1]
    for h in plan.inputs:
        assert h.path in read.sections["Arguments"]
    assert "all-gather" in read.sections["Timeline"]
    order = ["Step time", "Timeline", "Memory per device", "Roofline", "Rules", "Collectives", "Arguments"]
    assert [title for title in read.sections if title in order] == order
    total = re.search(r'<tr class="total">.*?</tr>', text)[0]
    assert format_bytes(plan.bytes_sent) in total
    assert format_seconds(plan.comm_seconds) in total
    assert "Fits: " in read.sections[""]
    assert (
        f"A step takes about {format_seconds(plan.seconds)} (MFU {100 * plan.time.mfu:.0f} %), bound by"
        in read.sections[""]
    )
    for fact in ("step on 8 devices of v5e:2x4", plan.chip.name, jax.__version__, plan.lowering):
        assert fact in read.sections[""]
    values = [float(v) for v in re.findall(r'<td class="n[^"]*" data-v="([^"]*)"', text)]  # by which columns are sorted
    assert len(values) > 20
    assert max(values) > 1e6


def test_the_page_of_a_plan_that_does_not_fit_does_not_say_that_its_step_takes_time(tmp_path):
    x = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32)
    mp.plan(lambda x: x * 2, x, mesh="data=8", topology="v5e:2x4", layout="").save(tmp_path / "plan.html")
    said = Reader((tmp_path / "plan.html").read_text("utf8")).sections[""]
    assert "Does not fit: " in said
    assert "A step that fitted would take about " in said
    assert "A step takes" not in said


@pytest.mark.parametrize(("layout", "by_cost"), [("batch: data", False), ([("batch", "data")], True)])
def test_a_page_says_how_rules_are_resolved(layout, by_cost):
    text = plan_page(mp.plan(jnp.tanh, ARGS[2], mesh="data=4", layout=layout, dims={"*": "batch _"}))
    assert ("batch: data (by cost)" in text) == by_cost
    assert ("to the one with which the op sends the fewest bytes" in text) == by_cost
    assert "{}" not in text.split('<section id="rules">')[1].split("</section>")[0]


def test_names_are_escaped():
    args = ({"<b>": ARGS[0]},)
    plan = mp.plan(lambda w: w["<b>"] * 2, *args, mesh="data=4", layout="embed: data", dims={"*": "layers embed mlp"})
    text = plan_page(plan)
    assert "w/&lt;b&gt;" in text
    assert "w/<b>" not in text


def test_the_cell_of_a_notebook_has_no_script_and_its_styles_stay_in_it(page):
    plan, _ = page
    cell = plan._repr_html_()
    read = Reader(cell)
    assert read.wrong == []
    assert "<script" not in cell
    assert len(cell) < len(plan_page(plan))
    styles = re.sub(r"@media[^{]*{", "", cell[cell.index("<style>") + 7 : cell.index("</style>")])
    selectors = [s.strip() for s in re.findall(r"([^{}]+){", styles)]
    assert selectors
    assert all(".mp" in part for s in selectors for part in s.split(",") if not s.startswith("body:has(> .mp.page)"))


def test_other_files(page, tmp_path):
    plan, _ = page
    plan.save(tmp_path / "plan.json")
    plan.save(str(tmp_path / "plan.txt"))
    assert json.loads((tmp_path / "plan.json").read_text())["memory"]["peak"] == plan.memory.peak
    assert (tmp_path / "plan.txt").read_text() == str(plan)
    with pytest.raises(UnsupportedError, match=r"cannot be saved as `\.pdf`"):
        plan.save(tmp_path / "plan.pdf")
