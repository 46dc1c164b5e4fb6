"""mode=dashboard: what is sent, to which server, and what happens without a login."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import wandb

from launcher.commands.dashboard import AXIS, VIEW
from launcher.report.tracked import request
from launcher.resolve import resolve
from tests.launcher.command_line import run_here
from tests.launcher.metric_names import ROWS, SUMMARY

KEY = "k" * 40


class Server(HTTPServer):
    """Answers as W&B's GraphQL does, and keeps what it was sent.

    Attributes:
        refusal: Code and answer for everything; None to save.
        known: Identity of the view that the project has; None before the first.
    """

    asked: list[tuple[str, dict[str, Any]]]
    refusal: tuple[int, Any] | None = None
    known: str | None = None

    def answer(self, query: str) -> Any:
        if "upsertView" in query:
            return {"upsertView": {"view": {"id": "7", "name": f"nw-{VIEW}-v"}, "inserted": True}}
        if "allViews" in query:
            view = {"id": self.known, "displayName": "foldpipe", "spec": SPEC}
            return {"project": {"allViews": {"edges": [{"node": view}] if self.known else []}}}
        return {"viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}",
                           "teams": {"edges": []}}}  # fmt: skip

    @property
    def saved(self) -> list[dict[str, Any]]:
        return [body["variables"] for _, body in self.asked if "upsertView" in body["query"]]


SPEC = json.dumps({
    "section": {
        "panelBankConfig": {"state": 1, "settings": {}, "sections": []},
        "panelBankSectionConfig": {"pinned": False}, "customRunColors": {},
    }
})  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        code, answer = 200, {}
        if self.path == "/graphql":
            body = json.loads(content)
            self.server.asked.append((self.headers["Authorization"], body))
            code, answer = 200, {"data": self.server.answer(body["query"])}
            code, answer = self.server.refusal or (code, answer)
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), _Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield server
    wandb.teardown()  # Else this process keeps the address and the key for its next run.
    server.shutdown()
    server.server_close()
    thread.join()


def panels(saved: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Of a view, by section."""
    found = json.loads(saved["spec"])["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in found}


def test_the_view_is_saved_in_the_project_of_the_login(server, tmp_path, monkeypatch):
    done = run_here(["mode=dashboard", "tracking.project=mine"], tmp_path, monkeypatch)
    assert done.code == 0
    assert done.output == (
        f"dashboard: http://127.0.0.1:{server.server_port}/team/mine?nw={VIEW}\n"
    )
    assert list(tmp_path.iterdir()) == []
    (saved,) = server.saved
    assert (saved["entityName"], saved["projectName"]) == ("team", "mine")
    assert (saved["name"], saved["type"], "id" in saved) == (f"nw-{VIEW}-v", "project-view", False)
    keys = {base64.b64decode(auth.removeprefix("Basic ")).decode() for auth, _ in server.asked}
    assert keys == {f"api:{KEY}"}
    assert KEY not in done.output + done.errors


def test_a_second_call_updates_the_view_of_the_team(server, tmp_path, monkeypatch):
    server.known = "VmlldzoxMjM="
    words = ["mode=dashboard", "tracking.entity=ours", "tracking.project=mine"]
    assert run_here(words, tmp_path, monkeypatch).code == 0
    (saved,) = server.saved
    assert (saved["entityName"], saved["id"]) == ("ours", "VmlldzoxMjM=")


def test_every_panel_shows_metrics_of_the_reference_page(server, tmp_path, monkeypatch):
    run_here(["mode=dashboard"], tmp_path, monkeypatch)
    sections = panels(server.saved[0])
    assert list(sections) == [
        "Loss", "Step time, predicted and measured", "Bubble and exposed reduction",
        "Memory per rank", "Sweep", "Timeline",
    ]  # fmt: skip
    lines = [
        panel["config"]
        for section in sections.values()
        for panel in section
        if panel["viewType"] == "Run History Line Plot"
    ]
    assert {line["xAxis"] for line in lines} == {AXIS}
    shown = {metric for line in lines for metric in line.get("metrics", ())}
    shown |= {
        line["metricRegex"].replace(".*", "rank_00000") for line in lines if "metricRegex" in line
    }
    assert shown <= {*ROWS}
    pairs = {name for name in shown if name.startswith(("predicted/", "measured/"))}
    assert pairs == {name for name in ROWS if name.startswith(("predicted/", "measured/"))}
    (timeline,) = sections["Timeline"]
    assert timeline["config"]["mediaKeys"] == ["timeline"]


def test_a_sweep_is_shown_as_parallel_coordinates_of_configuration_and_summary(
    server, tmp_path, monkeypatch
):
    done = run_here(["mode=dashboard"], tmp_path, monkeypatch)
    done = run_here(["mode=train"], tmp_path / "run", monkeypatch)
    layout = request(resolve(done.calls[0].config))["layout"]
    coordinates, scatter = panels(server.saved[0])["Sweep"]
    assert coordinates["viewType"] == "Parallel Coordinates Plot"
    axes = [column["accessor"] for column in coordinates["config"]["columns"]]
    configs = [axis for axis in axes if axis.startswith("config:layout.value.")]
    assert {axis.rpartition(".")[2] for axis in configs} <= {*layout}
    assert "config:layout.value.schedule" in configs
    rest = [axis for axis in axes if axis not in configs]
    assert {axis.removeprefix("summary:") for axis in rest} <= {*SUMMARY}
    assert scatter["config"]["xAxis"] == "summary:predicted/step_time_s"
    assert scatter["config"]["yAxis"] == "summary:measured/step_time_s"


@pytest.mark.parametrize(
    "refusal", [(401, {}), (200, {"errors": [{"message": "no such project"}]}), (200, [])]
)
def test_what_the_server_refuses_is_one_message_without_the_key(
    refusal, server, tmp_path, monkeypatch
):
    server.refusal = refusal
    done = run_here(["mode=dashboard"], tmp_path, monkeypatch)
    assert (done.code, done.output) == (1, "")
    (line,) = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: W&B did not save the dashboard: ")
    assert "Check `wandb login --relogin`" in line
    assert KEY not in done.errors
    assert "Traceback" not in done.errors


def test_without_a_login_it_prints_what_it_would_save(server, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    done = run_here(["mode=dashboard", "tracking.project=mine"], tmp_path / "cwd", monkeypatch)
    assert (done.code, done.errors) == (0, "")
    assert done.output == (
        "dashboard: no login, so nothing was saved. View foldpipe of project mine:\n"
        "  Loss: loss, learning rate, gradient norm\n"
        "  Step time, predicted and measured: "
        "step time, tokens per second, MFU\n"
        "  Bubble and exposed reduction: bubble, exposed reduction\n"
        "  Memory per rank: measured peak memory (GPU), predicted peak memory, "
        "growth of the process (CPU)\n"
        "  Sweep: parallel coordinates, predicted and measured step time\n"
        "  Timeline: timeline\n"
        "dashboard: to save it, run `wandb login` and this command again\n"
    )
    assert server.asked == []


def test_without_the_package_the_message_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    done = run_here(["mode=dashboard"], tmp_path, monkeypatch)
    done.assert_refused()
    assert "pip install 'wandb-workspaces>=0.4.13'" in done.errors


def test_a_sweep_of_dashboards_is_refused(tmp_path, monkeypatch):
    done = run_here(["-m", "mode=dashboard", "pp=1,2"], tmp_path, monkeypatch)
    done.assert_refused()
