"""Saves the workspace of ``workspace.json`` in a W&B project, over its GraphQL interface.

What is sent is what wandb-workspaces would send; neither that package nor wandb is imported, so the
parent stays quick. The view's name inside the project is fixed: pushing again replaces it.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from launcher.config import LaunchConfig
from launcher.terminal import say
from strategies.errors import PlanError, RunError

VIEW, TITLE = "nw-foldpipe000-v", "foldpipe"
_HOST = "https://api.wandb.ai"
_TIMEOUT_S = 20.0
_VIEWER = "query Viewer { viewer { entity username } }"
_UPSERT = (
    "mutation UpsertView2($id: ID, $entityName: String, $projectName: String, $type: String, "
    "$name: String, $displayName: String, $description: String, $spec: String) { "
    "upsertView(input: {id: $id, entityName: $entityName, projectName: $projectName, name: $name, "
    "displayName: $displayName, description: $description, type: $type, spec: $spec, "
    "createdUsing: WANDB_SDK}) { view { id name } inserted } }"
)


@dataclass(frozen=True, slots=True)
class Account:
    """Where to push, and as whom.

    Attributes:
        host: Of the interface, with its scheme.
        key: Sent to that host alone, never printed.
    """

    host: str
    key: str

    def __repr__(self) -> str:
        return f"Account({self.host})"


def _find_account() -> Account:
    """The key that ``wandb login`` or WANDB_API_KEY has set up for WANDB_BASE_URL."""
    host = (os.environ.get("WANDB_BASE_URL") or _HOST).rstrip("/")
    parts = urlsplit(host)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise PlanError(
            f"WANDB_BASE_URL={host}: the key would travel in plain text. Try an https address."
        )
    key = os.environ.get("WANDB_API_KEY") or _from_netrc(parts.hostname or "")
    if not key:
        raise PlanError(
            "mode=dashboard saves a workspace in your W&B project, and no key is set up for "
            f"{host}. Try `wandb login`, or export WANDB_API_KEY."
        )
    return Account(host, key)


def definition() -> str:
    """The workspace's specification as JSON in one line."""
    text = (files("launcher.commands") / "workspace.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"))


def _push(account: Account, *, project: str, entity: str | None) -> str:
    """Saves the workspace; returns its address. ``entity`` None is the account's default."""
    if entity is None:
        viewer = _ask(account, _VIEWER, {}).get("viewer") or {}
        entity = viewer.get("entity") or viewer.get("username")
        if not entity:
            raise RunError(f"{account.host} does not know the key. Try `wandb login --relogin`.")
    variables = {
        "entityName": entity,
        "projectName": project,
        "name": VIEW,
        "displayName": TITLE,
        "type": "project-view",
        "description": "",
        "spec": definition(),
    }
    _ask(account, _UPSERT, variables)
    # The interface of the public service lives beside the pages that people see.
    site = "https://wandb.ai" if account.host == _HOST else account.host
    return f"{site}/{entity}/{project}?nw={VIEW.removeprefix('nw-').removesuffix('-v')}"


def _ask(account: Account, query: str, variables: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"query": query, "variables": variables}).encode()
    token = base64.b64encode(f"api:{account.key}".encode()).decode()
    request = urllib.request.Request(
        f"{account.host}/graphql",
        data=body,
        headers={"Content-Type": "application/json", "Authorization": f"Basic {token}"},
    )
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        hint = " Try `wandb login --relogin`." if error.code in (401, 403) else ""
        raise RunError(f"{account.host} answered {error.code} {error.reason}.{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RunError(f"{account.host} cannot be reached: {reason}. Nothing was saved.") from None
    problems = answer.get("errors") if isinstance(answer, dict) else "no JSON object"
    if problems:
        raise RunError(f"{account.host} refuses the dashboard: {json.dumps(problems)[:300]}")
    found: dict[str, Any] = answer.get("data") or {}
    return found


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Follows none."""


def _from_netrc(host: str) -> str | None:
    try:
        found = netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return None if found is None else found[2]


# ``mode=dashboard``: the workspace of the repository, saved in a W&B project.


def run(config: LaunchConfig) -> int:
    """Pushes it; leaves no run folder."""
    account = _find_account()
    address = _push(account, project=config.tracking.project, entity=config.tracking.entity)
    say(f"dashboard: {address}")
    return 0
