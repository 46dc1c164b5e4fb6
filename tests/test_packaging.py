"""What others see of the project before they run it: metadata, citation, workflows, issue forms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from launcher import __main__
from launcher.planning import model_trace
from strategies.errors import install_words

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
ADVISING = [ROOT / "README.md", ROOT / "pyproject.toml"] + [
    path
    for folder in ("launcher", "strategies", "conf", "docs", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
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


def test_no_text_installs_the_other_project_of_that_name() -> None:
    """``foldpipe`` on PyPI is not this one: what installs it would replace ours."""
    assert PROJECT["name"] == "foldpipe-launcher"
    asks = re.compile(rb"foldpipe\[|pip3? install [^#\n`]*\bfoldpipe(?![-\w/])")
    assert asks.search(b"pip install -U 'foldpipe'") and asks.search(b"foldpipe[hf]")
    found = [path for path in ADVISING if asks.search(path.read_bytes())]
    assert len(ADVISING) > 300
    assert found == []


def test_messages_ask_for_what_the_extras_ask_for() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, package in (
        ("hf", "transformers"), ("optuna", "optuna"),
        ("tensorboard", "tensorboard"), ("dashboard", "wandb-workspaces"),
    ):  # fmt: skip
        assert extras[name] == [install_words(package).removeprefix("pip install ").strip("'")]


def test_the_version_is_that_of_this_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    name = PROJECT["name"]
    monkeypatch.setattr(__main__, "version", {name: "1.2"}.__getitem__)
    assert __main__._version() == "1.2"
    assert name in model_trace._LIBRARIES


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
