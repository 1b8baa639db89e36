"""Errors in the shape of the served APIs."""

import msgspec


class ApiError(Exception):
    """An error as vLLM words it."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The response's JSON."""
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": detail})
