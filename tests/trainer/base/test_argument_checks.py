"""Argument checks: what each accepts and refuses."""

import pathlib

import numpy as np
import pytest

from trainer.base.argument_checks import (
    as_python,
    check_choice,
    check_path,
    local_path,
)


def test_numbers_of_numpy_become_pythons():
    """Also bools, which are then switches; JSON can hold them."""
    for value in (np.bool_(True), np.int64(3), np.float32(0.5)):
        assert type(as_python(value)) in (bool, int, float)
    assert as_python("three") == "three"


@pytest.mark.parametrize("value", ["retri", None, 1])
def test_a_choice_is_one_of_a_list(value):
    """1 is not True: a number in the place of a switch is refused."""
    choices = ("skip", "retry", True)
    for each in choices:
        check_choice("on_overflow", each, choices)
    with pytest.raises(ValueError, match="`on_overflow` must"):
        check_choice("on_overflow", value, choices)


@pytest.mark.parametrize(
    "path", ["", "gs://bucket/run", "s3://b/x", "ram://x", "file:///tmp/x", "hdfs:/x"]
)
def test_a_url_is_no_local_path(path):
    """It would become a local folder of that name, and an empty path the working directory."""
    check_path("model_dir", pathlib.Path("runs"))
    with pytest.raises(ValueError, match="`model_dir`"):
        check_path("model_dir", path)


def test_a_path_that_tensorflow_cannot_read_back_is_refused(tmp_path, monkeypatch):
    """TensorFlow takes brackets and backslashes for a pattern, those of the working directory too;
    other signs are harmless.
    """
    check_path("model_dir", "/runs/lr=1e-3, été *?", of_checkpoints=True)
    check_path("path", "/models/[64,32]/a.keras")
    (tmp_path / "[a]").mkdir()
    monkeypatch.chdir(tmp_path / "[a]")
    for path in ("/runs/[64,32]/a", "/runs/a\\b", "run"):
        with pytest.raises(ValueError, match="`model_dir` must"):
            check_path("model_dir", path, of_checkpoints=True)


def test_a_tilde_is_the_home_folder(monkeypatch):
    """A shell does not replace it behind `--model_dir=`."""
    monkeypatch.setenv("HOME", "/home/ada")

    assert local_path("~/runs/a") == pathlib.Path("/home/ada/runs/a")
    assert local_path("runs/~a") == pathlib.Path("runs/~a")
