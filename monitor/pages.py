"""The page, and the pictures it draws: files that are the same for everybody, and one route of data.

The page itself tells nothing, so it needs no token; what it asks for does.
"""

from importlib.resources import files
from typing import Annotated, Final

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response

from stagewatch.monitor.access import answer, error, grant_of, may_see
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.openapi import documented, failing
from stagewatch.monitor.picture import STEPS_KEPT
from stagewatch.monitor.showing import Showing, showing

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PICTURE_SCHEMAS: Final = (Showing,)


def page_files() -> dict[str, tuple[bytes, str]]:
    """Every file of the page by name: its bytes and media type."""
    folder = files("stagewatch.monitor") / "web"
    found = {}
    for entry in folder.iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in TYPES:
            found[entry.name] = (entry.read_bytes(), TYPES[suffix])
    return found


def add_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its parts below ``/page/``."""
    parts = page_files()
    index, index_type = parts.pop("index.html")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(index, media_type=index_type)

    @app.head("/page/{name}", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        # A name is looked up, never opened: nothing but what was read at the start can be asked for.
        found = parts.get(name)
        if found is None:
            return error(404, "the page has no such part")
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "no-cache"})


def add_pictures(app: FastAPI, collector: Collector) -> None:
    """Serve what engines' newest steps looked like."""

    @app.get("/v1/engines/{instance}/picture", responses=documented(Showing) | failing(404))
    async def picture(
        request: Request,
        instance: Annotated[str, Path(max_length=128)],
        dp: Annotated[int, Query(ge=0, le=4096)] = 0,
        after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        steps: Annotated[int, Query(ge=1, le=2 * STEPS_KEPT)] = STEPS_KEPT,
        batches: bool = False,
    ) -> Response:
        """The newest `steps` steps of a replica that changed after revision `after`; with `batches` every row."""
        engine = collector.engine(instance, dp)
        if engine is None or not may_see(grant_of(request), engine.group.deployment):
            return error(404, "there is no such engine")
        return answer(showing(engine.picture.view(after, steps), engine.name_of, batches=batches))
