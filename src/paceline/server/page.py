"""The page at `/`: fixed files that ask the API as any client does; holds no state."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["FILES", "page_routes"]

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "steps.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""All there is, by name, and what it is; `index.html` is `/`."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text can become markup nowhere, also where the scripts have a fault.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked about each time, so that a newer server's files are never mixed with older.
    "cache-control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    """Return a route for each file; the files are read here and once.

    Raises:
        FileNotFoundError: the package was installed without its files.
    """
    folder = files("paceline.server") / "static"
    return [_route(name, kind, (folder / name).read_bytes()) for name, kind in FILES.items()]


def _route(name: str, kind: str, body: bytes) -> Route:
    tag = f'"{sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def answer(request: Request) -> Response:
        asked = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in asked.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    path = "/" if name == "index.html" else f"/{name}"
    return Route(path, endpoint=answer, methods=["GET", "HEAD"])
