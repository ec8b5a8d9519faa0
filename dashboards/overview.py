"""Overview: is any engine desynchronised, since when, which stage."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as build

from stagewatch.dashboards.panels import (
    BLUE,
    DEPLOYMENT,
    GREEN,
    ORANGE,
    RED,
    Query,
    Text,
    board,
    engine_link,
    graph,
    incidents_link,
    joined_table,
    link,
    page_link,
    query_variable,
    stat_panel,
    timeline,
)
from stagewatch.dashboards.rules import BAD_S
from stagewatch.dashboards.states import STATES, rate, state

UID: Final = "stagewatch-overview"
SELECTOR: Final = DEPLOYMENT
_TROUBLE: Final = "deployment, engine, dp, check, severity, stage"


def overview() -> build.Dashboard:
    """The dashboard for whoever is on call."""
    made = board(
        UID, "stagewatch: overview", "Do the stages of every engine still agree about every request?"
    )
    made.with_variable(query_variable("deployment", "Deployment", "stagewatch_steps_compared", many=True))
    _numbers(made)
    _table(made)
    _graphs(made)
    return made


def _numbers(made: build.Dashboard) -> None:
    bad = f'time() - stagewatch_trouble_last_timestamp_seconds{{severity="critical", {DEPLOYMENT}}} < {BAD_S}'
    made.with_panel(
        stat_panel(
            Text(
                "Desynchronised now",
                "Engines whose ranks were seen to disagree within the last two minutes. Above 0: what some requests "
                "say is not the model's. The table below says which, since when and where.",
                "short",
            ),
            Query(f"count(max by (deployment, engine, dp) ({bad})) or vector(0)"),
            ((None, GREEN), (1, RED)),
        )
    )
    made.with_panel(
        stat_panel(
            Text(
                "Stuck now",
                "Engines whose ranks wait for one another in a collective that one of them will not enter.",
                "short",
            ),
            Query(f"sum(stagewatch_engine_wedged{{{DEPLOYMENT}}}) or vector(0)"),
            ((None, GREEN), (1, RED)),
        )
    )
    made.with_panel(
        stat_panel(
            Text(
                "Engines watched",
                "Replicas of engines that are heard of, or fell silent in the last quarter of an hour. 0 with engines "
                "running: no sidecar reaches the collector.",
                "short",
            ),
            Query(f"count(stagewatch_steps_compared{{{DEPLOYMENT}}}) or vector(0)"),
            ((None, ORANGE), (1, BLUE)),
        )
    )
    made.with_panel(
        stat_panel(
            Text(
                "Ranks not watched",
                "Ranks whose probe does not record, or that were never heard of. Above 0: their engines are not "
                "compared.",
                "short",
            ),
            Query(
                f"(count(stagewatch_rank_armed{{{DEPLOYMENT}}} == 0) or vector(0)) "
                f"+ (sum(stagewatch_ranks_missing{{{DEPLOYMENT}}}) or vector(0))"
            ),
            ((None, GREEN), (1, ORANGE)),
        )
    )
    made.with_panel(
        stat_panel(
            Text(
                "Rows compared",
                "Batch rows per second that got a verdict, all engines together. 0 with requests running: nobody "
                "looks.",
                "rowsps",
            ),
            Query(f"sum({rate(f'stagewatch_rows_compared_total{{{DEPLOYMENT}}}')}) or vector(0)"),
            ((None, BLUE),),
        )
    )
    made.with_panel(
        stat_panel(
            Text(
                "Detection, 99th percentile",
                "Time from the first bad step to its alarm, over all incidents since the collector started. No value: "
                "there was none.",
                "s",
            ),
            Query(
                "histogram_quantile(0.99, sum by (le) "
                f"(stagewatch_detection_latency_seconds_bucket{{{DEPLOYMENT}}}) > 0)"
            ),
            ((None, GREEN), (1, ORANGE), (5, RED)),
        )
    )


def _table(made: build.Dashboard) -> None:
    def moment(which: str) -> Query:
        return Query(
            f"max by ({_TROUBLE}) (stagewatch_trouble_{which}_timestamp_seconds{{{DEPLOYMENT}}}) * 1000"
        )

    panel = joined_table(
        Text(
            "What went wrong, since when, which stage",
            "One line for each engine, check, severity and stage blamed; `undecided` where the evidence blames nobody. "
            "While `last seen` keeps up with the clock it is still going on. Empty: nothing ever did.",
            "dateTimeFromNow",
        ),
        (moment("first"), moment("last")),
        {"Value #A": "since", "Value #B": "last seen", "engine": "engine", "dp": "replica"},
        ("Time", "Time 1", "Time 2"),
    ).no_value("nothing ever went wrong")
    panel.data_links(
        [
            link("Its live page", "${collector}/#/engine/${__data.fields.engine}/${__data.fields.replica}"),
            link(
                "Its incidents",
                "${collector}/v1/incidents?instance=${__data.fields.engine}&check=${__data.fields.check}",
            ),
        ]
    )
    made.with_panel(panel)
    made.with_panel(
        timeline(
            Text(
                "Every engine over time",
                "Red while ranks of an engine disagree, orange while the state of a request is about to be wrong.",
                "short",
            ),
            Query(
                state("deployment, engine, dp", DEPLOYMENT, "stagewatch_steps_compared"),
                "{{engine}} / {{dp}}",
            ),
            STATES,
        ).data_links([engine_link(), page_link()])
    )


def _graphs(made: build.Dashboard) -> None:
    diverged = f'stagewatch_rows_compared_total{{verdict="diverged", {DEPLOYMENT}}}'
    made.with_panel(
        graph(
            Text(
                "Rows diverged",
                "Batch rows per second in which ranks held or fed different values: how many answers are affected.",
                "rowsps",
            ),
            [Query(f"sum by (deployment, engine, dp) ({rate(diverged)})", "{{engine}} / {{dp}}")],
        ).data_links([engine_link(), page_link(), incidents_link()])
    )
    made.with_panel(
        graph(
            Text(
                "Incidents",
                "New incidents by check and severity. Many at once of one check have one cause.",
                "short",
            ),
            [
                Query(
                    "sum by (check, severity) (increase(stagewatch_incidents_total"
                    f"{{{DEPLOYMENT}}}[$__rate_interval])) > 0",
                    "{{severity}} {{check}}",
                )
            ],
            stacked=True,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Furthest rank behind",
                "Steps by which each engine's slowest rank is behind its foremost. Stages of a pipeline are apart by a "
                "few; what grows is a rank that hangs, or a sidecar that cannot follow.",
                "short",
            ),
            [
                Query(
                    f"max by (deployment, engine, dp) (stagewatch_rank_steps_behind{{{DEPLOYMENT}}})",
                    "{{engine}} / {{dp}}",
                )
            ],
        ).data_links([engine_link(), page_link()])
    )
    made.with_panel(
        graph(
            Text(
                "Time to detection",
                "From the first bad step to its alarm. The dots are incidents: each leads to its trace.",
                "s",
            ),
            [
                Query(
                    f"histogram_quantile({quantile}, sum by (le) "
                    f"(stagewatch_detection_latency_seconds_bucket{{{DEPLOYMENT}}}) > 0)",
                    name,
                    exemplars=True,
                )
                for quantile, name in ((0.5, "median"), (0.99, "99th percentile"))
            ],
        )
    )
