"""Schemas of the custom resources used, as far as they are used: an unknown field fails.

From the public references: LeaderWorkerSet v1, api/leaderworkerset/v1/leaderworkerset_types.go of
kubernetes-sigs/lws; ServiceMonitor and PrometheusRule v1, the API reference of prometheus-operator.
"""

from typing import Any

Schema = dict[str, Any]


def closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA = closed(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
SELECTOR = closed(matchLabels=TEXTS)
POD_TEMPLATE = closed(("spec",), metadata=closed(labels=TEXTS, annotations=TEXTS), spec={"type": "object"})


def resource(api_version: str, spec: Schema) -> Schema:
    return closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind=TEXT,
        metadata=METADATA,
        spec=spec,
    )


SCHEMAS: dict[str, Schema] = {
    "LeaderWorkerSet": resource(
        "leaderworkerset.x-k8s.io/v1",
        closed(
            ("leaderWorkerTemplate",),
            replicas=COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            leaderWorkerTemplate=closed(
                ("workerTemplate",),
                leaderTemplate=POD_TEMPLATE,
                workerTemplate=POD_TEMPLATE,
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            ),
        ),
    ),
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1",
        closed(
            ("endpoints", "selector"),
            selector=SELECTOR,
            endpoints={
                "type": "array",
                "minItems": 1,
                "items": closed(
                    port=TEXT,
                    path=TEXT,
                    interval=DURATION,
                    scheme={"enum": ["http", "https"]},
                    tlsConfig=closed(
                        serverName=TEXT, ca=closed(secret=closed(("key",), name=TEXT, key=TEXT))
                    ),
                    authorization=closed(type=TEXT, credentials=closed(("key",), name=TEXT, key=TEXT)),
                ),
            },
        ),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1",
        closed(
            groups={
                "type": "array",
                "items": closed(
                    ("name",),
                    name={"type": "string", "minLength": 1},
                    interval=DURATION,
                    rules={
                        "type": "array",
                        "items": closed(
                            ("expr",),
                            alert=TEXT,
                            record=TEXT,
                            expr={"type": ["string", "integer"]},
                            **{"for": DURATION},
                            keep_firing_for={**DURATION, "minLength": 1},
                            labels=TEXTS,
                            annotations=TEXTS,
                        ),
                    },
                ),
            },
        ),
    ),
}
