"""Headers of every answer: what a browser may do with it, and that nobody keeps a copy.

The policy lets a page run its own scripts and styles from this origin and ask this origin for data, nothing
else: no inline script, no other origin, no frame around it.
"""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""A route may say something else of its own; these are for those that do not."""
_STARTS: Final = frozenset({"http.response.start", "websocket.http.response.start"})


def with_headers(send: Send) -> Send:
    """``send``, adding `SECURITY_HEADERS` to whatever answer begins."""

    async def sending(message: Message) -> None:
        if message["type"] in _STARTS:
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
