"""Argument checks: what each accepts and refuses."""

import pathlib

import numpy as np
import pytest

from trainer.base.argument_checks import (
    as_python,
    check_checkpoint_path,
    check_choice,
    check_path,
    check_seed,
    check_writable,
    local_path,
)


def test_numbers_of_numpy_become_pythons():
    """Also bools, which are then switches; JSON can hold them."""
    for value in (np.bool_(True), np.int64(3), np.float32(0.5)):
        assert type(as_python(value)) in (bool, int, float)
    assert as_python("three") == "three"


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True])
def test_a_seed_fits_its_bits(seed):
    """None and the whole range are accepted."""
    for good in (None, 0, 2**32 - 1):
        check_seed(good)
    with pytest.raises(ValueError, match="`seed`"):
        check_seed(seed)
    check_seed(2**32, bits=63)


def test_a_model_dir_is_created_and_written_to(tmp_path):
    """A missing folder is created and left empty; a file in its place is an error."""
    check_writable(None)
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    taken = tmp_path / "notes.txt"
    taken.touch()
    with pytest.raises(ValueError, match="`model_dir`"):
        check_writable(taken)


@pytest.mark.parametrize(
    ("value", "remedy"), [("retri", "Did you mean 'retry'"), (None, "got None"), (7, "got 7")]
)
def test_a_choice_is_one_of_a_list(value, remedy):
    """The nearest choice is suggested if there is one."""
    check_choice("on_overflow", "skip", ("skip", "retry"))
    with pytest.raises(ValueError, match=f"`on_overflow` must be one of .*{remedy}"):
        check_choice("on_overflow", value, ("skip", "retry"))


@pytest.mark.parametrize(
    "path", ["", "gs://bucket/run", "s3://b/x", "ram://x", "file:///tmp/x", "hdfs:/x"]
)
def test_a_url_is_no_local_path(path):
    """It would become a local folder of that name, and an empty path the working directory."""
    check_path("model_dir", pathlib.Path("runs"))
    with pytest.raises(ValueError, match="`model_dir`"):
        check_path("model_dir", path)


@pytest.mark.parametrize("path", ["/runs/[64,32]/a", "/runs/a\\b"])
def test_a_path_that_tensorflow_cannot_read_back_is_refused(path):
    """TensorFlow takes brackets and backslashes for a pattern; other signs are harmless."""
    check_checkpoint_path("model_dir", "/runs/lr=1e-3, été *?")
    with pytest.raises(ValueError, match="`model_dir`"):
        check_checkpoint_path("model_dir", path)


def test_a_bracket_in_the_working_directory_counts(tmp_path, monkeypatch):
    """A relative path is looked up as a whole."""
    (tmp_path / "[a]").mkdir()
    monkeypatch.chdir(tmp_path / "[a]")
    with pytest.raises(ValueError, match="must not contain"):
        check_checkpoint_path("model_dir", "run")


def test_a_tilde_is_the_home_folder(monkeypatch):
    """A shell does not replace it behind `--model_dir=`."""
    monkeypatch.setenv("HOME", "/home/ada")

    assert local_path("~/runs/a") == pathlib.Path("/home/ada/runs/a")
    assert local_path("runs/~a") == pathlib.Path("runs/~a")


def test_one_is_not_true():
    """A number in the place of a switch is refused also where it is equal to a choice."""
    with pytest.raises(ValueError, match=r"`jit_compile` must be one of .*; got 1\."):
        check_choice("jit_compile", 1, ("auto", True, False))
