"""Where a producer finds task types: what the caller gives, else the log itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from taskline.settings import Settings

if TYPE_CHECKING:
    from taskline.schemas.types import TaskType


class TypeSource(Protocol):
    """A `TypeCatalogue`, a registry's catalogue, a `TypeDirectory`."""

    def get(self, name: str) -> TaskType:
        """The task type of this name.

        Raises:
            UnknownTaskType: there is none.
        """
        ...


class HasCatalogue(Protocol):
    """A registry of handlers, which knows its task types."""

    def catalogue(self) -> TypeSource:
        """Its task types."""
        ...


class TypesAtHand:
    """The caller's types; without them a `TypeDirectory`, started when it is first asked for.

    Starting one reads its topic to the end (and then follows it on a thread), which a producer that never submits, or that
    brings its types along, need not wait for.
    """

    def __init__(self, settings: Settings, types: TypeSource | HasCatalogue | None) -> None:
        """Use `types`, or (None) read from the log of `settings`."""
        self._settings = settings
        self._lock = threading.Lock()
        self._source: TypeSource | None = None if types is None else _as_source(types)
        self._directory: Any = None

    @property
    def ready(self) -> bool:
        """Whether `source` answers without waiting."""
        return self._source is not None

    def source(self) -> TypeSource:
        """The types. Blocks while a directory starts.

        Raises:
            Unavailable: the log does not answer.
        """
        if self._source is None:
            with self._lock:
                if self._source is None:
                    self._source = self._started()
        return self._source

    def close(self) -> None:
        """Stop following the log, if that was ever begun."""
        if self._directory is not None:
            self._directory.close()

    def _started(self) -> TypeSource:
        from taskline.infra.kafka.types import TypeDirectory  # noqa: PLC0415 - only who needs it pays for it

        directory = TypeDirectory(self._settings)
        try:
            directory.start()
        except BaseException:
            directory.close()
            raise
        self._directory = directory
        return directory


def _as_source(types: TypeSource | HasCatalogue) -> TypeSource:
    # A registry has a `get`, too, of handlers.
    if callable(getattr(types, "catalogue", None)):
        return types.catalogue()  # type: ignore[union-attr]  # a registry
    return types  # type: ignore[return-value]  # it has get
