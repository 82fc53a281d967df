"""Stricter than the user: four CPU devices, warnings are errors, one seed, nothing left behind."""

import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `import trainer` has it

import keras
import pytest
import tensorflow as tf
from hypothesis import settings

import strategies

TESTS = pathlib.Path(__file__).parent
strategies.split_cpu(4)
# Tracing makes the first example of a test slow; nothing here is about time.
for name, examples in (("default", 15), ("full", 60)):
    settings.register_profile(
        name, deadline=None, derandomize=True, max_examples=examples, print_blob=False
    )


def pytest_addoption(parser):
    """`--full` is for CI, by day and by night; `--regenerate`, for whoever has changed an error."""
    parser.addoption("--full", action="store_true", help="long random searches, and slow tests")
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write docs/errors.md anew instead of comparing it",
    )


def pytest_configure(config):
    """The full run tries more random examples."""
    settings.load_profile("full" if config.getoption("--full") else "default")


# By default one and three replicas stand for two and four as well, and in some files three alone,
# or one, for all; `.ci/nightly` runs these in full.
ONE_AND_THREE = (
    "trainer/step/test_attempt.py",
    "laws/test_batch_arithmetic.py",
    "trainer/checkpoint/test_saver.py",
)
THREE_ALONE = (
    "laws/test_transaction.py",
    "laws/test_retry.py",
    "trainer/config/test_skip_policy.py",
    "trainer/step/test_randomness.py",
)
ONE_ALONE = ("trainer/step/test_objective.py", "trainer/step/test_fused.py")
LEFT_OUT = dict.fromkeys(ONE_AND_THREE, (2, 4)) | dict.fromkeys(THREE_ALONE, (1, 2, 4))
LEFT_OUT |= dict.fromkeys(ONE_ALONE, (2, 3, 4))


# Few tests, and slow ones: begun first, so that they do not run alone at the end.
FIRST = (
    "laws/test_resume.py",
    "laws/test_workers.py",
    "strategies/test_workers.py",
    "trainer/loop/test_parameter_server.py",
    "trainer/monitor/test_preemption.py",
    "conformance/test_examples.py",
    "trainer/replay/test_rerun.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    """Puts slow files first; leaves out what is only in the full run, and marks what is more there."""
    items.sort(key=lambda item: place_of(item) not in FIRST)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("replicas") in LEFT_OUT.get(place_of(item), ()):
            item.add_marker(pytest.mark.slow)
        slow = item.get_closest_marker("slow")
        searches = getattr(item.obj, "is_hypothesis_test", False)
        if slow or searches or "full" in item.fixturenames:
            item.add_marker(pytest.mark.more_in_full)
        if slow and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="slow: only with --full"))


def place_of(item):
    """Where a test's file stands under tests/."""
    return item.path.relative_to(TESTS).as_posix()


@pytest.fixture(scope="session")
def full(request):
    """Whether this is the full run."""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts from the same seed and the float32 policy, and must leave that policy."""
    keras.utils.set_random_seed(0)
    assert keras.config.dtype_policy().name == "float32"
    yield
    assert keras.config.dtype_policy().name == "float32"


@pytest.fixture(scope="session")
def mirrored():
    """Mirrored strategies by their number of replicas, each made once."""
    made = {}

    def of(replicas):
        if replicas not in made:
            devices = [f"CPU:{index}" for index in range(replicas)]
            made[replicas] = strategies.create("mirrored", devices)
        return made[replicas]

    return of


@pytest.fixture
def on_replicas():
    """Runs a replica function on a strategy, in a graph; returns each replica's result."""

    def run(strategy, function, *args):
        @tf.function
        def step():
            return strategy.run(function, args)

        return tf.nest.map_structure(strategy.experimental_local_results, step())

    return run
