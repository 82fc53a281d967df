"""A run's folder is damaged at random, and the run is resumed: nothing is lost without a word.

Each case copies the folder of a run that was killed, damages one of its files, and starts the same
command again. It must either end with the bits and the log of a run without interruption, or be
refused with an error in which the file or the folder is named.
"""

import collections
import functools
import json
import pathlib
import random
import shutil

import keras
import pytest
from helpers import Linear, all_copies, slopes

import scaling
from trainer import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STEPS = 9
# What a run writes as it goes on, and from which nothing is restored.
CURVES = ("events.out.tfevents", "writer.lock")


class Damaged(Linear):
    """A run in float16 that skips steps, evaluates, and keeps its best model."""

    def __init__(self, model_dir):
        """Saves every third step; a log line covers two."""
        super().__init__(
            model_dir=model_dir,
            precision="mixed_float16",
            loss_scale=scaling.DynamicLossScale(2.0**18, growth_interval=3),
            checkpoints=Checkpoints(interval=3, keep_best=1),
            log_interval=2,
            jit_compile=False,
            verbose=False,
            seed=1,
        )

    def build_optimizer(self):
        """With state."""
        return keras.optimizers.SGD(0.125, momentum=0.5)


def go(model_dir, steps=STEPS):
    """Trains or resumes; returns the bits of all variables."""
    trainer = Damaged(model_dir)
    trainer.train(slopes(1.0, 2.0, 3.0), steps, global_batch=2, eval_data=slopes(3.0))
    return [each.tobytes() for found in all_copies(trainer).values() for each in found]


def log_of(model_dir):
    """The lines of the log about steps and evaluations, without times."""
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "second" not in name and "wait" not in name}
        for line in lines
        if line["split"] in {"train", "validation"}
    ]


def flip(random, content):
    """One bit is another."""
    place = random.randrange(len(content))
    return (
        content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    )


def cut(random, content):
    """The end is missing."""
    return content[: random.randrange(len(content))]


def zero(random, content):
    """A block is zero, as after a crash of the machine."""
    start = random.randrange(len(content))
    return content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :]


def overwrite(random, content):
    """Bytes at random in the middle."""
    start = random.randrange(len(content))
    return content[:start] + random.randbytes(random.randint(1, 40)) + content[start:]


def empty(_, __):
    """Nothing is left."""
    return b""


DAMAGES = [flip, flip, cut, zero, overwrite, empty, None]  # None removes the file


@functools.cache
def expectation(folder):
    """The bits and the log of a run without interruption, and the folder of one that was killed."""
    whole = go(folder / "whole")
    go(folder / "killed", steps=7)  # as killed after the checkpoint of step 6
    shutil.rmtree(folder / "killed" / "ckpt-7")
    return whole, log_of(folder / "whole")


def outcome(folder, number):
    """What became of one damaged run: "same", "refused", or a text that says what is wrong."""
    whole, log = expectation(folder)
    copy = folder / f"copy-{number}"
    shutil.copytree(folder / "killed", copy)
    if number % 4 == 0:  # no earlier checkpoint to go back to
        shutil.rmtree(copy / "ckpt-3")
    chance = random.Random(number)  # noqa: S311
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    files = [path for path in files if not path.name.startswith(CURVES)]
    path, damage = chance.choice(files), chance.choice(DAMAGES)
    what = f"{number}: {damage and damage.__name__} {path.relative_to(copy)}"
    content = path.read_bytes()
    if damage is None or not content:
        path.unlink()
    else:
        path.write_bytes(damage(chance, content))
    try:
        found = go(copy)
    except (ValueError, RuntimeError, OSError) as error:
        named = str(copy) in str(error) or path.name in str(error)
        return "refused" if named else f"{what}: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # an error that no user can act on
        return f"{what}: {type(error).__name__}: {error}"
    finally:
        keras.backend.clear_session()
    if found != whole:
        return f"{what}: other bits"
    is_log = path.suffix == ".jsonl"  # lines that are gone cannot come back
    same = is_log or log_of(copy) == log
    shutil.rmtree(copy)
    return "same" if same else f"{what}: another log"


def check(folder, numbers, record_property):
    """Asserts that all damages were noticed or harmless, and that some were each."""
    found = [outcome(folder, number) for number in numbers]
    wrong = [each for each in found if each not in {"same", "refused"}]
    counts = collections.Counter(each if each in {"same", "refused"} else "wrong" for each in found)
    print(dict(counts))  # noqa: T201
    record_property("damages", dict(counts))
    assert not wrong, "\n".join(wrong)
    assert counts["same"]
    assert counts["refused"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Where the runs are."""
    return tmp_path_factory.mktemp("damage")


@pytest.mark.slow
def test_some_damages(folder, record_property):
    """A few."""
    check(folder, range(3), record_property)


@pytest.mark.slow
@pytest.mark.by_date(4)
@pytest.mark.parametrize("part", range(4))
def test_many_damages(folder, record_property, part):
    """Each is noticed or harmless, and none ends in another library's error."""
    check(folder, range(3 + 125 * part, 128 + 125 * part), record_property)
