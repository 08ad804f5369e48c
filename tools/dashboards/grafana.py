"""The dashboards as JSON for Grafana, by the typed builders of its SDK."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from tools.dashboards.model import Board, Panel

# Provisioned under these ids.
DATA_SOURCE = "prometheus"
# Variables: name, label, query of its values.
VARIABLES = (
    ("model", "Model", "label_values(kvmesh_frontend_model_workers, model)"),
    ("role", "Role", "label_values(kvmesh_instance_info, role)"),
    ("instance", "Instance", 'label_values(kvmesh_instance_info{role=~"$role"}, instance)'),
)
COLUMNS, WIDTH, HEIGHT = 24, 8, 8


def encode(board: Board) -> str:
    """Returns a dashboard as the content of its file."""
    encoder = JSONEncoder(sort_keys=True, indent=1)
    return str(encoder.encode(_dashboard(board).build())) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    others = dashboard.DashboardLink("Dashboards").tags(["kvmesh"])
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"kvmesh-{board.name}")
        .description(board.description)
        .tags(["kvmesh"])
        .refresh("10s")
        .time("now-30m", "now")
        .link(others.include_vars(True).keep_time(True))
    )
    for name, label, query in VARIABLES:
        built.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
            .datasource(_data_source())
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for title, panels in board.rows.items():
        built.with_row(dashboard.Row(title))
        for panel in panels:
            built.with_panel(_panel(panel))
    return built


def _panel(panel: Panel) -> timeseries.Panel | heatmap.Panel:
    built = heatmap.Panel() if panel.kind == "heatmap" else timeseries.Panel()
    built.title(panel.title).description(panel.description).datasource(_data_source())
    built.unit(panel.unit).height(HEIGHT).span(WIDTH)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
        built.with_target(target.exemplar(query.exemplars).ref_id(chr(ord("A") + number)))
    return built


def _data_source() -> DataSourceRef:
    return DataSourceRef(type_val=DATA_SOURCE, uid=DATA_SOURCE)
