"""The evidence of an incident over the API, for bundles: a slice of the journal, read beside the collector's work.

It is read by a thread, at most `AT_ONCE` at a time, into a file without a name: a slow reader keeps nobody waiting.
Token values are prompts and answers, and are for tokens of scope admin; the rest tells of each step what an incident
tells of one, and is for whoever may see the incident.
"""

import asyncio
import logging
import tempfile
from pathlib import Path as FilePath
from typing import IO, Annotated, Final

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stagewatch.agents.errors import StagewatchError
from stagewatch.monitor.access import INCIDENT_ID, error, grant_of, too_many
from stagewatch.monitor.bundlefile import EVIDENCE_BYTES_MAX
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.journal import segments_in
from stagewatch.monitor.openapi import failing, text_of
from stagewatch.monitor.pieces import STEP_MAX
from stagewatch.monitor.slicing import CUT, RAW_LEFT_OUT, Found, Wanted, sliced
from stagewatch.monitor.tokens import Scope as TokenScope

log = logging.getLogger("stagewatch.collector")

AT_ONCE: Final = 2
_PIECE_BYTES: Final = 1 << 18


class _TooLongError(StagewatchError):
    """More evidence than a bundle holds."""


def add_evidence(app: FastAPI, collector: Collector) -> None:
    """The route that bundles are made from."""
    free = asyncio.Semaphore(AT_ONCE)

    @app.get(
        "/v1/incidents/{incident_id}/evidence",
        response_class=StreamingResponse,
        responses=text_of("application/octet-stream") | failing(403, 404, 413, 429, 503),
    )
    async def evidence(
        request: Request,
        incident_id: Annotated[str, Path(pattern=INCIDENT_ID)],
        first: Annotated[int, Query(ge=0, le=STEP_MAX)] = 0,
        last: Annotated[int, Query(ge=0, le=STEP_MAX)] = STEP_MAX,
        raw: Annotated[bool, Query()] = False,
    ) -> Response:
        """What the journal holds of the incident's engine from step `first` to `last`, as one segment of a journal.

        With `raw`, for tokens of scope admin, token values too, where sidecars sent them.
        """
        grant = grant_of(request)
        shown = await asyncio.to_thread(
            collector.store.get, incident_id, grant.deployments if grant else None
        )
        if shown is None:
            return error(404, "there is no such incident")
        if raw and (grant is None or TokenScope.ADMIN not in grant.scopes):
            collector.metrics.count("stagewatch.ingest.refused", reason="forbidden")
            return error(403, "token values are for tokens of scope admin")
        if free.locked():
            return too_many("other evidence is being read: try again", 5)
        await free.acquire()
        found = Found()
        wanted = Wanted(shown.deployment, shown.instance, (first, last), raw)
        try:
            file = await asyncio.to_thread(_spooled, collector.settings.data_dir, wanted, found)
        except BaseException as failure:
            free.release()
            if isinstance(failure, _TooLongError):
                return error(413, str(failure))
            if not isinstance(failure, OSError | StagewatchError):
                raise
            log.warning("evidence of %s cannot be read: %s", incident_id, failure)
            return error(503, "the journal cannot be read at present", {"Retry-After": "5"})
        headers = {CUT: str(int(found.cut)), RAW_LEFT_OUT: str(int(found.raw_left_out))}
        return _Spooled(file, free, headers)


class _Spooled(StreamingResponse):
    """A file as an answer; what it holds is let go of however the answer ends."""

    def __init__(self, file: IO[bytes], free: asyncio.Semaphore, headers: dict[str, str]) -> None:
        pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
        super().__init__(pieces, media_type="application/octet-stream", headers=headers)
        self._file = file
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()
            self._free.release()


def _spooled(data_dir: FilePath, wanted: Wanted, found: Found) -> IO[bytes]:
    """The slice in a file without a name, at its beginning. Raises _TooLongError."""
    file: IO[bytes] = tempfile.TemporaryFile(dir=data_dir)  # noqa: SIM115  # the answer's to close
    try:
        for piece in sliced(segments_in(data_dir / "journal"), wanted, found):
            if file.tell() + len(piece) > EVIDENCE_BYTES_MAX:
                raise _TooLongError(f"the evidence exceeds {EVIDENCE_BYTES_MAX} bytes: ask for fewer steps")
            file.write(piece)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
