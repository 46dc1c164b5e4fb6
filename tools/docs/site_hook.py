"""What mkdocs writes into pages when it builds them: tables that change with every key.

``<!-- built: NAME -->`` becomes what NAME makes here. What is read in the repository, too, is made
by ``pages.py`` and committed.
"""

from __future__ import annotations

import re

from tools.docs.key_page import flag_table, key_tables

_BUILT = {"flags": flag_table, "keys": key_tables}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page; a name that nobody makes ends the build."""
    return re.sub(r"<!-- built: (\w+) -->", lambda found: _BUILT[found[1]](), markdown)
