"""Brings TensorFlow to a machine that has a GPU, CUDA 13 and no way to install anything.

    python benchmarks/gpu_tensorflow.py pack FOLDER --python=3.12   # here
    python3 gpu_tensorflow.py unpack FOLDER /tmp/tf > env.sh        # there; then: . env.sh

`pack` installs this environment's TensorFlow and what it imports, for the Python of the other
machine, into a folder, and removes kernels for other cards: of TensorFlow 2.21, 227 MB in eight
parts are left for an H100, of a wheel of 573 MB. `unpack` puts them together in a minute, and
gives CUDA 13's libraries the names of CUDA 12, by which TensorFlow 2.21 opens them. CUDA 12's
runtime and assembler are packed, since the other machine has none. It needs only Python there, and
NVIDIA's packages for CUDA 13, which PyTorch and JAX bring.
"""

import argparse
import importlib.metadata
import lzma
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile

FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the code
ARCHITECTURE = 28  # where it is in the header of an entry
MAGIC, MACHINE_CODE = 0xBA55ED50, 2
PART_BYTES = 200 << 20  # before compression
CUDA_12 = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86")
PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 17, 12, 5)]
PLATFORMS += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
# By what name TensorFlow 2.21 opens a library, and what CUDA 13 calls it.
NAMES = {
    "libcublas.so.12": "libcublas.so.13",
    "libcublasLt.so.12": "libcublasLt.so.13",
    "libcufft.so.11": "libcufft.so.12",
    "libcusolver.so.11": "libcusolver.so.12",
    "libcusparse.so.12": "libcusparse.so.12",
    "libcurand.so.10": "libcurand.so.10",
    "libcudnn.so.9": "libcudnn.so.9",
}


def main():
    """Packs or unpacks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    here = commands.add_parser("pack")
    here.add_argument("folder", type=pathlib.Path)
    here.add_argument("--python", default="3.12", help="the other machine's")
    here.add_argument("--capability", type=int, default=90, help="the card's, such as 90 for 9.0")
    there = commands.add_parser("unpack")
    there.add_argument("folder", type=pathlib.Path)
    there.add_argument("target", type=pathlib.Path)
    arguments = vars(parser.parse_args())
    {"pack": pack, "unpack": unpack}[arguments.pop("command")](**arguments)


def pack(folder, python, capability):
    """Writes the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site, cuda = pathlib.Path(scratch, "site"), pathlib.Path(scratch, "cuda")
        install(site, python, [f"{name}=={version}" for name, version in needed("tensorflow")])
        install(cuda, python, CUDA_12)
        shutil.rmtree(site / "tensorflow" / "include")
        for library in site.rglob("*.so*"):
            if library.is_file():
                remove_other_cards(library, capability)
        shutil.copytree(cuda / "nvidia" / "cuda_nvcc", site / "cuda", symlinks=True)
        shutil.rmtree(site / "cuda" / "nvvm" / "lib64", ignore_errors=True)
        shutil.copytree(cuda / "nvidia" / "cuda_runtime" / "lib", site / "cuda" / "lib")
        whole = pathlib.Path(scratch, "whole.tar")
        with tarfile.open(whole, "w") as archive:
            archive.add(site, ".")
        with whole.open("rb") as file:
            for number in range(1000):
                data = file.read(PART_BYTES)
                if not data:
                    break
                part = folder / f"part{number:03}.xz"
                part.write_bytes(lzma.compress(data, preset=5))
                print(f"{part}: {part.stat().st_size:,} bytes", flush=True)


