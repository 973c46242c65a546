"""Page: the web page at /, three files without any outside asset. They hold no data: the page asks the API for it."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

router = APIRouter(include_in_schema=False)

WEB = Path(__file__).resolve().parent.parent / "web"


@router.get("/")
async def index() -> FileResponse:
    return FileResponse(WEB / "index.html", media_type="text/html", headers={"Cache-Control": "no-cache"})


@router.get("/web/page.js")
async def script() -> FileResponse:
    return FileResponse(WEB / "page.js", media_type="text/javascript", headers={"Cache-Control": "no-cache"})


@router.get("/web/page.css")
async def style() -> FileResponse:
    return FileResponse(WEB / "page.css", media_type="text/css", headers={"Cache-Control": "no-cache"})


@router.get("/web/icon.svg")
@router.get("/favicon.ico")
async def icon() -> FileResponse:
    return FileResponse(WEB / "icon.svg", media_type="image/svg+xml", headers={"Cache-Control": "no-cache"})
