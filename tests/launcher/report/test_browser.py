"""The pages in a browser, where there is one: folded, sorted, filtered."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.report.html import Panel, timeline_html
from launcher.report.plan_page import plans_html
from strategies import UniformCosts, compile_program, simulate
from tests.launcher.report.test_plan_page import GIB, plan

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

# Does what a person would, and leaves what is then seen in the title.
ACTS = """
<script>
const told = [];
addEventListener("error", (event) => told.push("error: " + event.message));
const heights = () => [...document.querySelectorAll("canvas")].map((c) => c.style.height).join();
const seen = () => [...document.querySelectorAll("tbody tr")].filter((r) => !r.hidden)
  .map((r) => r.dataset.job).join("");
const type = (words) => {
  const field = document.getElementById("filter");
  field.value = words;
  field.dispatchEvent(new Event("input"));
};
told.push(heights());
document.getElementById("memory").click();
told.push(heights());
const head = (name) => [...document.querySelectorAll("th")].find((h) => h.textContent === name);
for (const name of ["step", "step", "GiB per rank", "schedule"]) { head(name).click(); told.push(seen()); }
type("schedule=zb_h1");
told.push(seen());
type("step<1.5 pp=2 SCHEDULE=1f1b");
told.push(seen());
type("nothing like it");
told.push(seen() + "-" + document.querySelectorAll(".off").length);
type("");
told.push(seen());
document.title = told.join("|");
</script>
"""  # noqa: E501


def test_a_page_of_plans_is_folded_sorted_and_filtered(tmp_path: Path) -> None:
    timeline = simulate(
        compile_program(schedule="1f1b", pp=24, num_microbatches=24), UniformCosts(grad_reduce=1)
    )
    plans = [
        plan(2.0, 8), plan(0.9, 10), plan(1.2, 30, schedule="zb_h1"), plan(1.4, 4, pp=4),
    ]  # fmt: skip
    table = plans_html(plans, limit_bytes=40 * GIB)
    text = timeline_html([Panel("predicted", timeline)], title="plans", table=table)
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", f"{ACTS}</body>"))
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    found = re.search("<title>(.*?)</title>", done.stdout)
    assert found is not None, done.stderr
    folded, open_, *rows = found[1].replace("&lt;", "<").split("|")
    # 24 ranks begin folded and fit a screen.
    assert int(folded.removesuffix("px")) < 900 < int(open_.removesuffix("px"))
    assert rows == ["2341", "1432", "4123", "1243", "3", "2", "-4", "1243"]
