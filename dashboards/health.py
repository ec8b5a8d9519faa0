"""Health: is stagewatch itself well."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as build

from stagewatch.dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Query,
    Text,
    board,
    graph,
    stat_panel,
)
from stagewatch.dashboards.states import rate

UID: Final = "stagewatch-health"


def health() -> build.Dashboard:
    """The dashboard for looking at stagewatch itself."""
    made = board(UID, "stagewatch: its own health", "Does the watcher see everything, and keep it?")
    _numbers(made)
    _intake(made)
    _journal(made)
    _losses(made)
    return made


def _numbers(made: build.Dashboard) -> None:
    for text, query, steps in (
        (
            Text("Collectors up", "Collectors that Prometheus reads. 0: nobody watches.", "short"),
            'sum(up{job="stagewatch"})',
            ((None, RED), (1, GREEN)),
        ),
        (
            Text("Sidecars", "Connected now; one a node.", "short"),
            "sum(stagewatch_ingest_sessions)",
            ((None, ORANGE), (1, BLUE)),
        ),
        (
            Text(
                "Journal",
                "1: it cannot be written, and nothing is acknowledged: the disk is full or broken.",
                "short",
            ),
            "max(stagewatch_journal_failing)",
            ((None, GREEN), (1, RED)),
        ),
        (
            Text(
                "Rings refused",
                "Files in ring directories that sidecars cannot read: ranks not watched.",
                "short",
            ),
            "sum(stagewatch_rings_refused)",
            ((None, GREEN), (1, ORANGE)),
        ),
        (
            Text("Engines without series", "Watched, but too many to have metrics of their own.", "short"),
            "sum(stagewatch_engines_hidden)",
            ((None, GREEN), (1, ORANGE)),
        ),
        (
            Text(
                "Errors of its own",
                "Since the collector started. Above 0: please report what its log says.",
                "short",
            ),
            "sum(stagewatch_internal_errors_total)",
            ((None, GREEN), (1, RED)),
        ),
    ):
        made.with_panel(stat_panel(text, Query(query), steps))


def _intake(made: build.Dashboard) -> None:
    made.with_panel(
        graph(
            Text("Rows taken", "Batch rows per second from all ranks: the load on the collector.", "rowsps"),
            [Query(f"sum({rate('stagewatch_ingest_rows_total')})", "rows")],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Bytes taken",
                "Per second, as frames; what the network carries and the journal writes.",
                "Bps",
            ),
            [Query(f"sum({rate('stagewatch_ingest_size_bytes_total')})", "bytes")],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Frames taken, and known already",
                "Per second. Many that are known already: sidecars connect again and again.",
                "short",
            ),
            [
                Query(f"sum({rate('stagewatch_ingest_frames_total')})", "taken"),
                Query(f"sum({rate('stagewatch_ingest_duplicates_total')})", "known already"),
            ],
            8,
        )
    )


def _journal(made: build.Dashboard) -> None:
    made.with_panel(
        graph(
            Text(
                "Journal on disk",
                "Bytes kept, and those pinned because incidents need them. The oldest go when --keep-bytes is reached.",
                "bytes",
            ),
            [
                Query("sum(stagewatch_journal_size_bytes)", "kept"),
                Query("sum(stagewatch_journal_pinned_bytes)", "pinned"),
                Query("sum(stagewatch_journal_damaged_bytes)", "damaged"),
            ],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Waiting for the disk",
                "Bytes taken and not yet durable. At --queue-bytes sidecars are made to wait.",
                "bytes",
            ),
            [Query("sum(stagewatch_journal_waiting_bytes)", "waiting")],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Time of a sync",
                "How long a group commit waits for the disk: every acknowledgement waits as long.",
                "s",
            ),
            [
                Query(
                    f"histogram_quantile({quantile}, sum by (le) ({rate('stagewatch_journal_sync_seconds_bucket')}))",
                    name,
                )
                for quantile, name in ((0.5, "median"), (0.99, "99th percentile"))
            ],
            8,
        )
    )


def _losses(made: build.Dashboard) -> None:
    made.with_panel(
        graph(
            Text(
                "Left out by stagewatch itself",
                "Per second, by place and reason: docs/metrics.md says what each means.",
                "short",
            ),
            [Query(f"sum by (place, reason) ({rate('stagewatch_drops_total')})", "{{place}}: {{reason}}")],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Evidence lost, all ranks",
                "Records per second that were never compared, by place and reason.",
                "short",
            ),
            [
                Query(
                    f"sum by (place, reason) ({rate('stagewatch_records_dropped_total')})",
                    "{{place}}: {{reason}}",
                )
            ],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Refused",
                "Frames and connections per second, by reason: a wrong token, another version, too many.",
                "short",
            ),
            [Query(f"sum by (reason) ({rate('stagewatch_ingest_refused_total')})", "{{reason}}")],
            8,
        )
    )
    made.with_panel(
        graph(
            Text("Readers of the event stream", "Who follows incidents as they come.", "short"),
            [Query("sum(stagewatch_events_readers)", "readers")],
        )
    )
    made.with_panel(
        graph(
            Text(
                "Time of a scrape",
                "How long Prometheus waits for the collector's metrics. It grows with the number of engines.",
                "s",
            ),
            [Query('max(scrape_duration_seconds{job="stagewatch"})', "scrape")],
        )
    )
