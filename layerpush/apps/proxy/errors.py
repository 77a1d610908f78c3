"""Errors in the format of the OpenAI API, which is also vLLM's."""

from __future__ import annotations

import contextlib
import json
from http import HTTPStatus

from layerpush.core.wire import one_line

MESSAGE_CHARS = 500


class ProxyError(Exception):
    """The proxy itself refuses a request or gives it up. ``status`` is the client's HTTP status."""

    def __init__(self, status: int, message: str, *, try_later: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {"Retry-After": "1"} if try_later or status == 429 else {}


def error_message(answer: bytes) -> str:
    """The error message of an engine's answer or event, shortened and on one line."""
    for text in (answer, *answer.split(b"data:", 1)[1:]):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return shortened(str(json.JSONDecoder().raw_decode(text.decode().lstrip())[0]["error"]["message"]))
    return shortened(answer[: 4 * MESSAGE_CHARS].decode(errors="replace")) or "nothing"


def shortened(text: str) -> str:
    """Text of unknown origin, on one line and cut, so that it is safe to log."""
    return one_line(" ".join(text.split()), MESSAGE_CHARS)


def error_body(status: int, message: str) -> bytes:
    """The JSON object of an error in the OpenAI API."""
    kind = "".join(word.capitalize() for word in HTTPStatus(status).name.split("_"))
    if not kind.endswith("Error"):
        kind += "Error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def error_event(status: int, message: str) -> bytes:
    """An error event and the end of the stream, in vLLM's format."""
    return b"data: " + error_body(status, message) + b"\n\ndata: [DONE]\n\n"
