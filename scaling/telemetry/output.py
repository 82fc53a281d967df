"""What the simulator writes: figures into files, and texts for the terminal."""

import io
import pathlib
from typing import Any


def new_figure(figsize: tuple[float, float]) -> Any:
    """Returns an empty `matplotlib.figure.Figure`.

    Args:
        figsize: width and height in inches.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plotting the scales needs matplotlib, which is not installed. Run pip install "
            "'halfstep[plot]', or pass --plot= for no plot."
        ) from error
    return Figure(figsize=figsize, layout="constrained")


def save_figure(figure: Any, path: str | pathlib.Path) -> None:
    """Writes a figure in the format that the file's name says, by default PNG.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if matplotlib does not have that format.
    """
    path = pathlib.Path(path)
    kind, known = path.suffix.removeprefix(".") or "png", figure.canvas.get_supported_filetypes()
    if kind.lower() not in known:
        raise ValueError(
            f"`--plot` must name a file in a format of matplotlib; got {str(path)!r}. Its ending "
            f"says which: {', '.join(sorted(known))}. Pass --plot=scales.png, for example."
        )
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=100)
    replace_file(path, file.getvalue())


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file anew. A link at its place is replaced, and what it leads to stays as it is.

    Raises:
        OSError: if the file cannot be written, for instance because a folder is in its place.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # "x" follows no link
        file.write(content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink()
        raise


def printable(text: str) -> str:
    r"""Returns a text for the terminal: control characters and the like become escapes.

    Example:
        >>> printable("runs/a\x1b[2J")
        'runs/a\\x1b[2J'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
