"""Engine: one replica, stage by stage and step by step, beside what the engine says of itself."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as build

from stagewatch.dashboards.panels import (
    ENGINE,
    Query,
    Text,
    board,
    graph,
    link,
    page_link,
    query_variable,
    timeline,
)
from stagewatch.dashboards.states import STATES, rate, share, state

UID: Final = "stagewatch-engine"
SELECTOR: Final = ENGINE
_RANK: Final = "stage, tp"
_RANK_NAME: Final = "stage {{stage}}, tp {{tp}}"
_VLLM: Final = 'model_name=~"$model"'


def engine() -> build.Dashboard:
    """The dashboard for looking at one engine."""
    made = board(
        UID, "stagewatch: engine", "One replica of an engine: where it diverged, what it costs, how it lags."
    )
    made.with_variable(query_variable("deployment", "Deployment", "stagewatch_steps_compared", many=True))
    source = 'stagewatch_steps_compared{deployment=~"$deployment"}'
    made.with_variable(query_variable("engine", "Engine", source, many=True))
    made.with_variable(
        query_variable("dp", "Replica", source.replace("}", ', engine=~"$engine"}'), many=True)
    )
    model = query_variable("model", "vLLM model", "vllm:num_requests_running", many=True)
    made.with_variable(model.query("label_values(vllm:num_requests_running, model_name)"))
    _agreement(made)
    _progress(made)
    _context(made)
    _costs(made)
    return made


def _agreement(made: build.Dashboard) -> None:
    made.with_panel(
        timeline(
            Text(
                "Stages over time",
                "Red while a stage is blamed for what differs, orange while it is about to. `undecided` is a lane of "
                "its own. The live page shows the same by step and by row.",
                "short",
            ),
            Query(state("engine, dp, stage", ENGINE, "stagewatch_rank_armed"), "stage {{stage}}"),
            STATES,
        ).data_links(
            [link("Ranks and steps", "${collector}/#/engine/${__field.labels.engine}/${__field.labels.dp}")]
        )
    )
    made.with_panel(
        graph(
            Text(
                "Rows by verdict",
                "Batch rows per second. Diverged rows are wrong, indeterminate ones could not be compared.",
                "rowsps",
            ),
            [
                Query(
                    f"sum by (verdict) ({rate(f'stagewatch_rows_compared_total{{{ENGINE}}}')})", "{{verdict}}"
                )
            ],
            stacked=True,
        ).data_links([page_link()])
    )
    made.with_panel(
        graph(
            Text(
                "Exclusions and harm",
                "Rows per second that the broadcast mask dropped although they may have sampled, and those of them "
                "whose request was found diverged afterwards. Anything here: the engine runs a faulty mask.",
                "rowsps",
            ),
            [
                Query(f"sum({rate(f'stagewatch_rows_excluded_total{{{ENGINE}}}')})", "excluded"),
                Query(f"sum({rate(f'stagewatch_rows_harmed_total{{{ENGINE}}}')})", "harmed"),
            ],
        )
    )


def _progress(made: build.Dashboard) -> None:
    made.with_panel(
        graph(
            Text(
                "Steps behind the foremost rank",
                "A rank that falls further and further behind hangs, or its sidecar cannot follow.",
                "short",
            ),
            [Query(f"max by ({_RANK}) (stagewatch_rank_steps_behind{{{ENGINE}}})", _RANK_NAME)],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Time since last heard",
                "A heartbeat comes each second. One rank above the others: its worker or its sidecar is stopped.",
                "s",
            ),
            [Query(f"max by ({_RANK}) (stagewatch_rank_heartbeat_age_seconds{{{ENGINE}}})", _RANK_NAME)],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Steps per second",
                "As each rank's probe counts them: how fast the engine goes.",
                "short",
            ),
            [Query(f"sum by ({_RANK}) ({rate(f'stagewatch_probe_steps_total{{{ENGINE}}}')})", _RANK_NAME)],
            8,
        )
    )


def _context(made: build.Dashboard) -> None:
    accepted, rejected = (f"stagewatch_drafts_{word}_total{{{ENGINE}}}" for word in ("accepted", "rejected"))
    vllm_accepted, vllm_drafted = (
        f"vllm:spec_decode_num_{word}_tokens_total{{{_VLLM}}}" for word in ("accepted", "draft")
    )
    diverged = f'stagewatch_rows_compared_total{{verdict="diverged", {ENGINE}}}'
    made.with_panel(
        graph(
            Text(
                "Divergence beside acceptance",
                "Share of rows diverged, and share of draft tokens accepted as the last stage and as vLLM counts them. "
                "Context, not evidence: acceptance may collapse without divergence and look normal with it.",
                "percentunit",
            ),
            [
                Query(share(diverged, f"stagewatch_rows_compared_total{{{ENGINE}}}"), "rows diverged"),
                Query(
                    f"sum({rate(accepted)}) / (sum({rate(accepted)}) + sum({rate(rejected)}) > 0)",
                    "drafts accepted",
                ),
                Query(share(vllm_accepted, vllm_drafted), "drafts accepted, by vLLM"),
            ],
        )
    )
    made.with_panel(
        graph(
            Text(
                "Repetition",
                "Share of sampled rows that repeat, token for token, what their request's last step yielded. Frozen "
                "state repeats itself, but so may a sound model.",
                "percentunit",
            ),
            [
                Query(
                    share(
                        f"stagewatch_rows_repeated_total{{{ENGINE}}}",
                        f"stagewatch_rows_sampled_total{{{ENGINE}}}",
                    ),
                    "rows that repeat",
                )
            ],
        )
    )
    made.with_panel(
        graph(
            Text(
                "Requests in vLLM",
                "Running and waiting, as vLLM says: what a restart would interrupt.",
                "short",
            ),
            [
                Query(f"sum(vllm:num_requests_running{{{_VLLM}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{_VLLM}}})", "waiting"),
            ],
        )
    )
    made.with_panel(
        graph(
            Text(
                "Tokens and preemptions in vLLM",
                "Generated tokens and preemptions per second, as vLLM says: preempted requests come back as another "
                "life.",
                "short",
            ),
            [
                Query(f"sum({rate(f'vllm:generation_tokens_total{{{_VLLM}}}')})", "tokens"),
                Query(f"sum({rate(f'vllm:num_preemptions_total{{{_VLLM}}}')})", "preemptions"),
            ],
        )
    )


def _costs(made: build.Dashboard) -> None:
    made.with_panel(
        graph(
            Text(
                "Broadcast size of a step",
                "Bytes that the last stage sends to the earlier ones, a step.",
                "bytes",
            ),
            [
                Query(
                    share(
                        f"stagewatch_broadcast_size_bytes_total{{{ENGINE}}}",
                        f"stagewatch_broadcast_steps_total{{{ENGINE}}}",
                    ),
                    "a step",
                )
            ],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "What the fixed mask costs",
                "Share of the rows broadcast that the faulty mask of vLLM 0.23 to 0.29 would have left out. 0 where "
                "the faulty mask runs.",
                "percentunit",
            ),
            [
                Query(
                    share(
                        f"stagewatch_broadcast_rows_fix_only_total{{{ENGINE}}}",
                        f"stagewatch_broadcast_rows_total{{{ENGINE}}}",
                    ),
                    "rows that only the fixed mask sends",
                )
            ],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "What the probe costs a step",
                "Host time spent in the probe and its hooks, per step: the mean, and the 99th percentile of recent "
                "steps.",
                "s",
            ),
            [
                Query(
                    share(
                        f"stagewatch_probe_time_seconds_total{{{ENGINE}}}",
                        f"stagewatch_probe_steps_total{{{ENGINE}}}",
                        _RANK,
                    ),
                    f"mean, {_RANK_NAME}",
                ),
                Query(
                    f"max by ({_RANK}) (stagewatch_probe_step_p99_seconds{{{ENGINE}}})", f"p99, {_RANK_NAME}"
                ),
            ],
            8,
        )
    )
    made.with_panel(
        graph(
            Text(
                "Ring margin",
                "Time until the ring's writer overtakes the sidecar at the present rate, and how far back a dump after "
                "an incident reaches. No value: nothing is written.",
                "s",
            ),
            [Query(f"min by ({_RANK}) (stagewatch_ring_margin_seconds{{{ENGINE}}})", _RANK_NAME)],
        )
    )
    made.with_panel(
        graph(
            Text(
                "Evidence lost",
                "Records per second that were never compared, by where they were lost: divergence in them is not seen.",
                "short",
            ),
            [
                Query(
                    f"sum by (place, reason) ({rate(f'stagewatch_records_dropped_total{{{ENGINE}}}')})",
                    "{{place}}: {{reason}}",
                )
            ],
        )
    )
