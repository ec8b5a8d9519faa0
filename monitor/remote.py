"""A running collector, asked over its API for what goes into a bundle."""

import http.client
import re
import tempfile
from collections.abc import Iterator
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

import msgspec

from stagewatch.agents.errors import SettingsError, StagewatchError
from stagewatch.agents.shipping import is_exposed
from stagewatch.agents.tls import ClientTls, told
from stagewatch.monitor.bundlefile import EVIDENCE_BYTES_MAX, TEXT_BYTES_MAX, BundleError, path_of
from stagewatch.monitor.bundling import Origin, Told
from stagewatch.monitor.incidents import Report, Window
from stagewatch.monitor.slicing import CUT, RAW_LEFT_OUT, Found, Wanted, sliced

TIMEOUT_S: Final = 600.0
"""A collector may have gigabytes of journal to look through before it answers."""
_ID: Final = re.compile(r"[0-9a-f]{16}")


class _Shown(Report, frozen=True):
    """The part of the API's incident that a bundle needs."""

    windows: tuple[Window, ...] = ()


class _NowhereElse(HTTPRedirectHandler):
    """A token is for whom it was given for: nothing is asked of another address that an answer names."""

    def redirect_request(self, *args: Any, **keywords: Any) -> None:
        """Follow nothing; the answer is told as a refusal."""


class CollectorOrigin(Origin):
    """A collector at ``address``. Raises SettingsError for what is no address, or TLS files that are no good."""

    def __init__(self, address: str, token: str, tls: ClientTls) -> None:
        parts = urlsplit(address)
        schemes = {"ws": "http", "wss": "https", "http": "http", "https": "https"}
        if parts.scheme not in schemes or not parts.hostname:
            raise SettingsError(
                f"--collector {address!r} is no address: write http://HOST:PORT or https://HOST:PORT"
            )
        if parts.username or parts.query or parts.fragment:
            raise SettingsError("--collector carries more than an address: give the token by --token-file")
        self._base: Final = f"{schemes[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"
        self._token = token
        self.is_exposed: Final = is_exposed(self._base.replace("http", "ws", 1))
        """Whether the token and the evidence cross a network in clear."""
        handlers: list[Any] = [ProxyHandler({}), HTTPHandler(), _NowhereElse()]
        if self._base.startswith("https:"):
            handlers.append(HTTPSHandler(context=tls.context()))
        self._opener: OpenerDirector = build_opener(*handlers)

    def told(self, incident_id: str) -> Told:
        """The incident, as the collector keeps it."""
        if not _ID.fullmatch(incident_id):
            raise BundleError(
                f"{incident_id[:40]!a} is no incident's id: a collector wants all of its 16 digits"
            )
        with self._get(f"/v1/incidents/{incident_id}") as response:
            body = response.read(TEXT_BYTES_MAX)
        try:
            shown = msgspec.json.decode(body, type=_Shown)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise BundleError(
                f"{self._base}: its answer is no incident: is it a stagewatch collector?"
            ) from None
        lasting = Report(**{name: getattr(shown, name) for name in Report.__struct_fields__})
        return Told(lasting, shown.windows)

    def slice(self, wanted: Wanted, incident_id: str, found: Found) -> Iterator[bytes]:
        """What the collector's journal holds of it, judged like any stranger's."""
        query = urlencode({"first": wanted.steps[0], "last": wanted.steps[1], "raw": str(wanted.raw).lower()})
        with tempfile.TemporaryFile() as file:
            with self._get(f"/v1/incidents/{incident_id}/evidence?{query}") as response:
                _copy(response, file)
                found.cut = response.headers.get(CUT) == "1"
                found.raw_left_out = response.headers.get(RAW_LEFT_OUT) == "1"
            yield from sliced([path_of(file)], wanted, found)

    def _get(self, path: str) -> http.client.HTTPResponse:
        request = Request(self._base + path, headers={"Authorization": f"Bearer {self._token}"})  # noqa: S310  # http or https, see above
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            raise _refused(self._base, error) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = (told(reason) if isinstance(reason, BaseException) else "") or str(reason) or "no answer"
            raise BundleError(f"{self._base} cannot be asked: {why}") from None
        return answer


def _copy(response: http.client.HTTPResponse, file: IO[bytes]) -> None:
    try:
        while piece := response.read(1 << 20):
            if file.tell() + len(piece) > EVIDENCE_BYTES_MAX:
                raise BundleError("the collector sends more evidence than a bundle holds")
            file.write(piece)
    except (OSError, http.client.HTTPException) as error:
        raise BundleError(f"the collector's answer broke off: {str(error) or type(error).__name__}") from None
    file.flush()


def _refused(base: str, error: HTTPError) -> StagewatchError:
    with error:
        try:
            detail = msgspec.json.decode(error.read(4096), type=dict[str, Any]).get("detail", "")
        except (msgspec.MsgspecError, ValueError, RecursionError, OSError):
            detail = ""
    said = " ".join(ascii(str(detail))[1:201].split())
    match error.code:
        case 401:
            return BundleError(f"{base} does not know the token: compare --token-file with the collector's")
        case 404:
            return BundleError(f"{base} has no such incident, or the token is not good for its deployment")
        case code:
            return BundleError(f"{base} refuses (HTTP {code}){f': {said}' if said else ''}")
