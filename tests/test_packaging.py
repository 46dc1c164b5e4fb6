"""What others see of the project before they run it: metadata, citation, workflows, issue forms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
FORMS = sorted(
    path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_every_version_of_python_that_is_claimed_is_tested() -> None:
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert claimed == WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        word
        for job in WORKFLOW["jobs"].values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
        for word in step["run"].split()[1:]
    }
    assert {"test", "check", "docs", "test-docs"} <= called <= targets
    ci = (ROOT / ".ci/run").read_text()
    assert set(re.findall(r"^make (\S+)", ci, re.MULTILINE)) <= called


def test_reports_of_failures_ask_for_what_validate_says() -> None:
    assert len(FORMS) == 3
    for form in FORMS:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(content)
        required = [
            item["attributes"]
            for item in content["body"]
            if item.get("validations", {}).get("required")
        ]
        assert required
        if form.stem != "wish":
            assert any("mode=validate" in item.get("description", "") for item in required)
