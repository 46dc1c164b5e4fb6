"""mode=dashboard: what is sent, to whom, and what happens without a key."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from launcher.commands.dashboard import VIEW, definition
from launcher.rank.trackers import FIGURES
from tests.launcher.command_line import run_here

KEY = "k" * 40


class Server(HTTPServer):
    """Answers as wandb's GraphQL does, and keeps what it was asked."""

    asked: list[tuple[str, str, dict[str, Any]]]
    answers: list[tuple[int, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        code, answer = self.server.answers.pop(0)
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


VIEWER = (200, {"data": {"viewer": {"entity": "team", "username": "me"}}})
SAVED = (200, {"data": {"upsertView": {"view": {"id": "1", "name": VIEW}, "inserted": True}}})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), _Handler)
    server.asked, server.answers = [], [VIEWER, SAVED]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_workspace_is_saved_in_the_project_of_the_key(server, tmp_path, monkeypatch):
    done = run_here(["mode=dashboard", "tracking.project=mine"], tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    assert done.output == (
        f"dashboard: http://127.0.0.1:{server.server_port}/team/mine?nw=foldpipe000\n"
    )
    assert list(tmp_path.iterdir()) == []
    (path, authorization, asked), (_, _, saved) = server.asked
    assert (path, "viewer" in asked["query"]) == ("/graphql", True)
    assert base64.b64decode(authorization.removeprefix("Basic ")).decode() == f"api:{KEY}"
    sent = saved["variables"]
    assert (sent["entityName"], sent["projectName"], sent["name"]) == ("team", "mine", VIEW)
    assert sent["type"] == "project-view"
    assert json.loads(sent["spec"]) == json.loads(definition())


def test_a_team_is_not_asked_for_if_it_is_named(server, tmp_path, monkeypatch):
    server.answers = [SAVED]
    done = run_here(["mode=dashboard", "tracking.entity=ours"], tmp_path, monkeypatch)
    assert done.code == 0
    ((_, _, saved),) = server.asked
    assert saved["variables"]["entityName"] == "ours"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, {}), "answered 401 Unauthorized. Try `wandb login --relogin`."),
        ((302, {}), "answered 302"),
        ((200, {"errors": [{"message": "no such project"}]}), "no such project"),
        ((200, {"data": {"viewer": None}}), "does not know the key"),
        ((200, []), "no JSON object"),
    ],
)
def test_a_server_that_refuses_is_named_and_the_key_is_not(
    answer, says, server, tmp_path, monkeypatch
):
    server.answers = [answer]
    done = run_here(["mode=dashboard"], tmp_path, monkeypatch)
    assert (done.code, done.output) == (1, "")
    assert says in done.errors
    assert KEY not in done.errors
    assert done.errors.count("\n") == 1
    assert len(server.asked) == 1


def test_without_a_key_nothing_is_sent(server, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    run_here(["mode=dashboard"], tmp_path / "cwd", monkeypatch).assert_refused()
    assert server.asked == []


def test_a_key_is_not_sent_in_plain_text_to_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example.org")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    done = run_here(["mode=dashboard"], tmp_path, monkeypatch)
    done.assert_refused()
    assert "plain text" in done.errors


def test_a_sweep_of_dashboards_is_refused(tmp_path, monkeypatch):
    done = run_here(["-m", "mode=dashboard", "pp=1,2"], tmp_path, monkeypatch)
    done.assert_refused()


def panels() -> list[dict[str, Any]]:
    spec = json.loads(definition())
    return [
        panel
        for section in spec["section"]["panelBankConfig"]["sections"]
        for panel in section["panels"]
    ]


def test_every_panel_shows_something_that_runs_log():
    known = {"train_loss", "val_loss", *FIGURES}
    lines = [p["config"] for p in panels() if p["viewType"] == "Run History Line Plot"]
    shown = {metric for line in lines for metric in line["metrics"]}
    assert shown <= known
    assert set(FIGURES) <= shown
    assert {line["xAxis"] for line in lines} == {"trainer/global_step"}
    assert [line["metricRegex"] for line in lines if line.get("useMetricRegex")] == [
        "peak_memory_bytes/.*"
    ]
    media = [p["config"]["mediaKeys"] for p in panels() if p["viewType"] == "Media Browser"]
    assert media == [["timeline", "timeline_image"]]
