"""Grafana's HTTP API, as far as it is used: grafana-client's calls, with errors that say what to do."""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, TokenAuth
from niquests.exceptions import RequestException

from stagewatch.agents.errors import SettingsError, StagewatchError

TIMEOUT_S: Final = 15.0
_NEEDED: Final = "Permissions needed:"


class GrafanaError(StagewatchError):
    """Something that Grafana refused, or that could not be asked of it."""


class ConflictError(GrafanaError):
    """What is to be made is there already, or was changed meanwhile (HTTP 409 and 412)."""


def connect(url: str, token: str) -> GrafanaApi:
    """A client for the Grafana at ``url``. Raises SettingsError for what is no address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"--grafana-url {url!r} is no address: write https://HOST or https://HOST/PATH")
    if parts.username or parts.password or parts.query:
        raise SettingsError(
            "--grafana-url carries more than an address: give the token by --grafana-token-file"
        )
    path = parts.path.rstrip("/")
    plain = urlunsplit((parts.scheme, parts.netloc, f"{path}/" if path else "", "", ""))
    made: GrafanaApi = GrafanaApi.from_url(plain, TokenAuth(token), timeout=TIMEOUT_S)
    return made


def asked(call: Callable[[], Any], what: str, permission: str) -> Any:
    """The answer of ``call``. Raises GrafanaError; ``permission`` is what the call needs, as Grafana calls it."""
    try:
        return call()
    except GrafanaClientError as error:
        raise _told(error, what, permission) from None
    except GrafanaException as error:
        raise GrafanaError(f"{what}: Grafana failed: {one_line(error.message)}: try again") from None
    except (RequestException, OSError, ValueError) as error:
        # Also an answer that is no JSON: whatever answers there, it is no Grafana.
        raise GrafanaError(
            f"{what}: Grafana cannot be reached ({type(error).__name__}): look at --grafana-url"
        ) from None


def found(call: Callable[[], Any], what: str, permission: str) -> Any | None:
    """The same for what may not be there: None where Grafana says 404."""
    try:
        return call()
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise _told(error, what, permission) from None
    except (GrafanaException, RequestException, OSError, ValueError):
        return asked(call, what, permission)


def one_line(text: object) -> str:
    """Grafana's words in one line of bounded length."""
    return " ".join(str(text).split())[:300]


def _told(error: GrafanaClientError, what: str, permission: str) -> GrafanaError:
    response = error.response if isinstance(error.response, dict) else {}
    message = one_line(response.get("message", error.response or error.message))
    match error.status_code:
        case 401:
            return GrafanaError(f"{what}: Grafana does not know the token: make one for a service account")
        case 403:
            needed = message.split(_NEEDED, 1)[1].strip() if _NEEDED in message else permission
            return GrafanaError(
                f"{what}: the token may not: its service account needs the permission {needed}"
            )
        case 409 | 412:
            return ConflictError(f"{what}: there is one already, or it was changed meanwhile: {message}")
        case status:
            return GrafanaError(f"{what}: Grafana refuses it (HTTP {status}): {message}")
