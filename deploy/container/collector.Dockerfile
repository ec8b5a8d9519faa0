# The collector. Build it from the repository's root:
#   docker build -f deploy/container/collector.Dockerfile --build-arg VERSION=0.1.0 -t stagewatch-collector:0.1.0 .
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY agents ./agents
COPY monitor ./monitor
COPY dashboards ./dashboards
RUN python -m venv /opt/stagewatch \
    && /opt/stagewatch/bin/pip install --no-cache-dir '.[monitor,otlp,grafana]'
# The label below must not say what the package does not.
ARG VERSION=0.1.0
RUN test "$(/opt/stagewatch/bin/stagewatch --version)" = "stagewatch ${VERSION}"

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stagewatch collector" \
      org.opencontainers.image.description="Says when the ranks of a pipeline-parallel LLM engine no longer agree about a request" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/stagewatch
COPY --from=build /opt/stagewatch /opt/stagewatch
# All that is written goes to the data directory, so the root file system can be read-only.
ENV PATH=/opt/stagewatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    STAGEWATCH_HOST=0.0.0.0 \
    STAGEWATCH_PORT=8765 \
    STAGEWATCH_DATA_DIR=/var/lib/stagewatch
USER 10001:10001
VOLUME ["/var/lib/stagewatch"]
EXPOSE 8765
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as u; u.urlopen('http' + 's' * ('STAGEWATCH_TLS_CERT' in os.environ) + '://127.0.0.1:' + os.environ['STAGEWATCH_PORT'] + '/healthz', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["stagewatch"]
CMD ["collect"]
