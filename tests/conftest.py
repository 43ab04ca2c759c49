"""Eight CPU devices for every test, and the meshes that tests share."""

import contextlib
import gc
import os

os.environ.setdefault(
    "NPROC", "32"
)  # the TPU interpreter simulates devices with threads: enough, whatever the machine has

os.environ.pop("COLUMNS", None)  # which pytest-xdist sets in its processes: reports have the width of a pipe in both

import durations
import hypothesis
import jax
import numpy as np
import pytest
import quick
from browser import chromium, opened_page

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_num_cpu_devices", 8)  # before anything touches a device


def compile_quickly():
    """Make XLA's CPU compiler faster (`helpers/quick.py`) in this process only.

    XLA reads its flags once, when the first device is requested. Processes that a test starts, such as compilers for TPUs, must not
    inherit them.
    """
    flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{flags or ''} {quick.FLAGS}".strip()
    jax.devices()
    if flags is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = flags


compile_quickly()
# A full collection visits the objects of all earlier tests, which takes seconds: those that `without_gc` of meshpar runs suffice.
# Young objects are visited less often than by default: most of a trace's are freed meanwhile, without a visit.
gc.set_threshold(20_000, 10, 10_000)

import meshpar as mp  # noqa: E402
from meshpar._src.plan import checks  # noqa: E402


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """The mesh of most tests: ``data=4, model=2``."""
    return mp.mesh("data=4, model=2")


@pytest.fixture
def x64():
    """A test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def few_objects():
    """The garbage collector visits objects of this test only: a full collection of all of them takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser):
    """A function that opens a page (:func:`browser.opened_page`), which is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *address, **options: stack.enter_context(opened_page(browser, *address, **options))


@pytest.fixture(autouse=True)
def same_draws(request):
    """A test draws the same numbers whichever tests ran before it."""
    if hasattr(request.module, "RNG"):
        request.module.RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture(autouse=True)
def no_reported_joins():
    """A test gets the warnings of joined names, whichever tests ran before it."""
    checks.REPORTED_JOINS.clear()


@pytest.fixture(autouse=True)
def verified_plans(request, monkeypatch):
    """Where tests are about plans, these are verified after each pass."""
    if request.path.parent.name in ("plan", "passes", "fuzz"):
        monkeypatch.setenv("MESHPAR_VERIFY", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--record-durations", action="store_true", help="write the durations of slow tests to tests/durations.json"
    )
    parser.addoption(
        "--slow-from",
        type=float,
        default=durations.SLOW,
        metavar="SECONDS",
        help="seconds from which a recorded case is slow",
    )
    parser.addoption(
        "--every-case-in",
        action="append",
        default=[],
        metavar="PATH",
        help="run one case of each test outside of these",
    )


def pytest_configure(config):
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their marks
def pytest_collection_modifyitems(config, items):
    """Mark the cases that are recorded as slow; with `--every-case-in`, deselect all others but one of each test outside of it."""
    recorded, seconds = durations.load(), config.getoption("--slow-from")
    complete = tuple(config.getoption("--every-case-in"))
    drawn_from = []
    for item in items:
        if durations.is_slow(item.nodeid, recorded, seconds):
            item.add_marker(pytest.mark.slow)
        elif complete and not item.nodeid.startswith(complete) and not item.get_closest_marker("slow"):
            drawn_from.append(item.nodeid)
    left = durations.all_but_one_case(drawn_from, recorded)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
