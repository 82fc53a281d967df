"""`benchmarks/gpu_tensorflow.py`: what it removes from a library, and the names that it gives."""

import importlib.util
import pathlib
import struct
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_tensorflow.py"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_tensorflow", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(kind, card, code):
    """Returns an entry of a fatbin: a header of 64 bytes, then code."""
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 257, 64, len(code))
    struct.pack_into("<I", header, 28, card)
    return bytes(header) + code


def fatbin(*entries):
    """Returns a fatbin with these entries."""
    whole = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


def test_only_machine_code_for_the_card_is_kept(script):
    """Code for other cards, and code to translate, become zeros; all headers stay. A fatbin without
    machine code for the card is left alone, because the card translates its code for another.
    """
    parts = [(2, 80, b"ampere.." * 4), (2, 90, b"hopper.." * 3), (1, 90, b"text...." * 2)]
    other = fatbin(entry(2, 80, b"ampere.."), entry(1, 80, b"text...."))
    before = fatbin(*(entry(*part) for part in parts)) + bytes(8) + other
    emptied = [
        (kind, card, code if (kind, card) == (2, 90) else bytes(len(code)))
        for kind, card, code in parts
    ]
    after = fatbin(*(entry(*part) for part in emptied)) + bytes(8) + other
    data = bytearray(before)

    script.empty_entries(data, 90)
    assert data == after


def library(code):
    """Returns an ELF file with a section of code for GPUs, and two others."""
    names = b"\0.text\0.nv_fatbin\0"
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 40, 64 + len(names) + len(code))
    struct.pack_into("<HHH", header, 58, 64, 3, 2)
    sections = [(1, 64, 4), (7, 64 + len(names), len(code)), (0, 64, len(names))]
    table = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, start, size) + bytes(24)
        for name, start, size in sections
    )
    return bytes(header) + names + code + table


def test_the_sections_of_a_library_are_found(script, tmp_path):
    """In an ELF file, sections are found by name. A library without code for the card is left
    alone, because the card translates its code for another; so are files that are no libraries.
    """
    others = fatbin(entry(1, 80, b"text...."))
    files = {
        library(fatbin(entry(2, 80, b"x" * 8), entry(2, 90, b"y" * 8))): library(
            fatbin(entry(2, 80, bytes(8)), entry(2, 90, b"y" * 8))
        ),
        library(others): library(others),
        b"INPUT(libother.so)": b"INPUT(libother.so)",
    }
    for before, after in files.items():
        path = tmp_path / "a.so"
        path.write_bytes(before)
        script.remove_other_cards(path, 90)
        assert path.read_bytes() == after


def test_libraries_get_the_names_by_which_they_are_opened(script, tmp_path, monkeypatch):
    """CUDA 13's libraries are found beside the packages of Python; a missing one is named."""
    installed = tmp_path / "site" / "nvidia" / "cu13" / "lib"
    installed.mkdir(parents=True)
    for name in script.NAMES.values():
        (installed / name).write_text(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])

    assert script.link_libraries(tmp_path / "links") == [installed]
    assert (tmp_path / "links" / "libcublas.so.12").read_text() == "libcublas.so.13"
    (installed / "libcufft.so.12").unlink()
    with pytest.raises(SystemExit) as error:
        script.link_libraries(tmp_path / "again")
    assert str(error.value) == "CUDA 13 must be installed; not found: libcufft.so.12."
