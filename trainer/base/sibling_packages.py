"""Makes sure that `scaling` and `strategies` are halfstep's, not other modules of that name."""

import importlib.util
import pathlib

SIBLINGS = ("scaling", "strategies")


def check_siblings(ours: pathlib.Path) -> None:
    """Raises ImportError if importing `scaling` or `strategies` would find something else.

    Python finds a file `scaling.py` next to a user's script before any installed package.

    Args:
        ours: the folder that holds halfstep's packages.
    """
    for name in SIBLINGS:
        spec = importlib.util.find_spec(name)
        origin = pathlib.Path(spec.origin) if spec and spec.origin else None
        # The folder is resolved, not the file: some installs link every file to its source.
        if origin is None or origin.parent.resolve() != (ours / name).resolve():
            raise ImportError(
                f"`import {name}` finds {origin or 'nothing'}, not halfstep's package in "
                f"{ours / name}. halfstep cannot work with another module of that name. Rename "
                "the other file or folder, or start Python with -P, which leaves out the script's "
                "folder.",
                name=name,
            )
