"""The drawing of mesh axes on the chips: the devices of each group, the links that connect them, and the bytes on the links."""

import json

import lab_program
import numpy as np
import pytest

from meshpar._src.compat.compile_only_devices import device_mesh
from meshpar._src.hardware.topology import _places, parse_topology

LAYOUT = "; ".join(lab_program.RULES)


@pytest.fixture
def page(opened):
    return opened()


def shown(page, plan, path):
    plan.save(path)
    page.goto(path.as_uri())
    return json.loads(path.read_text().split('data-draw="drawTorus"')[1].split('json">')[1].split("</script>")[0])


def coordinates(sizes, topology):
    """The coordinates of the devices that JAX assigns to a mesh, [*sizes, (x, y, z, slice)]."""
    where = parse_topology(topology)
    devices = device_mesh(tuple(sizes.values()), _places(where), where.slices, "mesh")
    return np.array([(*d.coords, d.slice_index) for d in devices.flat]).reshape(*devices.shape, 4)


@pytest.mark.parametrize(
    ("mesh", "topology"),
    [
        ("model=8, data=32", "v5e:16x16"),
        ("data=32, model=8", "v5e:16x16"),
        ("data=8, model=4", "v5p:2x4x4"),
        ("data=8, model=4", "2x v5e:4x4"),
    ],
)
def test_links_and_devices_are_those_of_the_plan(page, mesh, topology, tmp_path):
    plan = lab_program.planned(mesh, LAYOUT, topology)
    data = shown(page, plan, tmp_path / "plan.html")
    sizes, at = plan.sizes, coordinates(plan.sizes, topology)
    for k, row in enumerate(data["rows"]):
        (axis,) = row["axes"]
        page.locator(f"tr[data-row='{k}']").hover()
        # the first device is the chosen one; its group: the devices with index 0 along all other axes
        group = at[tuple(slice(None) if a == axis else 0 for a in sizes)]
        title = page.locator(".torus .device.on title").all_text_contents()
        drawn = {tuple(int(word.split()[1]) for word in text.split(", ")) for text in title}
        sides = (at.reshape(-1, 4).max(0) > 0).nonzero()[0]
        assert drawn == {tuple(int(one[d]) for d in sides) for one in group}
        # every device sends the bytes of the plan over its links: in both directions of a ring, in one of other stages
        sent = 0.0
        for j, stage in enumerate(row["stages"]):
            links = page.locator(f".torus .hop[data-stage='{j}']")
            ends = (
                len(group)
                if stage["wraps"] or stage["dim"] == "slice"
                else len(group) // stage["size"] * (stage["size"] - 1)
            )
            assert links.count() == ends
            load = {float(n) for n in links.evaluate_all("all => all.map((link) => link.dataset.bytes)")}
            assert load == {stage["bytes"]}
            sent += len(group) * load.pop() * (2 if stage["wraps"] else 1) / stage["stride"]
        want = sum(c.total_bytes for c in plan.collectives if c.axes == (axis,))
        assert sent == pytest.approx(len(group) * want)
        assert want > 0


def test_devices_without_positions_are_not_drawn(page, tmp_path):
    lab_program.planned("data=4, model=4", LAYOUT, None).save(tmp_path / "plan.html")
    page.goto((tmp_path / "plan.html").as_uri())
    assert page.locator(".torus").count() == 0
