"""The API against its own document, with requests made up by schemathesis: nothing undocumented, no server error."""

from typing import Any

import httpx
import pytest
import schemathesis
from house import House
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service_processes import CollectorProcess, wait_until
from service_records import append_steps, identity

from stagewatch.agents.ring import RingWriter
from stagewatch.monitor.headers import SECURITY_HEADERS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
EXPECTED_503 = ("/readyz", "/v1/engines/{instance}/healthz")
"""An engine that is stuck is no error of ours."""


def sent(client: httpx.Client, case: Any) -> httpx.Response:
    """The answer to a case, with the client's token and no other.

    Sent by us: other tools of the development environment replace what schemathesis would send it with.
    """
    given_to = case.as_transport_kwargs(base_url=str(client.base_url))
    return client.request(given_to["method"], given_to["url"], params=given_to.get("params"))


def with_an_incident(house: House) -> CollectorProcess:
    collector = house.collector()
    house.ring_dir.mkdir(mode=0o700)
    for stage in (0, 1):
        ring = RingWriter(house.ring_dir, identity(stage), 1 << 20)
        append_steps(ring, 10)
        append_steps(ring, 10, first_step=11, wrong_token=stage)
    house.ship(collector.url, collector.token)
    wait_until(lambda: collector.get("/v1/incidents")["incidents"], "an incident")
    return collector


@pytest.mark.slow
def test_every_answer_is_as_documented(house: House) -> None:
    collector = with_an_incident(house)
    document = collector.get("/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=collector.url)
    headers = {"Authorization": f"Bearer {collector.token}"}
    stranger = httpx.Client(base_url=collector.url)
    seen: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/events":  # has no end; tests of its own
            continue

        @settings(
            max_examples=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        @given(operation.as_strategy())
        def run(case: schemathesis.Case) -> None:
            answer = sent(collector.http, case)
            checks = [
                check for check in CHECKS if check is not not_a_server_error or case.path not in EXPECTED_503
            ]
            case.validate_response(answer, checks=checks, additional_checks=[], headers=headers)
            if "security" in document["paths"][case.path][case.method.lower()]:
                assert sent(stranger, case).status_code == 401, case.path
            for name in SECURITY_HEADERS:
                assert name.lower() in answer.headers, case.path
            seen.add(case.path)

        run()
    assert seen == document["paths"].keys() - {"/v1/events"}


def test_the_document_says_what_comes_of_having_no_token_or_asking_too_much(house: House) -> None:
    document = house.collector().get("/openapi.json")
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in ("/healthz", "/readyz")
            assert (operation.get("security") == [{"token": []}]) != is_open, path
            for status in ("401", "403", "429"):
                assert (status in operation["responses"]) != is_open, path
            if not is_open:
                assert "Retry-After" in operation["responses"]["429"]["headers"]
