"""Calls that differ between the workers of a job."""

import json
import math
import types

import jobs
import numpy as np
import pytest
import tensorflow as tf

from trainer.data.fingerprint import of_arrays
from trainer.run import same_on_workers as module

SAME = "same", "rounded", "profile", "same again"
SETTING = (
    "`{}` must be the same on every worker; got {}, and another on {}. Workers take every step "
    "together. Pass the same arguments everywhere; what one worker is to do alone, do in a hook, "
    "if trainer.is_chief."
)
DATA = (
    "`{}` must be the same on every worker; got {}, and another on {}. Each replica takes its own "
    "share of every global batch. Do not divide the data between workers, as Dataset.shard does, "
    "and seed what is random in it."
)
SPEC = "TensorSpec(shape=(None, 1), dtype=tf.float32, name=None)"
FIRSTS = [  # of the first batch, which is the same twice, on each worker
    "float32 (8, 1), norm 23.664, projection 5.9289",
    "float32 (8, 1), norm 26.077, projection 5.9553",
]
OTHER = "another worker", "the chief"  # where it differs, as each worker says


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs two workers; returns what each says of every call."""
    out = tmp_path_factory.mktemp("differences")
    with jobs.workers(out, 2, "worker_differences.py", out) as job:
        assert job.wait(200) == [0, 0], job.output()
    assert [*out.glob("run/plugins/profile/*/*.xplane.pb")]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.thorough
def test_what_is_the_same_up_to_rounding_is_accepted(found):
    """No call that is the same on both workers is refused, and all the others are, on both.

    The chief alone writes a profile, and both end their inner loops around it.
    """
    for worker in found:
        assert [name for name, error in worker.items() if error is None] == [*SAME]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "argument", "values"),
    [
        ("steps", "steps", "23"),
        ("clipnorm", "clipnorm", ("1.0", "2.0")),
        ("seed", "seed", "01"),
        ("steps per loop", "steps_per_loop", "12"),
        ("actions", "actions", ("[]", "[1]")),
        ("eval_interval", "eval_interval", "12"),
    ],
)
def test_other_settings_are_refused_on_every_worker(found, name, argument, values):
    """Without the check, the workers train different models, or wait for each other forever."""
    for worker, value, other in zip(found, values, OTHER, strict=True):
        assert worker[name] == SETTING.format(argument, value, other)


@pytest.mark.thorough
def test_other_data_is_refused_on_every_worker(found):
    """Data that is divided between workers would leave half of the examples out."""
    for rank, (worker, first, other) in enumerate(zip(found, FIRSTS, OTHER, strict=True)):
        chain = f": TensorSliceDataset ShardDataset(2, {rank}) BatchDatasetV2(8)"
        sharded = f"batches of 8, ({SPEC}, {SPEC}), 4 steps an epoch{chain}"
        assert worker["shard"] == DATA.format("train_data", sharded, other)
        for name, argument in (("eval_data", "eval_data"), ("evaluate", "data")):
            assert worker[name] == DATA.format(argument, f"{first}, {first}", other)
        rows = "TensorSpec(shape=(8, 1), dtype=tf.float32, name=None)"
        read = f"{8 - rank} batches of 8, {rows}"
        assert worker["predict"] == DATA.format("data", read, other)
        assert worker["arrays"].startswith("`train_data` must be the same on every worker; got fl")
        for name in ("batch size", "length"):
            assert worker[name].startswith("`train_data` must be the same on every worker; got ba")


def test_numbers_pass_between_workers_unchanged():
    """A float that travels as its bits has the same bits; -0 becomes 0."""
    strategy = tf.distribute.get_strategy()
    for number in (0.0, -0.0, 1.5, -1e300, 5e-324, math.inf, -math.inf):
        assert module.float_from_chief(number, strategy) == number


def test_a_batch_of_any_kind_has_a_fingerprint():
    """Ragged and sparse tensors are compared by their components."""
    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.eye(2)

    first = {"r": ragged, "s": sparse, "t": tf.constant(["a", "b"])}
    data = types.SimpleNamespace(first=first)
    arrays = [ragged.values, ragged.row_splits, sparse.indices, sparse.values, sparse.dense_shape]
    assert module.first_batch_of(data) == of_arrays([*arrays, np.array([b"a", b"b"], object)])
