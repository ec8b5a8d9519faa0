"""The OpenAPI document: what FastAPI cannot know of the collector's answers."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from stagewatch.monitor.access import OPEN_PATHS

_REFERENCE: Final = "#/components/schemas/{name}"
Responses = dict[int | str, dict[str, Any]]


def documented(struct: type[msgspec.Struct], listed_as: str = "") -> Responses:
    """An answer's schema; with ``listed_as``, an object whose member of this name lists such."""
    schema: dict[str, Any] = {"$ref": _REFERENCE.format(name=struct.__name__)}
    if listed_as:
        schema = {
            "type": "object",
            "properties": {listed_as: {"type": "array", "items": schema}},
            "required": [listed_as],
        }
    return {200: {"description": "OK", "content": {"application/json": {"schema": schema}}}}


def text_of(media_type: str) -> Responses:
    """An answer that is text."""
    return {200: {"description": "OK", "content": {media_type: {"schema": {"type": "string"}}}}}


def failing(*statuses: int) -> Responses:
    """Answers that say why in `detail`."""
    schema = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    content = {"application/json": {"schema": schema}}
    answers: Responses = {
        status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses
    }
    for status in {429, 503} & answers.keys():
        # An engine that is stuck is no more well in a second: there nobody is told to come back.
        answers[status]["headers"] = {
            "Retry-After": {"description": "Seconds, where it is known.", "schema": {"type": "string"}}
        }
    return answers


def complete(app: FastAPI, structs: Sequence[type[msgspec.Struct]]) -> None:
    """Add to the document: the structures of msgspec, that a token is needed, and what comes of having none."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            _, schemas = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if path not in OPEN_PATHS:
                        operation["security"] = [{"token": []}]
                        refusals = {str(status): answer for status, answer in failing(401, 403, 429).items()}
                        operation["responses"].update(refusals)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
