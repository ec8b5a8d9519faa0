"""What the dashboards are built of: panels with a unit and a description each, laid out in rows, and variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from grafana_foundation_sdk.builders import common, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

WIDTH: Final = 24
TAG: Final = "stagewatch"
SOURCE: Final = models.DataSourceRef("prometheus", "${datasource}")
GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"
DEPLOYMENT: Final = 'deployment=~"$deployment"'
ENGINE: Final = 'deployment=~"$deployment", engine=~"$engine", dp=~"$dp"'

P = TypeVar("P", stat.Panel, timeseries.Panel, table.Panel, statetimeline.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and how its series are called."""

    expression: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """What a panel says of itself: the question it answers, and what to make of the answer."""

    title: str
    description: str
    unit: str


def stat_panel(
    text: Text, query: Query, steps: Sequence[tuple[float | None, str]], width: int = 4
) -> stat.Panel:
    """One number, coloured by its size; ``steps`` are (from, colour), the first from None."""
    panel = _dressed(stat.Panel(), text, [query], width, 4)
    thresholds = build.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    thresholds.steps([models.Threshold(value, color) for value, color in steps])
    return (
        panel.thresholds(thresholds)
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def graph(
    text: Text, queries: Sequence[Query], width: int = 12, *, stacked: bool = False
) -> timeseries.Panel:
    """Values over time."""
    panel = _dressed(timeseries.Panel(), text, queries, width, 8)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.fill_opacity(20 if stacked else 5).min(0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return panel


def timeline(
    text: Text, query: Query, names: Sequence[tuple[int, str, str]], width: int = 24
) -> statetimeline.Panel:
    """States over time, one lane a series; ``names`` are (value, name, colour)."""
    panel = _dressed(statetimeline.Panel(), text, [query], width, 8)
    options = {
        str(value): models.ValueMappingResult(name, color, index=place)
        for place, (value, name, color) in enumerate(names)
    }
    return panel.mappings([models.ValueMap(options)]).show_value(common_models.VisibilityMode.NEVER)


def joined_table(
    text: Text, queries: Sequence[Query], renamed: dict[str, str], hidden: Sequence[str], width: int = 24
) -> table.Panel:
    """Instant series of several queries side by side, joined by their labels; `Value #A` is the first query's."""
    panel = _dressed(table.Panel(), text, (), width, 8)
    for place, query in enumerate(queries):
        panel.with_target(
            Dataquery()
            .expr(query.expression)
            .instant()
            .format(PromQueryFormat.TABLE)
            .ref_id(chr(ord("A") + place))
            .datasource(SOURCE)
        )
    panel.with_transformation(models.DataTransformerConfig("merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            "organize", options={"excludeByName": dict.fromkeys(hidden, True), "renameByName": renamed}
        )
    )
    return panel


def link(title: str, url: str) -> build.DashboardLink:
    """A link from a panel's data, in another tab."""
    return build.DashboardLink(title).url(url).target_blank(True)


def page_link() -> build.DashboardLink:
    """To the live page of the engine that a series is of."""
    return link(
        "Its live page", "${collector}/#/engine/${__field.labels.engine:percentencode}/${__field.labels.dp}"
    )


def incidents_link() -> build.DashboardLink:
    """To the incidents of the engine that a series is of."""
    return link("Its incidents", "${collector}/v1/incidents?instance=${__field.labels.engine:percentencode}")


def engine_link() -> build.DashboardLink:
    """To the dashboard of the engine that a series is of."""
    variables = "&".join(f"var-{name}=${{__field.labels.{name}}}" for name in ("deployment", "engine", "dp"))
    return link("Its dashboard", f"/d/stagewatch-engine?{variables}&${{__url_time_range}}")


class Layout:
    """Puts panels from left to right, and in a new line where one is full."""

    def __init__(self) -> None:
        self._x = self._y = self._height = 0

    def line(self) -> None:
        """Begin a new line."""
        self._y += self._height
        self._x = self._height = 0

    def place(self, width: int, height: int) -> models.GridPos:
        """Where the next panel goes."""
        if self._x + width > WIDTH:
            self.line()
        found = models.GridPos(h=height, w=width, x=self._x, y=self._y)
        self._x += width
        self._height = max(self._height, height)
        return found


def board(uid: str, title: str, description: str) -> build.Dashboard:
    """An empty dashboard with what all have: variables, annotations of incidents, links to one another."""
    made = (
        build.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
    )
    made.with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    made.with_variable(
        build.TextBoxVariable("collector").label("Collector").default_value("http://localhost:8765")
    )
    made.link(
        build.DashboardLink("stagewatch")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )
    return made


def query_variable(name: str, label: str, source: str, *, many: bool) -> build.QueryVariable:
    """A variable whose values are a label's, as ``label_values`` finds them in ``source``."""
    variable = (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({source}, {name})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
    )
    if many:
        variable.multi(True).include_all(True).all_value(".*")
        variable.current(models.VariableOption(text="All", value="$__all", selected=True))
    return variable


def incidents_annotation(selector: str) -> dict[str, Any]:
    """Incidents as marks, each dated at its first bad step: Prometheus's ``useValueForTime``."""
    return {
        "name": "Incidents",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "hide": False,
        "iconColor": RED,
        "expr": "max by (deployment, engine, dp, check, severity, stage) (stagewatch_trouble_first_timestamp_seconds"
        f'{{{selector}, severity=~"warning|critical"}}) * 1000',
        "step": "60s",
        "titleFormat": "{{severity}} {{check}}",
        "textFormat": "stage {{stage}} of engine {{engine}}, replica {{dp}}",
        "tagKeys": "check,severity",
        "useValueForTime": "on",
    }


def _dressed(panel: P, text: Text, queries: Sequence[Query], width: int, height: int) -> P:
    panel.title(text.title).description(text.description).unit(text.unit).datasource(SOURCE)
    panel.grid_pos(models.GridPos(h=height, w=width, x=0, y=0))
    for place, query in enumerate(queries):
        target = Dataquery().expr(query.expression).legend_format(query.legend or "__auto").datasource(SOURCE)
        target.ref_id(chr(ord("A") + place)).range()
        if query.exemplars:
            target.exemplar(True)
        panel.with_target(target)
    return panel
