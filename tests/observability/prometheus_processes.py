"""Debian's Prometheus and Alertmanager on loopback, a webhook for alerts, and a stand-in for vLLM's metrics."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml
from service_processes import Process, wait_until

ABSENT = next(
    (
        f"{name} is not installed: make setup-observability"
        for name in ("prometheus", "prometheus-alertmanager", "promtool")
        if shutil.which(name) is None
    ),
    "",
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Served:
    """A small HTTP server on a thread."""

    def __init__(self, answer: Callable[[str, bytes], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                text = answer(self.path, body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = _answer  # noqa: N815  # the library's names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Webhook(Served):
    """Where Alertmanager sends what fires and what is resolved."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        """(alert, engine, status) of every alert in every notification."""
        super().__init__(self._take)

    def _take(self, path: str, body: bytes) -> str:
        for alert in json.loads(body)["alerts"]:
            labels = alert["labels"]
            self.told.append((labels["alertname"], labels.get("engine", ""), alert["status"]))
        return ""

    def count(self, alert: str, status: str, engine: str = "") -> int:
        return sum(told[0] == alert and told[2] == status and engine in ("", told[1]) for told in self.told)


def vllm_metrics(path: str, body: bytes) -> str:
    """What vLLM's own exporter says, as far as the dashboards ask for it; the counters grow with time."""
    count = int(time.monotonic() * 10)
    counters = (
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
    )
    lines = [f'vllm:{name}{{model_name="m",engine="0"}} {count}' for name in counters]
    gauges = ("num_requests_running", "num_requests_waiting")
    return "\n".join([*lines, *(f'vllm:{name}{{model_name="m",engine="0"}} 3' for name in gauges), ""])


class Alertmanager(Process):
    def __init__(self, directory: Path, webhook: Webhook) -> None:
        self.port = free_port()
        config = directory / "alertmanager.yml"
        route = {
            "receiver": "test",
            "group_by": ["alertname", "deployment", "engine"],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        }
        hook = {"url": f"http://127.0.0.1:{webhook.port}/", "send_resolved": True}
        receivers = [{"name": "test", "webhook_configs": [hook]}]
        config.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        super().__init__(
            [
                "prometheus-alertmanager",
                f"--config.file={config}",
                f"--storage.path={directory / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
            ],
            directory / "alertmanager.log",
        )
        url = f"http://127.0.0.1:{self.port}/-/ready"
        wait_until(lambda: httpx.get(url).status_code == 200, "Alertmanager is ready")


class Prometheus(Process):
    """Scrapes ``targets``, job -> (port, token file or None), each second."""

    def __init__(
        self,
        directory: Path,
        rules: Path,
        alertmanager: Alertmanager,
        targets: dict[str, tuple[int, Path | None]],
    ) -> None:
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")
        config = directory / "prometheus.yml"
        jobs = []
        for job, (port, token) in targets.items():
            made: dict[str, Any] = {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
            }
            if token is not None:
                made["authorization"] = {"type": "Bearer", "credentials_file": str(token)}
            jobs.append(made)
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(rules)],
                    "scrape_configs": jobs,
                    "alerting": {
                        "alertmanagers": [
                            {"static_configs": [{"targets": [f"127.0.0.1:{alertmanager.port}"]}]}
                        ]
                    },
                }
            )
        )
        super().__init__(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--enable-feature=exemplar-storage",
            ],
            directory / "prometheus.log",
        )
        wait_until(lambda: self.http.get("/-/ready").status_code == 200, "Prometheus is ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; fails with Prometheus's own words."""
        answer = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def alerts(self) -> list[str]:
        """What fires."""
        found = self.http.get("/api/v1/alerts").json()["data"]["alerts"]
        return sorted(alert["labels"]["alertname"] for alert in found if alert["state"] == "firing")

    def evaluated(self, rounds: int) -> None:
        """Wait until the rules were evaluated ``rounds`` times more."""

        def last() -> Any:
            groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
            return groups[0]["lastEvaluation"]

        for _ in range(rounds):
            before = last()
            wait_until(lambda before=before: last() != before, "the rules are evaluated")
