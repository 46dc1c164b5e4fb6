"""What the program writes of the documents: `make docs-page`.

Whole pages and pictures, and blocks inside pages that are otherwise written by hand: between
``<!-- made: NAME -->`` and ``<!-- /made -->`` stands what NAME makes here. A test compares all of
it with the files (`make test-docs`; what costs little every day), so nothing that is read is older
than what makes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- /made -->)", re.DOTALL)
_SLOW = ("decisions", "memory_levers")


def percent(share: float) -> str:
    """``5.9 %``."""
    return f"{share:.1%}".replace("%", " %")


def difference(share: float) -> str:
    """``-13.2 %``, or a dash for none."""
    return "-" if abs(share) < 5e-4 else f"{share:+.1%}".replace("%", " %")


def made(*, quick: bool = False) -> Iterator[tuple[Path, str]]:
    """(file, what must stand in it) of every page, picture and block.

    Args:
        quick: Leave out what takes seconds: the schedules' pages, and blocks of long simulations.
    """
    from tools.docs import (
        core_page,
        front_page,
        lever_table,
        lightning_page,
        schedule_pages,
        situations,
        slurm_reading,
    )

    for name, text in schedule_pages.pictures() if quick else schedule_pages.schedule_pages():
        yield DOCS / name, text
    yield DOCS / "guides" / "reading-a-timeline.svg", schedule_pages.timeline_to_read()
    yield DOCS / "how" / "fold.svg", schedule_pages.fold_at_a_flush()
    yield DOCS / "assets" / "schedules.svg", schedule_pages.two_schedules()
    yield DOCS / "reference" / "lightning.md", lightning_page.lightning_page()
    blocks: Mapping[str, Callable[[], str]] = {
        "gpu_badge": front_page.gpu_badge,
        "kinds": core_page.kinds_table,
        "memory_levers": lever_table.lever_table,
        "prediction_errors": front_page.prediction_errors,
        "schedules": schedule_pages.schedule_table,
        "synonyms": schedule_pages.synonym_table,
        "decisions": situations.decision_table,
        "situations": situations.matrix,
        **slurm_reading.slurm_blocks(),
    }
    if quick:
        blocks = {name: make for name, make in blocks.items() if name not in _SLOW}
    for path in [
        ROOT / "README.md",
        ROOT / "strategies" / "README.md",
        *sorted(DOCS.rglob("*.md")),
    ]:
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            yield path, _BLOCK.sub(lambda found: _filled(found, blocks), text)


def _filled(found: re.Match[str], blocks: Mapping[str, Callable[[], str]]) -> str:
    if found[2] in _SLOW and found[2] not in blocks:
        return found[0]
    return f"{found[1]}\n{blocks[found[2]]()}\n\n{found[3]}"


def main() -> None:
    """Writes what has changed."""
    for path, text in made():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
