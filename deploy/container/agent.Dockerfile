# The sidecar, and the plugin that its init container hands to the engine. Build it from the repository's root:
#   docker build -f deploy/container/agent.Dockerfile --build-arg VERSION=0.1.0 -t stagewatch-agent:0.1.0 .
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY agents ./agents
COPY monitor ./monitor
COPY dashboards ./dashboards
RUN python -m venv /opt/stagewatch \
    && /opt/stagewatch/bin/pip install --no-cache-dir '.[sidecar]'
# What the engine imports, by PYTHONPATH: only our own files, because it brings numpy and msgspec itself.
RUN /opt/stagewatch/bin/pip install --no-cache-dir --no-compile --no-deps --target /opt/stagewatch-plugin .
# The label below must not say what the package does not.
ARG VERSION=0.1.0
RUN test "$(/opt/stagewatch/bin/stagewatch-agent --version)" = "stagewatch-agent ${VERSION}"

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stagewatch sidecar" \
      org.opencontainers.image.description="Ships what the ranks of an LLM engine recorded to the stagewatch collector" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/stagewatch /opt/stagewatch
COPY --from=build /opt/stagewatch-plugin /opt/stagewatch-plugin
# A volume mounted at /plugin becomes the user's who copies the plugin there.
RUN install -d -o 2000 -g 0 /plugin
# /run/stagewatch is the memory shared with the engine; it must be mounted, and is the only place written to.
ENV PATH=/opt/stagewatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    STAGEWATCH_RING_DIR=/run/stagewatch/rings \
    STAGEWATCH_HEALTH_FILE=/run/stagewatch/sidecar.alive
# Rings are for their own user only, so this is the engine's: vLLM's images have 2000 for those who do not run as root.
USER 2000:2000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 CMD ["stagewatch-agent", "health"]
ENTRYPOINT ["stagewatch-agent"]
CMD ["keep"]
