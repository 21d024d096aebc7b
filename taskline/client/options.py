"""How a client reaches the API: where, with which key, how patiently."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from taskline import __version__
from taskline.client.asking import Patience
from taskline.errors import InvalidOption, InvalidSettings
from taskline.infra.backoff import pauses

URL_VARIABLE = "TASKLINE_API_URL"
KEY_VARIABLE = "TASKLINE_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8080"
# Longer than the API's own time for a request's body and for Kafka together (twice api.request_timeout_seconds), so that it is the API that
# says what happened, and not a connection that was given up.
_TIMEOUT_SECONDS = 35.0
_CONNECT_SECONDS = 5.0
# Outlasts a restart of the API, not an outage.
_RETRY_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_MAX_CONNECTIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """What a client needs to know.

    Raises:
        InvalidOption: a value that can't be.
    """

    # With the path before `/tasks`, if a proxy adds one.
    url: str = DEFAULT_URL
    # tk_…; None: the API runs without keys.
    key: str | None = field(default=None, repr=False)
    # How long one request may take, and how long a connection may take to be made.
    timeout_seconds: float = _TIMEOUT_SECONDS
    connect_seconds: float = _CONNECT_SECONDS
    # How long a call is tried again, from its first request on; 0: never.
    retry_seconds: float = _RETRY_SECONDS
    # Give submissions an idempotency key of their own, so that they can be tried again after a lost answer.
    safe_retries: bool = True
    max_connections: int = _MAX_CONNECTIONS

    def __post_init__(self) -> None:
        """Check it."""
        if not self.url.startswith(("http://", "https://")):
            raise InvalidOption("url", f"{self.url!r} is no http:// or https:// address")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise InvalidOption("key", "no API key looks like this")
        for name in ("timeout_seconds", "connect_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidOption(name, "a time from above 0 s")
        if not 0 <= self.retry_seconds < math.inf:
            raise InvalidOption("retry_seconds", "a time from 0 s")
        if self.max_connections < 1:
            raise InvalidOption("max_connections", "at least 1")

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        common = {"accept": "application/json", "user-agent": f"taskline-client/{__version__}"}
        if self.key is not None:
            common["authorization"] = f"Bearer {self.key.strip()}"
        return common

    def patience(self) -> Patience:
        """The machine's clock and chance."""
        return Patience(
            budget_seconds=self.retry_seconds,
            now=time.monotonic,
            pauses=partial(pauses, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
            chance=random.random,
        )


def where(environ: Mapping[str, str] | None = None) -> tuple[str, str | None]:
    """URL and key from `TASKLINE_API_URL` (default: a local API) and `TASKLINE_API_KEY`.

    Args:
        environ: the environment; the process's own when None.

    Raises:
        InvalidSettings: a variable is set to what can't be.
    """
    given = os.environ if environ is None else environ
    url, key = given.get(URL_VARIABLE) or DEFAULT_URL, given.get(KEY_VARIABLE) or None
    try:
        ClientOptions(url=url, key=key)
    except InvalidOption as error:
        raise InvalidSettings(
            f"{URL_VARIABLE if error.option == 'url' else KEY_VARIABLE}: {error.reason}"
        ) from error
    return url, key
