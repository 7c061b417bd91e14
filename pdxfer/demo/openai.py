"""The OpenAI shapes of chat completions: requests as they come in, chunks and errors as they go out.

Owns: parsing and building JSON. Must not: know workers or HTTP.

The model answers greedily. A request that asks for something else by a field that would change the answer is refused by
that field's name; ``temperature`` left out means 0 here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .ends import Failure

DEFAULT_MAX_TOKENS: Final = 128
# Fields that would change the answer, with the values that change nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (0, None),
    "top_p": (1, None),
    "n": (1, None),
    "stop": (None, [], ""),
    "logprobs": (False, None),
    "top_logprobs": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": (None, {}),
    "audio": (None,),
    "modalities": (None, ["text"]),
}
ROLES: Final = ("system", "developer", "user", "assistant")


class Chat(msgspec.Struct, frozen=True):
    """A request that was understood."""

    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    stream: bool
    include_usage: bool


def parse(raw: bytes) -> Chat:
    """Raises Failure: bad_request or unsupported, with the field's name."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Failure("bad_request", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Failure("bad_request", f"the body is {type(body).__name__}, expected an object")
    for field, neutral in NEUTRAL.items():
        if field in body and body[field] not in neutral:
            raise Failure(
                "unsupported",
                f"{field} is {str(body[field])[:100]!r}, but this service answers greedily; leave {field} out",
            )
    model = body.get("model")
    if not isinstance(model, str):
        raise Failure("bad_request", "model is missing, expected a name from /v1/models")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is None:
        limit = DEFAULT_MAX_TOKENS
    if type(limit) is not int or limit < 1:
        raise Failure("bad_request", f"max_tokens is {limit!r}, expected a whole number of at least 1")
    stream = body.get("stream") or False
    options = body.get("stream_options") or {}
    if type(stream) is not bool or not isinstance(options, dict):
        raise Failure("bad_request", "stream must be true or false, and stream_options an object")
    return Chat(model, _messages(body.get("messages")), limit, stream, bool(options.get("include_usage")))


def _messages(found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list) or not found:
        raise Failure("bad_request", "messages is missing or empty, expected a list of {role, content}")
    out = []
    for i, message in enumerate(found):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Failure("bad_request", f"messages[{i}].role must be one of {', '.join(ROLES)}")
        role = "system" if message["role"] == "developer" else message["role"]
        out.append({"role": role, "content": _content(message.get("content"), i)})
    return out


def _content(found: Any, i: int) -> str:
    if isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in found):
        texts = [part.get("text") for part in found]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise Failure("bad_request", f"messages[{i}].content must be a string or a list of text parts")


class Shapes:
    """The chunks of one answer."""

    def __init__(self, room: str, model: str) -> None:
        self.room = room
        self.model = model
        self._created = int(time.time())

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.room}", "object": kind, "created": self._created, "model": self.model}

    def chunk(
        self,
        delta: Mapping[str, Any],
        extension: Mapping[str, Any],
        finish: str | None = None,
        usage: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        found = self._frame("chat.completion.chunk") | {"choices": [choice], "pdxfer": extension}
        return found if usage is None else found | {"usage": usage}

    def usage_chunk(self, usage: Mapping[str, int]) -> dict[str, Any]:
        return self._frame("chat.completion.chunk") | {"choices": [], "usage": usage}

    def whole(self, text: str, finish: str, usage: Mapping[str, int], extension: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._frame("chat.completion") | {"choices": [choice], "usage": usage, "pdxfer": extension}


def error_body(failure: Failure, room: str = "") -> dict[str, Any]:
    """An OpenAI error object; what pdxfer knows besides stands beside OpenAI's fields."""
    kind = "invalid_request_error" if failure.status in (400, 404) else "server_error"
    return {
        "error": {
            "message": str(failure), "type": kind, "param": None, "code": failure.reason, "state": failure.state,
            "retriable": failure.retriable, "room": room,
        }
    }  # fmt: skip


def sse(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
