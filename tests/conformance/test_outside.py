"""What surrounds the code: workflows, templates, citation, extras."""

import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_a_script_of_the_repository_with_the_least_permissions(path):
    """A workflow runs nothing of its own, may only read, and uses actions by their commits."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 360
        assert not job["runs-on"].endswith("latest")
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            else:
                script = re.fullmatch(r"bash (\.ci/\w+)( \$\{\{ matrix\.part \}\})?", step["run"])[
                    1
                ]
                assert (ROOT / script).is_file()
        checkout = job["steps"][0]
        assert checkout["uses"].startswith("actions/checkout@")
        assert checkout["with"] == {"persist-credentials": False}


def test_both_workflows_are_there():
    """CI and the nightly run have a workflow each, of their scripts."""
    assert [path.stem for path in WORKFLOWS] == ["ci", "nightly"]


def test_the_citation_is_of_this_version():
    """What `CITATION.cff` says about the project is what `pyproject.toml` says."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert (
        citation["title"]
        == f"{PROJECT['name']}: {PROJECT['description'][0].lower()}" + (PROJECT["description"][1:])
    )


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_a_template_asks_for_something(path):
    """Every form has a name, a description, and a field that must be filled in."""
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        return
    assert form["name"]
    assert form["description"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    identifiers = [field["id"] for field in form["body"] if "id" in field]
    assert len(identifiers) == len(set(identifiers))


def test_the_extra_all_has_every_extra_of_users():
    """`pip install 'halfstep[all]'` brings what users' code may need, and nothing that only we need.

    Nor Aim, which narrows so many versions that pip searches for minutes.
    """
    extras = PROJECT["optional-dependencies"]
    [everything] = extras["all"]
    named = set(re.fullmatch(r"halfstep\[([\w,-]+)\]", everything)[1].split(","))
    ours = {
        *("aim", "all", "audit", "bench", "browser", "coverage", "data", "docs", "examples"),
        *("gpu-check", "mutation", "oracles", "proofs", "release", "test", "tpu-check", "world"),
    }
    assert named == extras.keys() - ours
