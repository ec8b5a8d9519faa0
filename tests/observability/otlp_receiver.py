"""An OTLP receiver in a process of its own: writes what it is sent, decoded, as JSON lines.

``python otlp_receiver.py PROTOCOL FILE [--hang] [--port N]`` prints its port. With ``--hang`` it never answers.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

REQUESTS = {
    "logs": (logs_service_pb2.ExportLogsServiceRequest, logs_service_pb2.ExportLogsServiceResponse),
    "metrics": (
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "traces": (trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse),
}


class Sink:
    def __init__(self, path: Path, hangs: bool) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()
        self._hangs = hangs

    def take(self, signal: str, message: Any, headers: dict[str, str]) -> Any:
        line = json.dumps({"signal": signal, "headers": headers, "body": MessageToDict(message)})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()
        if self._hangs:
            threading.Event().wait()
        return REQUESTS[signal][1]()


def serve_http(sink: Sink, port: int) -> tuple[int, Any]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the library's name
            signal = self.path.rsplit("/", 1)[1]
            assert self.headers["Content-Type"] == "application/x-protobuf"
            message = REQUESTS[signal][0]()
            message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            answer = sink.take(
                signal, message, {k.lower(): v for k, v in self.headers.items()}
            ).SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1], server


def serve_grpc(sink: Sink, port: int) -> tuple[int, Any]:
    def servicer(base: type, signal: str) -> Any:
        def export(self: Any, request: Any, context: Any) -> Any:
            return sink.take(
                signal, request, {key: str(value) for key, value in context.invocation_metadata()}
            )

        return type(signal, (base,), {"Export": export})()

    server = grpc.server(ThreadPoolExecutor(8))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(
        servicer(logs_service_pb2_grpc.LogsServiceServicer, "logs"), server
    )
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
        servicer(metrics_service_pb2_grpc.MetricsServiceServicer, "metrics"), server
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(
        servicer(trace_service_pb2_grpc.TraceServiceServicer, "traces"), server
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return port, server


def main() -> None:
    protocol, path, *options = sys.argv[1:]
    sink = Sink(Path(path), "--hang" in options)
    wanted = int(options[options.index("--port") + 1]) if "--port" in options else 0
    port, _server = (serve_grpc if protocol == "grpc" else serve_http)(sink, wanted)
    print(f"listening on {port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
