"""``make gpu-wheels``: what a machine without network lacks, and the commit that goes there.

Such a machine has Python 3.12, torch and lightning, and no Hydra. What travels is the working tree
and ``build/gpu-wheels``; ``tools/gpu_proof/offline.sh`` installs it and runs the proof.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu_proof.proof import ROOT, WHEELS, commit_name, digest

LIMIT = 60e6  # bytes of all that is copied
_PURE = ("hydra-core", "omegaconf", "antlr4-python3-runtime")


def main() -> int:
    """Fills the folder; prints what has to be copied."""
    locked = dict(
        line.split("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    with tempfile.TemporaryDirectory() as folder:
        wanted = [f"{name}=={locked[name]}" for name in _PURE]
        # The last one is published as sources alone; its wheel is Python only, like the others.
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder]
        subprocess.run([*command, *wanted], check=True)
        shutil.rmtree(WHEELS, ignore_errors=True)
        shutil.copytree(folder, WHEELS)
    (WHEELS / "COMMIT").write_text(f"{commit_name()} {digest()}\n")
    sizes = {path.name: path.stat().st_size for path in sorted(WHEELS.iterdir())}
    tree = tree_bytes()
    for name, size in sizes.items():
        sys.stdout.write(f"{size:10,d}  {WHEELS.relative_to(ROOT) / name}\n")
    sys.stdout.write(f"{tree:10,d}  the working tree\n")
    total = sum(sizes.values()) + tree
    sys.stdout.write(f"{total:10,d}  bytes to copy, of {LIMIT:,.0f} at most\n")
    return 0 if total <= LIMIT else 1


def tree_bytes() -> int:
    """Size of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    paths = (Path(ROOT, name) for name in listed.split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
