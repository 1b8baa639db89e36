"""Errors in the shapes of the served APIs."""

import msgspec


class ApiError(Exception):
    """An error as vLLM words it; each API has a shape of its own for it."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The response's JSON in OpenAI's shape."""
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": detail})

    def messages_body(self) -> bytes:
        """The response's JSON in Anthropic's shape."""
        return msgspec.json.encode({"type": "error", "error": {"type": self.kind, "message": str(self)}})
