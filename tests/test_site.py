"""The documentation site builds without warnings, and reading it fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.key import keys_of

pytestmark = pytest.mark.full  # Every build takes seconds: `make test-docs`.
ROOT = Path(__file__).resolve().parents[1]


def _build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    words = ["build", "--config-file", str(config), "--site-dir", str(folder)]
    # A proxy that nobody answers at: whatever the build fetched would fail.
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = _build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 8
    for page in pages:
        assert (site / page.with_suffix(".html")).is_file()


def test_every_key_is_on_its_page(site: Path) -> None:
    page = (site / "reference" / "keys.html").read_text(encoding="utf-8")
    told = set(re.findall(r"<td><code>([\w.]+)</code></td>", page))
    assert {key.path for key in keys_of(LaunchConfig)} <= told


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//"
        r"|<link\b[^>]*rel=\"?(?:stylesheet|preload|preconnect|icon)\b[^>]*href=\"?(https?:)?//"
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page.name
    for style in (ROOT / "docs").rglob("*.css"):
        assert "//" not in re.sub(r"/\*.*?\*/", "", style.read_text(), flags=re.DOTALL), style


@pytest.mark.parametrize(
    "text, told",
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](#nowhere)", "no such anchor"),
        ("[x](/absolute.md)", "absolute"),
        ("![x](picture.svg)", "picture.svg"),
    ],
)
def test_a_broken_link_ends_the_build(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    shared = re.sub(
        r"^(theme|hooks|plugins|extra_css):\n(?:[ -].*\n)+", "", _settings(), flags=re.M
    )
    (tmp_path / "mkdocs.yml").write_text(shared)
    done = _build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert told in done.stderr


def _settings() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