def install(target, python, requirements):
    """Installs packages for another Python into a folder, without what they need."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", f"--python-version={python}", *PLATFORMS]
    subprocess.run([*command, f"--target={target}", *requirements], check=True)  # noqa: S603


def needed(package):
    """Returns names and versions of a package and of all that it needs, as installed here."""
    found, waiting = {}, [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.version(name)
            lines = importlib.metadata.requires(name) or ()
            names = [re.match(r"[\w.-]+", each)[0] for each in lines if "extra ==" not in each]
            waiting += [each.lower().replace("_", "-") for each in names if each != "libclang"]
    return found.items()


def remove_other_cards(library, capability):
    """Fills the code for other cards in a library with zeros, which compress to nothing.

    CUDA chooses among the entries of a "fatbin" by the card's capability, and reads no others.
    """
    with library.open("r+b") as file:
        for start, size in fatbins(file):
            file.seek(start)
            data = bytearray(file.read(size))
            empty_entries(data, capability)
            file.seek(start)
            file.write(data)


def fatbins(file):
    """Yields where the sections with code for GPUs are in a library, and how long they are."""
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return
    [table] = struct.unpack_from("<Q", header, 40)
    entry_size, count, names = struct.unpack_from("<HHH", header, 58)
    file.seek(table)
    sections = [struct.unpack_from("<IIQQQQ", file.read(entry_size)) for _ in range(count)]
    _, _, _, _, text, length = sections[names]
    file.seek(text)
    texts = file.read(length)
    for name, _, _, _, start, size in sections:
        if texts[name:].partition(b"\0")[0] == b".nv_fatbin":
            yield start, size


def empty_entries(data, capability):
    """Fills entries for other cards with zeros, in each fatbin that has machine code for this one.

    In others, a card translates code for another one.
    """
    place = 0
    while place + FATBIN.size <= len(data):
        magic, _, header, size = FATBIN.unpack_from(data, place)
        if magic != MAGIC:  # between two of them, bytes may be left free
            place += 8
            continue
        entries = list(entries_in(data, place + header, place + header + size))
        if any(mine == (MACHINE_CODE, capability) for mine, _, _ in entries):
            for what, start, length in entries:
                if what != (MACHINE_CODE, capability):
                    data[start : start + length] = bytes(length)
        place += header + size


def entries_in(data, place, end):
    """Yields kind and card of each entry of a fatbin, and where its code is and how long."""
    while place < end:
        kind, _, header, size = ENTRY.unpack_from(data, place)
        [card] = struct.unpack_from("<I", data, place + ARCHITECTURE)
        yield (kind, card), place + header, size
        place += header + size


def unpack(folder, target):
    """Puts the parts together, and prints what the shell has to set."""
    target.mkdir(parents=True)
    with tempfile.TemporaryFile() as whole:
        for part in sorted(folder.glob("part*.xz")):
            whole.write(lzma.decompress(part.read_bytes()))
        whole.seek(0)
        with tarfile.open(fileobj=whole) as archive:
            archive.extractall(target, filter="fully_trusted")  # noqa: S202  # packed by this script
    folders = link_libraries(target / "lib")
    paths = [target / "lib", target / "cuda" / "lib", *folders]
    print(f"export LD_LIBRARY_PATH={os.pathsep.join(map(str, paths))}")
    print(f"export PYTHONPATH={target} PATH={target}/cuda/bin:$PATH")
    print(f"export XLA_FLAGS=--xla_gpu_cuda_data_dir={target}/cuda")
    print("export TF_FORCE_GPU_ALLOW_GROWTH=true")


def link_libraries(links):
    """Makes links by the names that TensorFlow knows; returns the folders of the libraries."""
    places = [pathlib.Path(each, "nvidia") for each in sys.path]
    places += [pathlib.Path("/usr/local/cuda/lib64")]
    found = {file.name: file for place in reversed(places) for file in place.rglob("lib*.so.*")}
    missing = [name for name in NAMES.values() if name not in found]
    if missing:
        sys.exit(f"CUDA 13 must be installed; not found: {', '.join(missing)}.")
    links.mkdir()
    for name, installed in NAMES.items():
        (links / name).symlink_to(found[installed])
    return sorted({found[name].parent for name in NAMES.values()})


if __name__ == "__main__":
    main()
