"""Argument checks: what each accepts, and the whole message for what it refuses."""

import pathlib

import numpy as np
import pytest

from trainer.base.argument_checks import (
    check_bool,
    check_checkpoint_path,
    check_choice,
    check_count,
    check_ema_momentum,
    check_nonnegative,
    check_path,
    check_seed,
    check_writable,
    local_path,
)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_a_count_is_a_positive_integer(value):
    """Python's and NumPy's integers count; floats, bools and strings do not."""
    check_count("steps", 1)
    check_count("steps", np.int64(2**40))
    with pytest.raises(ValueError, match="`steps`"):
        check_count("steps", value)


@pytest.mark.parametrize("value", [-1, 0.0, False])
def test_a_nonnegative_count_may_be_zero(value):
    """0 is accepted as an integer only."""
    check_nonnegative("max_retries", 0)
    with pytest.raises(ValueError, match="`max_retries`"):
        check_nonnegative("max_retries", value)


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_a_bool_is_true_or_false(value):
    """0 and 1 are refused, since a count may have been meant."""
    check_bool("shuffle", value=True)
    with pytest.raises(TypeError) as error:
        check_bool("shuffle", value)

    assert str(error.value) == (
        f"`shuffle` must be True or False; got {value!r}. This argument is an on/off switch. "
        "Pass True or False."
    )


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True])
def test_a_seed_fits_its_bits(seed):
    """None and the whole range are accepted; the reason in the message can be changed."""
    for good in (None, 0, 2**32 - 1):
        check_seed(good)
    with pytest.raises(ValueError, match="`seed`") as error:
        check_seed(seed)

    assert str(error.value) == (
        f"`seed` must be an int from 0 to 2^32 - 1, or None; got {seed!r}. NumPy's seed must be "
        "in this range too. Use 0, for example."
    )
    check_seed(2**32, bits=63)


@pytest.mark.parametrize(
    ("optional", "value", "rule"),
    [(False, None, "a path"), (True, 3, "a path or None"), (True, "", "a path or None")],
)
def test_a_path_is_a_nonempty_string_or_path(optional, value, rule):
    """None is accepted only where the argument is optional."""
    check_path("model_dir", pathlib.Path("runs"), "runs/digits")
    check_path("model_dir", None, "runs/digits", optional=True)
    with pytest.raises(TypeError) as error:
        check_path("model_dir", value, "runs/digits", optional=optional)

    assert str(error.value) == (
        f"`model_dir` must be {rule}; got {value!r}. This argument names a file or a folder. "
        'Pass "runs/digits", for example.'
    )


def test_a_name_that_no_file_can_have_is_refused():
    """255 bytes are taken, and not one more; the bytes count, and not the characters."""
    check_path("init_from", "runs/" + "x" * 255, "runs/digits")
    for path in ("x" * 256, "runs/" + "ä" * 128 + "/ckpt-8"):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            check_path("init_from", path, "runs/digits")

        assert str(error.value) == (
            "`init_from` must have names of at most 255 bytes; got a name of 256. No usual file "
            'system takes a longer one. Pass "runs/digits", for example.'
        )


def test_a_model_dir_is_created_and_written_to(tmp_path):
    """A missing folder is created and left empty; a file in its place is an error."""
    check_writable(None)
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    taken = tmp_path / "notes.txt"
    taken.touch()
    with pytest.raises(ValueError, match="`model_dir`") as error:
        check_writable(taken)

    assert str(error.value) == (
        f"`model_dir` must be a writable directory; got '{taken}': File exists. Checkpoints and "
        "logs are written there. Choose another directory, or pass None to write no files."
    )


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("retri", "Did you mean 'retry'?"),
        (None, "Pass one of these values."),
        (7, "Pass one of these values."),
    ],
)
def test_a_choice_is_one_of_a_list(value, remedy):
    """The nearest choice is suggested if there is one."""
    check_choice("on_overflow", "skip", ("skip", "retry"))
    with pytest.raises(ValueError, match="`on_overflow`") as error:
        check_choice("on_overflow", value, ("skip", "retry"))

    assert str(error.value) == (
        f"`on_overflow` must be one of 'skip', 'retry'; got {value!r}. There are no other choices. "
        f"{remedy}"
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, "0.9", True])
def test_an_ema_momentum_lies_between_0_and_1(value):
    """Neither bound is included; None means that no average is kept."""
    check_ema_momentum(None)
    check_ema_momentum(0.999)
    with pytest.raises(ValueError, match="`ema_momentum`") as error:
        check_ema_momentum(value)

    assert str(error.value) == (
        f"`ema_momentum` must be strictly between 0 and 1; got {value!r}. Each update keeps this "
        "fraction of the old average. 0.999 is a common choice."
    )


@pytest.mark.parametrize(
    "url", ["gs://bucket/run", "s3://b/x", "ram://x", "file:///tmp/x", "hdfs:/x"]
)
def test_a_url_is_no_local_path(url):
    """It would become a local folder of that name."""
    with pytest.raises(ValueError, match="`model_dir`") as error:
        check_path("model_dir", url, "runs/digits")

    assert str(error.value) == (
        f"`model_dir` must be a local path; got {url!r}. Files are locked and renamed as they are "
        "written, which object stores do not offer. Mount the store as a folder and pass that "
        "folder, or copy the files when the run has ended."
    )


@pytest.mark.parametrize(("path", "sign"), [("/runs/[64,32]/a", "["), ("/runs/a\\b", "\\")])
def test_a_path_that_tensorflow_cannot_read_back_is_refused(path, sign):
    """TensorFlow takes brackets and backslashes for a pattern; other signs are harmless."""
    check_checkpoint_path("model_dir", "/runs/lr=1e-3, été *?", "runs/digits")
    with pytest.raises(ValueError, match="`model_dir`") as error:
        check_checkpoint_path("model_dir", path, "runs/digits")

    assert str(error.value) == (
        f"`model_dir` must not contain {sign!r}; got {path!r}. TensorFlow reads the path of a "
        "checkpoint as a pattern, and would not find it again. Use another name."
    )


def test_a_bracket_in_the_working_directory_counts(tmp_path, monkeypatch):
    """A relative path is looked up as a whole."""
    (tmp_path / "[a]").mkdir()
    monkeypatch.chdir(tmp_path / "[a]")
    with pytest.raises(ValueError, match="must not contain"):
        check_checkpoint_path("model_dir", "run", "runs/digits")


def test_a_tilde_is_the_home_folder(monkeypatch):
    """A shell does not replace it behind `--model_dir=`."""
    monkeypatch.setenv("HOME", "/home/ada")

    assert local_path("~/runs/a") == pathlib.Path("/home/ada/runs/a")
    assert local_path("runs/~a") == pathlib.Path("runs/~a")


def test_one_is_not_true():
    """A number in the place of a switch is refused also where it is equal to a choice."""
    with pytest.raises(ValueError, match=r"`jit_compile` must be one of .*; got 1\."):
        check_choice("jit_compile", 1, ("auto", True, False))
