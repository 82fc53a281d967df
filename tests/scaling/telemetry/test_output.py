"""Figures in files, and texts for the terminal."""

import pytest

from scaling.telemetry.output import new_figure, printable, replace_file, save_figure


def test_a_figure_is_written_in_the_format_of_its_name(tmp_path):
    """PNG without a suffix; a format that matplotlib does not have is an error that names the flag."""
    figure = new_figure((1, 1))
    save_figure(figure, tmp_path / "a")
    save_figure(figure, tmp_path / "a.svg")
    assert (tmp_path / "a").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert figure.get_size_inches().tolist() == [1, 1]
    with pytest.raises(ValueError, match="--plot") as error:
        save_figure(figure, tmp_path / "a.doc")
    message = str(error.value)
    begun = (
        f"`--plot` must name a file in a format of matplotlib; got {str(tmp_path / 'a.doc')!r}. "
    )
    assert message.startswith(f"{begun}Its ending says which: ")
    assert " png, " in message
    assert message.endswith("Pass --plot=scales.png, for example.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.svg"]


def test_a_figure_needs_matplotlib(monkeypatch):
    """The error says how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError) as error:
        new_figure((1, 1))
    assert str(error.value) == (
        "Plotting the scales needs matplotlib, which is not installed. Run pip install "
        "'halfstep[plot]', or pass --plot= for no plot."
    )


def test_a_link_is_replaced(tmp_path):
    """What it leads to stays as it is, and nothing is left if the file cannot be replaced."""
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    (tmp_path / "a.tmp").symlink_to(tmp_path / "other")  # left behind, or put there
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "other").read_bytes() == b"precious"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder", "other"]


def test_control_characters_become_escapes():
    """Other text is as it is."""
    assert printable("a b\u00e9\n\x1b\udcff\u202e") == r"a bé\n\x1b\udcff\u202e"
