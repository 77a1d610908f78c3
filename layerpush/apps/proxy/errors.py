"""Errors in the format of the OpenAI API, which is also vLLM's."""

from __future__ import annotations

from http import HTTPStatus

from layerpush.core.wire import one_line

MESSAGE_CHARS = 500


class ProxyError(Exception):
    """The proxy itself refuses a request or gives it up. ``status`` is the client's HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}


def shortened(text: str | bytes) -> str:
    """Text of unknown origin, on one line and cut, so that it is safe to log."""
    if isinstance(text, bytes):
        text = text[: 4 * MESSAGE_CHARS].decode(errors="replace")
    return one_line(" ".join(text.split()), MESSAGE_CHARS) or "nothing"


def error_object(status: int, message: str) -> dict[str, object]:
    """An error of the OpenAI API, as JSON has it."""
    kind = HTTPStatus(status).phrase.replace(" ", "")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
