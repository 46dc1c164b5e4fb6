"""``mode=dashboard``: one view of a W&B project, with predicted next to measured metrics.

wandb-workspaces makes it. The view's name inside the project is fixed, so a second call updates it.
docs/reference/metrics.md has the names of the metrics, docs/guides/dashboards.md every panel.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from launcher.config import LaunchConfig
from launcher.secrets import has_wandb_key
from launcher.terminal import say
from strategies.errors import PlanError, RunError, install_words, one_line

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section

VIEW, TITLE, AXIS = "foldpipe000", "foldpipe", "trainer/global_step"


def run(config: LaunchConfig) -> int:
    """Saves or updates the view; without a login prints what it would save. No run folder."""
    project = config.tracking.project
    try:
        import wandb

        with warnings.catch_warnings():  # Its own, when it is imported.
            warnings.filterwarnings("ignore", "Pydantic V1 style", DeprecationWarning)
            import wandb_workspaces.workspaces as ws
    except ModuleNotFoundError as error:
        fix = f"Try {install_words('wandb-workspaces')}."
        raise PlanError("mode=dashboard needs the package wandb-workspaces.", fix=fix) from error
    if not has_wandb_key():
        say(f"dashboard: no login, so nothing was saved. View {TITLE} of project {project}:")
        for section in sections():
            titles = (getattr(panel, "title", "") for panel in section.panels)
            say(f"  {section.name}: {', '.join(map(str, titles))}")
        say("dashboard: to save it, run `wandb login` and this command again")
        return 0
    try:
        api = wandb.Api(timeout=20)
        entity = config.tracking.entity or api.default_entity or ""
        view = ws.Workspace(
            name=TITLE,
            entity=entity,
            project=project,
            sections=sections(),
            settings=ws.WorkspaceSettings(x_axis=AXIS),
        )
        view._internal_name = f"nw-{VIEW}-v"
        with contextlib.suppress(ValueError):  # The project has none yet.
            address = f"{api.settings['base_url']}/{entity}/{project}?nw={VIEW}"
            view._internal_id = ws.Workspace.from_url(address)._internal_id
        address = view.save().url
    except Exception as error:  # of wandb, of its transport, of the server
        fix = "Check `wandb login --relogin`, tracking.entity and tracking.project."
        raise RunError(f"W&B did not save the dashboard: {one_line(error)}.", fix=fix) from error
    say(f"dashboard: {address}")
    return 0


def sections() -> list[Section]:
    """Of the view, top to bottom."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces.workspaces import Section

    def lines(title: str, *names: str) -> LinePlot:
        return wr.LinePlot(title=title, x=AXIS, y=list(names))

    def pair(title: str, name: str) -> LinePlot:
        return lines(title, f"measured/{name}", f"predicted/{name}")

    def ranks(title: str, name: str) -> LinePlot:
        return wr.LinePlot(title=title, x=AXIS, metric_regex=f"{name}/.*")

    layout = ("schedule", "pp", "dp", "tp", "num_microbatches")
    summary = ("predicted/step_time_s", "measured/step_time_s", "measured/bubble_ratio",
               "tokens_per_s", "loss_last")  # fmt: skip
    axes: list[Any] = [
        *(wr.Config(f"layout.{name}") for name in layout),
        *map(wr.SummaryMetric, summary),
    ]
    columns = [wr.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes]
    predicted, measured = map(wr.SummaryMetric, summary[:2])
    made: dict[str, list[Any]] = {
        "Loss": [
            lines("loss", "train_loss", "val_loss"),
            lines("learning rate", "lr"),
            lines("gradient norm", "grad_norm"),
        ],
        "Step time, predicted and measured": [
            pair("step time", "step_time_s"),
            lines("tokens per second", "tokens_per_s"),
            lines("MFU", "mfu"),
        ],
        "Bubble and exposed reduction": [
            pair("bubble", "bubble_ratio"),
            pair("exposed reduction", "exposed_grad_reduce_s"),
        ],
        "Memory per rank": [
            ranks("measured peak memory (GPU)", "measured/peak_memory_bytes"),
            ranks("predicted peak memory", "predicted/peak_memory_bytes"),
            ranks("growth of the process (CPU)", "measured/process_growth_bytes"),
        ],
        "Sweep": [
            wr.ParallelCoordinatesPlot(title="parallel coordinates", columns=columns),
            wr.ScatterPlot(title="predicted and measured step time", x=predicted, y=measured),
        ],
        "Timeline": [wr.MediaBrowser(title="timeline", media_keys=["timeline"])],
    }
    return [Section(name=name, panels=panels, is_open=True) for name, panels in made.items()]
