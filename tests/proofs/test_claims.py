"""No claim of the README without a line that says what holds it, and where."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
NO_CLAIM = ("A new ",)  # where to put a rule, a strategy, a flag or a figure


def plain(text):
    """A text on one line."""
    return " ".join(text.split())


README = plain(re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL))
PAGE = (ROOT / "docs" / "proofs.md").read_text()
LINES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.split("## The README's claims")[1].splitlines()
    if line.startswith("| ") and not line.startswith("| claim")
]


def test_every_bold_claim_of_the_readme_has_a_line():
    """What the README prints in bold is a claim; docs/proofs.md says whether it is proved, tested or
    measured. A new claim needs a line in its last table.
    """
    bold = [plain(each) for each in re.findall(r"\*\*(.+?)\*\*", README)]
    claims = [each for each in bold if not each.startswith(NO_CLAIM)]
    listed = {claim for claim, _, _ in LINES}

    assert len(claims) >= 8
    assert [claim for claim in claims if claim not in listed] == []


def test_every_line_is_of_a_claim_that_the_readme_still_makes():
    """A claim that has been changed or dropped leaves no line behind."""
    assert [claim for claim, _, _ in LINES if claim not in README] == []


def test_every_line_leads_to_what_holds_the_claim():
    """What is said to hold a claim is there."""
    for _, how, where in LINES:
        [path] = re.findall(r"\]\((.+?)\)", where)
        assert (ROOT / "docs" / path).is_file()
        assert re.search("test|measured|proved", how), how


def test_the_readme_of_the_proofs_lists_every_file():
    """The README names every file of the folder."""
    readme = (ROOT / "proofs" / "README.md").read_text()
    for path in (ROOT / "proofs").glob("*.py"):
        assert path.name == "__init__.py" or f"`{path.name}`" in readme, path.name
