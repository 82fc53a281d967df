"""Draws the pictures of docs/float8.md: python docs/site_pictures.py (needs the extra `report`)."""

import pathlib

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from matplotlib.axes import Axes
from numpy.typing import NDArray

from scaling import float8

HERE = pathlib.Path(__file__).parent
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Name, smallest positive number, smallest with a full fraction, largest number; all in octaves.
FORMATS = [
    ("float16", -24, -14, np.log2(65504)),
    ("e5m2", -16, -14, np.log2(57344)),
    ("e4m3", -9, -6, np.log2(448)),
]
BLUE, LIGHT, RED, GRAY = "#1f5fa8", "#a9c4e4", "#c0392b", "#666666"


def draw_formats(axes: Axes) -> None:
    """Draws the range of each format, with the fainter part where numbers lose bits."""
    for row, (_, smallest, normal, largest) in enumerate(reversed(FORMATS)):
        axes.barh(row, normal - smallest, left=smallest, color=LIGHT, height=0.5)
        axes.barh(row, largest - normal, left=normal, color=BLUE, height=0.5)
        axes.text(smallest - 0.5, row, f"2^{smallest}", ha="right", va="center", color=GRAY)
        axes.text(largest + 0.5, row, f"{2**largest:,.0f}", va="center", color=GRAY)
    axes.set_yticks(range(len(FORMATS)), [name for name, *_ in reversed(FORMATS)])
    axes.set_xlim(-32, 22)
    axes.set_xlabel("magnitude, as a power of two")
    axes.set_title("What the formats can hold; light: with fewer bits", loc="left", fontsize=10)


def largest_magnitudes() -> NDArray[np.float32]:
    """Returns a tensor's largest magnitude in each step: it grows at once, and falls slowly."""
    steps = np.arange(60)
    return np.where(steps < 20, 3.0, 24.0 * 0.93 ** np.maximum(steps - 20, 0)).astype(np.float32)


def draw_history(axes: Axes) -> None:
    """Draws what a tensor needs, and what the scale lets it have."""
    amax, rule = largest_magnitudes(), float8.DelayedScaling(E4M3, history_length=16)
    state, limits = rule.initial_state(), []
    for each in amax:
        limits.append(448 * float(state.scale))
        state = rule.advance(state, tf.constant(each))
    limits = np.array(limits)
    axes.step(range(60), limits, where="mid", color=BLUE, label="448 x scale: what fits")
    axes.plot(amax, color=GRAY, label="largest magnitude of the tensor")
    over = amax > limits
    axes.plot(np.flatnonzero(over), amax[over], "o", color=RED, label="saturates")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_title("A scale from a history of 16 steps", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def main() -> None:
    """Draws both into one picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), dpi=120)
    draw_formats(left)
    draw_history(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "float8.png")


if __name__ == "__main__":
    main()
