"""Shared fixtures and options. Tests run on four CPU devices, from one seed, with warnings as
errors.
"""

import collections
import datetime as dt
import gc
import os
import pathlib
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `import trainer` sets it

import keras
import pytest
import tensorflow as tf
from hypothesis import settings
from marking import laws_of, tiers

import strategies
from trainer.log import console

TESTS = pathlib.Path(__file__).parent
strategies.split_cpu(4)
console.PATIENCE = 3600.0  # what is printed must not depend on how busy the machine is
# No deadline: tracing makes the first example of a test slow, and no test measures time.
for name, examples in (("quick", 5), ("default", 8), ("full", 60)):
    settings.register_profile(
        name, deadline=None, derandomize=True, max_examples=examples, print_blob=False
    )


def pytest_addoption(parser):
    """Adds the options of this project."""
    parser.addoption("--quick", action="store_true", help="only fast tests: within 30 seconds")
    parser.addoption("--thorough", action="store_true", help="also run what only CI runs")
    parser.addoption(
        "--full", action="store_true", help="run everything, and random searches longer"
    )
    parser.addoption(
        "--day",
        type=int,
        default=dt.datetime.now(dt.UTC).date().toordinal(),
        help="the day, as an ordinal, whose share is run",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        help="try one in so many of the slow tests; others on other days",
    )
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write generated pages instead of comparing them",
    )


def pytest_configure(config):
    """Loads the Hypothesis profile."""
    chosen = [name for name in ("quick", "thorough", "full") if config.getoption(f"--{name}")]
    if len(chosen) > 1:
        raise pytest.UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other")
    name = chosen[0] if chosen else "default"
    settings.load_profile("default" if name == "thorough" else name)


# Slow files start first, so that none of them runs alone at the end.
FIRST = (
    "bits/test_bits.py",
    "laws/test_workers.py",
    "strategies/test_workers.py",
    "trainer/loop/test_parameter_server.py",
    "trainer/run/test_stop_signals.py",
    "conformance/test_examples.py",
    "trainer/replay/test_rerun.py",
)


# What `--quick` runs: unit tests, without files that start processes, train or take seconds to trace.
QUICK = (
    "conformance/test_layout.py",
    "conformance/test_mirror.py",
    "scaling",
    "strategies",
    "trainer/base",
    "trainer/step",
)
NOT_QUICK = (
    "scaling/base/test_tensorflow_startup.py",
    "scaling/rules/test_logmax.py",
    "scaling/rules/test_named.py",
    "scaling/rules/test_rule.py",
    "scaling/telemetry",
    "scaling/test_layerwise.py",
    "scaling/test_scaler.py",
    "scaling/test_simulate.py",
    "strategies/test_capabilities.py",
    "strategies/test_cluster.py",
    "strategies/test_collectives.py",
    "strategies/test_launch.py",
    "strategies/test_job.py",
    "strategies/test_tpu.py",
    "strategies/test_workers.py",
    "trainer/base/test_autograph.py",
    "trainer/step/test_attempt.py",
    "trainer/step/test_checks.py",
    "trainer/step/test_verdict.py",
    "trainer/step/test_losses.py",
    "trainer/step/test_objective.py",
    "trainer/step/test_passes.py",
    "trainer/step/test_randomness.py",
    "trainer/step/test_skips.py",
    "trainer/step/test_trace.py",
    "trainer/step/test_xla.py",
)


def pytest_ignore_collect(collection_path, config):
    """Does not even import other test files in a quick run."""
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(TESTS)
    places = {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    return None if places & set(QUICK) and not places & set(NOT_QUICK) else True


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    """Sorts slow files first, skips what this run leaves out, marks tests of laws and what `--full`
    runs longer.
    """
    items.sort(key=lambda item: path_of(item) not in FIRST)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        chosen = item.get_closest_marker("replicas")
        if chosen and params.get("replicas") not in (None, *chosen.args):
            item.add_marker(pytest.mark.slow)
        if laws := laws_of(item.function.__doc__):
            item.add_marker(pytest.mark.law(*laws))
    mark_samples(items)
    later = set(of_other_days(items, config.getoption("--day"), config.getoption("--share")))
    config.hook.pytest_deselected(items=[item for item in items if item in later])
    items[:] = [item for item in items if item not in later]
    full = config.getoption("--full")
    thorough = full or config.getoption("--thorough")
    for item in items:
        if getattr(item.obj, "is_hypothesis_test", False) or "full" in item.fixturenames:
            item.add_marker(pytest.mark.search)
        if item.get_closest_marker("slow") and not full:
            item.add_marker(pytest.mark.skip(reason="only with --full"))
        elif item.get_closest_marker("thorough") and not thorough:
            item.add_marker(pytest.mark.skip(reason="only with --thorough or --full"))


def mark_samples(items):
    """Marks the cases of `sampled` tests that not every run tries. The last case is always tried."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            # Cases that only CI tries are a matrix of their own, so that others are left by default.
            in_ci = item.get_closest_marker("thorough") is not None
            cases[path_of(item), item.originalname, in_ci].append(item)
    for of_one_test in cases.values():
        for item, tier in zip(reversed(of_one_test), tiers(len(of_one_test)), strict=True):
            if tier:
                item.add_marker(tier)


def of_other_days(items, day, share):
    """Yields the slow cases that other days try."""
    counts = collections.Counter()
    for item in items:
        if share == 1 or not item.get_closest_marker("slow"):
            continue
        test = f"{path_of(item)}::{item.originalname}"
        nights = item.get_closest_marker("by_date")
        days = nights.args[0] if nights else share
        if (zlib.crc32(test.encode()) + counts[test] + day) % days:
            yield item
        counts[test] += 1


def path_of(item):
    """A test file's path relative to tests/."""
    return item.path.relative_to(TESTS).as_posix()


@pytest.fixture(scope="session")
def full(request):
    """Whether random searches, and other tests with this fixture, run to their full length."""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def same_start():
    """Sets the seed; checks that each test starts and ends with the float32 policy."""
    keras.utils.set_random_seed(0)
    assert keras.config.dtype_policy().name == "float32"
    yield
    assert keras.config.dtype_policy().name == "float32"


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Hides what a file leaves behind from the garbage collector.

    TensorFlow keeps traced graphs for as long as the process lives. Walking through gigabytes of
    them over and over would take up to half of the tests' time.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mirrored():
    """Mirrored strategies by number of replicas, each created once."""
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
