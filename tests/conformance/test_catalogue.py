"""Every public class of Keras, in small random models, and docs/catalogue.md, which is generated from
their rows. The rows are in `tests/catalogue`.
"""

import functools
import zlib

import keras
import numpy as np
import pytest
from catalogue import configurations, page
from catalogue.check_loss import check_loss, check_metrics
from catalogue.check_optimizer import check_optimizer
from catalogue.check_step import (
    check_fails_in_keras,
    check_no_xla,
    check_refused_in,
    check_step,
    check_xla_lacks,
)
from catalogue.configurations import Configuration
from catalogue.entries import entries, missing_and_strays
from catalogue.features import features
from catalogue.losses import METRICS
from catalogue.models import cases
from catalogue.rows import KERAS, OPEN, RIGHT
from hypothesis import HealthCheck, Phase, given, seed, settings

import strategies

# Keras and NumPy warn about masks that nobody needs, and about casts that overflow.
pytestmark = pytest.mark.filterwarnings("ignore")

LISTED = [*entries(), *features()]
CHECKS = {
    "keras.losses": check_loss,
    "keras.optimizers": check_optimizer,
    "keras.optimizers.schedules": check_optimizer,
}
TRIED = [each for each in LISTED if each.row.verdict in {RIGHT, OPEN}]
STEPS = [each for each in TRIED if each.group != "keras.metrics"]
# What the default run tries.
HANDFUL = {"keras.layers.MultiHeadAttention", "keras.layers.GaussianNoise"}


def run_one(entry, configuration, strategy, turn=0):
    """Draws a model with a class, and compares a step."""
    check = CHECKS.get(entry.group, check_step)

    @seed(zlib.crc32(f"{entry} {configuration} {turn}".encode()))
    @settings(
        max_examples=1,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(entry.cls, entry.row))
    def compare(case):
        keras.utils.set_random_seed(0)
        check(case, configuration, strategy)

    if entry.row.verdict == OPEN:
        with pytest.raises(Exception, match=entry.row.shown_by):
            compare()
    else:
        compare()


def strategy_of(configuration, mirrored):
    """The default strategy, or a mirrored one."""
    replicas = configuration.replicas
    return mirrored(replicas) if replicas > 1 else strategies.create("default")


def test_every_class_has_a_row():
    """The rows are Keras's public classes, no more and no less: a class that is new in Keras needs a
    row.
    """
    assert missing_and_strays() == ([], [])


def test_every_configuration_is_some_layers():
    """When each layer is tried once, every configuration is tried."""
    chosen = {
        configurations.of_class(each.name, each.row)
        for each in TRIED
        if each.group == "keras.layers"
    }

    assert chosen == set(configurations.ALL)


def test_the_page_says_what_the_rows_say(request):
    """docs/catalogue.md is what the rows generate; `--regenerate` writes it."""
    if request.config.getoption("--regenerate"):
        page.PATH.write_text(page.page())

    assert page.PATH.read_text() == page.page()


def marked(entry):
    """The default run tries a handful of classes, CI every eightieth, too, and seven nights all."""
    if str(entry) in HANDFUL:
        return entry
    in_ci = zlib.crc32(str(entry).encode()) % 80 == 0
    return pytest.param(entry, marks=pytest.mark.thorough if in_ci else pytest.mark.slow)


@pytest.mark.by_date(7)
@pytest.mark.parametrize("entry", [marked(each) for each in STEPS], ids=str)
def test_a_class_is_as_its_row_says(entry, mirrored):
    """L5, L6, L8, L12: a step with the class equals a plain loop's, a skipped one moves nothing, and
    a restored one repeats its bits; in one configuration for each class.
    """
    configuration = configurations.of_class(entry.name, entry.row)
    run_one(entry, configuration, strategy_of(configuration, mirrored))


@pytest.mark.slow
@pytest.mark.by_date(7)
@pytest.mark.parametrize("entry", STEPS, ids=str)
def test_a_class_in_nine_configurations(entry, mirrored):
    """The same in nine configurations, in which every value of an axis meets every value of
    another.
    """
    for turn, configuration in enumerate(configurations.nine_of_class(entry.name, entry.row)):
        run_one(entry, configuration, strategy_of(configuration, mirrored), turn + 1)


@pytest.fixture(scope="module")
def results(mirrored):
    """Results of metrics by kind of labels: (ours, Keras's), keyed by name."""
    classes = {each.name: each.cls for each in TRIED if each.group == "keras.metrics"}
    configuration = Configuration(3, 1, False, "float32")
    return functools.cache(
        lambda kind: check_metrics(METRICS, classes, kind, configuration, mirrored(3))
    )


METRICS_BY_KIND = [
    pytest.param(name, marks=[] if row.kind == "positive" else pytest.mark.thorough)
    for name, row in METRICS.items()
    if row.verdict == RIGHT
]


@pytest.mark.parametrize("name", METRICS_BY_KIND)
def test_a_metric_is_keras_own(name, results):
    """On three replicas, `evaluate` returns what the metric returns for the same batches."""
    found, expected = results(METRICS[name].kind)[name]

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("entry", [e for e in LISTED if e.row.verdict == KERAS], ids=str)
def test_keras_is_wrong_by_itself(entry):
    """A program without halfstep shows what is wrong in Keras. If it raises nothing, Keras is mended
    and the row must change.
    """
    with pytest.raises(AssertionError):
        exec(compile(entry.row.program, str(entry), "exec"), {})  # noqa: S102


@pytest.mark.thorough
@pytest.mark.parametrize("entry", [e for e in LISTED if e.row.fails_in], ids=str)
def test_keras_fails_in_half_by_itself(entry):
    """A plain step under the dtype policy raises: halfstep has nothing to be compared with."""
    check_fails_in_keras(entry)


@pytest.mark.thorough
@pytest.mark.parametrize("entry", [e for e in LISTED if e.row.refused_in], ids=str)
def test_a_class_is_refused_in_half(entry):
    """The first step raises where a class would round weights to half precision."""
    check_refused_in(entry)


@pytest.mark.parametrize("entry", [e for e in LISTED if e.row.no_xla], ids=str)
def test_what_xla_cannot_compile_is_refused(entry):
    """`jit_compile=True` is refused before the first step, with the layer's name."""
    check_no_xla(entry)


@pytest.mark.thorough
@pytest.mark.parametrize("entry", [e for e in LISTED if e.row.xla_lacks], ids=str)
def test_an_operation_that_xla_lacks(entry):
    """Keras's class by itself cannot be compiled: a row that says so is not out of date."""
    check_xla_lacks(entry)
