"""How a payload is refused: a reason in words, and the path to the field, collected on the way out."""

from __future__ import annotations

from typing import Any

# What JSON calls the Python types that it knows.
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    tuple: "an array",
    dict: "an object",
}


class Refused(Exception):
    """A value is not what its place needs.

    Each container that the exception passes appends its own key or index to `path`, so that the path costs nothing
    while values are right.
    """

    def __init__(self, reason: str) -> None:
        """Say what is wrong, in words that can follow the field's name."""
        self.reason = reason
        self.path: list[str | int] = []
        super().__init__(reason)

    @property
    def pointer(self) -> str:
        """The place as a JSON pointer (RFC 6901); "" is the whole payload."""
        return "".join(
            "/" + str(token).replace("~", "~0").replace("/", "~1") for token in reversed(self.path)
        )

    def under(self, token: str | int) -> Refused:
        """Note that the refused value stands under `token`."""
        self.path.append(token)
        return self


def kind_of(value: Any) -> str:  # noqa: ANN401 - any value at all
    """A value's kind in the words of JSON, or its class."""
    return _KINDS.get(type(value)) or f"a {type(value).__name__}"


def mismatch(value: Any, wanted: str) -> Refused:  # noqa: ANN401 - any value at all
    """The refusal of a value of the wrong kind."""
    return Refused(f"{kind_of(value)} where {wanted} belongs")
