"""The Confluent wire format: a zero byte, the registry's 4-byte id of the writer's schema, the body.

Schemas are registered under their record's full name (the record-name strategy: `taskline.TaskSubmitted`) when a
process first writes that kind, and fetched when it first reads an id; both are remembered, so the registry is asked a few times in a
process's life. Those calls block for a moment. While the registry is away, what is remembered goes on working and
the rest raises `Unavailable`.

An id that the registry does not know was not written by a Taskline, which registers before it writes: such a record is undecodable, as garbage
is. Unless the registry does not know any of our schemas; then it is the wrong one or has lost its data, and nothing is thrown away.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastavro.types import Schema

from taskline.errors import InvalidSettings, TasklineError, Unavailable, UndecodableRecord, UnknownSchema
from taskline.schemas.codec import CONFLUENT_MAGIC, Codec
from taskline.schemas.contracts import NAMESPACE, Contract, contracts, load_contract
from taskline.settings import SchemaSettings

T = TypeVar("T")

_ID_BYTES = 4
_FRAME_BYTES = 1 + _ID_BYTES
# A healthy registry answers in milliseconds. Two more attempts cover a restart's first moment; callers retry beyond that.
_REQUEST_SECONDS = 5.0
_RETRIES = 2
_RETRY_WAIT_MS = 200
# How long an id that does not exist is not asked for again, and of how many that is remembered: a flood of garbage must
# not become a flood of requests.
_ABSENT_SECONDS = 30.0
_ABSENT_IDS = 1_024


class RegistryClient(Protocol):
    """What is used of `confluent_kafka.schema_registry.SchemaRegistryClient`."""

    def register_schema(self, subject_name: str, schema: Any) -> int:  # noqa: ANN401 - the library's Schema
        """Register, or find, a schema; its id."""
        ...

    def get_schema(self, schema_id: int) -> Any:  # noqa: ANN401 - the library's Schema
        """The schema of an id."""
        ...

    def get_subjects(self) -> list[str]:
        """Every subject."""
        ...


def codec_for(schemas: SchemaSettings) -> Codec:
    """The codec that the settings ask for. Nothing connects before a record is written or read.

    Raises:
        InvalidSettings: the registry's URL is none.
    """
    if schemas.registry_url is None:
        return Codec()
    from confluent_kafka.schema_registry import SchemaRegistryClient  # noqa: PLC0415 - brings an HTTP client along

    try:
        client = SchemaRegistryClient(
            {
                "url": schemas.registry_url,
                "timeout": _REQUEST_SECONDS,
                "max.retries": _RETRIES,
                "retries.wait.ms": _RETRY_WAIT_MS,
            }
        )
    except (ValueError, TypeError) as error:
        raise InvalidSettings(f"schemas.registry_url: {error}") from error
    frame = ConfluentFrame(client)
    # Codecs are handed about and have no end of their own: the connections go with the last user.
    weakref.finalize(frame, client.close)
    return Codec(confluent=frame)


class ConfluentFrame:
    """Names writers' schemas by their ids in a registry."""

    def __init__(self, client: RegistryClient, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Use a registry through `client`."""
        self._client = client
        self._monotonic = monotonic
        self._writers: dict[int, tuple[str, Schema]] = {}
        # id → when it may be asked for again
        self._absent: dict[int, float] = {}

    def header(self, contract: Contract) -> bytes:
        """Register the contract and give the 5 bytes in front of a body.

        Raises:
            Unavailable: the registry does not answer.
            TasklineError: it refuses the schema.
        """
        from confluent_kafka.schema_registry import Schema as RegistrySchema  # noqa: PLC0415 - as above

        subject = _subject(contract.name)
        schema_id = self._ask(
            lambda: self._client.register_schema(subject, RegistrySchema(contract.source, "AVRO")),
            f"registering {subject}",
        )
        return bytes([CONFLUENT_MAGIC]) + schema_id.to_bytes(_ID_BYTES, "big")

    def writer(self, data: bytes) -> tuple[str, Schema, int]:
        """Find the writer's schema by its id.

        Raises:
            UndecodableRecord: too short, or no Taskline record.
            UnknownSchema: a kind of record that this version does not know.
            Unavailable: the registry does not answer, or knows no schema of Taskline.
        """
        if len(data) < _FRAME_BYTES:
            raise UndecodableRecord(f"{len(data)} bytes are too few for a record")
        schema_id = int.from_bytes(data[1:_FRAME_BYTES], "big")
        known = self._writers.get(schema_id)
        if known is None:
            known = self._writers[schema_id] = self._fetch(schema_id)
        return *known, _FRAME_BYTES

    def _fetch(self, schema_id: int) -> tuple[str, Schema]:
        now = self._monotonic()
        if self._absent.get(schema_id, now) > now:
            raise _no_such(schema_id)
        try:
            found = self._ask(lambda: self._client.get_schema(schema_id), f"fetching schema {schema_id}")
        except _NoSuchSchemaError:
            self._require_own_registry()
            if len(self._absent) >= _ABSENT_IDS:
                self._absent.clear()
            self._absent[schema_id] = now + _ABSENT_SECONDS
            raise _no_such(schema_id) from None
        return _record_of(schema_id, found)

    def _require_own_registry(self) -> None:
        subjects = set(self._ask(self._client.get_subjects, "listing subjects"))
        if not any(_subject(name) in subjects for name in contracts()):
            raise Unavailable(
                "the schema registry knows no schema of Taskline: wrong registry, or its data is lost"
            )

    def _ask(self, request: Callable[[], T], doing: str) -> T:
        from confluent_kafka.schema_registry.error import SchemaRegistryError  # noqa: PLC0415 - as above

        try:
            return request()
        except SchemaRegistryError as error:
            status = error.http_status_code
            if status == HTTPStatus.NOT_FOUND:
                raise _NoSuchSchemaError(f"{doing}: {error}") from error
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
                raise Unavailable(f"schema registry: {doing}: {error}") from error
            raise TasklineError(f"the schema registry refuses {doing}: {error}") from error
        except Exception as error:
            # The HTTP client's own errors: refused connections, time-outs, broken answers.
            raise Unavailable(f"schema registry: {doing}: {type(error).__name__}: {error}") from error


class _NoSuchSchemaError(TasklineError):
    """The registry answers that it does not know this."""


def _subject(record: str) -> str:
    return f"{NAMESPACE}.{record}"


def _no_such(schema_id: int) -> UndecodableRecord:
    return UndecodableRecord(f"the schema registry has no schema {schema_id}")


def _record_of(schema_id: int, found: Any) -> tuple[str, Schema]:  # noqa: ANN401 - the library's Schema
    try:
        written = load_contract(found.schema_str)
        namespace, _, name = written.parsed["name"].rpartition(".")
    except Exception as error:
        # A schema of another kind (Protobuf, JSON), or one that is no record.
        raise UndecodableRecord(f"schema {schema_id} of the registry is not of a record") from error
    if namespace != NAMESPACE:
        raise UndecodableRecord(f"schema {schema_id} of the registry is not Taskline's")
    if name not in contracts():
        raise UnknownSchema(f"{written.parsed['name']} (registry id {schema_id})")
    return name, written.parsed
