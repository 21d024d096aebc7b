"""Schemas from classes, and instances from payloads."""

from __future__ import annotations

import functools
import json
import types
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType, Optional, Union

import pydantic.dataclasses
import pytest
from py_avro_schema import DecimalMeta
from pydantic import BaseModel, ConfigDict, Field

from taskline.errors import InvalidPayload, InvalidTaskType
from taskline.schemas.derive import schema_of, to_instance
from taskline.schemas.payloads import PayloadSchema

Airport = NewType("Airport", str)
Money = Annotated[Decimal, DecimalMeta(precision=8, scale=2)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Code(str):
    """A kind of text."""

    __slots__ = ()


@dataclass(frozen=True)
class Place:
    lat: float
    lon: float = 0.0


@dataclass
class Everything:
    flag: bool
    count: int
    weight: float
    name: str
    raw: bytes
    at: datetime
    day: date
    moment: time
    span: timedelta
    id: uuid.UUID
    price: Money
    colour: Colour
    kind: Literal["a", "b"]
    airport: Airport
    places: list[Place]
    more: Sequence[int]
    pair: tuple[int, ...]
    tags: dict[str, str]
    by_name: Mapping[str, Place]
    anything: dict[str, Any]
    maybe: Optional[int]  # noqa: UP045 - both ways are used
    either: Union[int, str]  # noqa: UP007
    limited: Annotated[int, Field(ge=0)]
    home: Place = Place(1.5, 2.5)
    until: datetime | None = None
    limit: timedelta = timedelta(seconds=5)
    note: str | None = "none"
    parent: Everything | None = None
    labels: list[str] = field(default_factory=lambda: ["x"])
    computed: int = field(init=False, default=7)


class Order(BaseModel):
    """Not part of the schema."""

    model_config = ConfigDict(frozen=True)

    customer: str = Field(min_length=2, description="Nor is this.")
    total: Money = Decimal("1.50")
    colour: Colour = Colour.BLUE
    items: list[Order] = []
    reference: uuid.UUID = uuid.UUID(int=5)
    key: int = Field(3, alias="theKey")


@pydantic.dataclasses.dataclass
class Checked:
    amount: int = Field(gt=0)
    note: str = Field("", max_length=3)


def everything(**changes: Any) -> Everything:
    values: dict[str, Any] = {
        "flag": True,
        "count": 1,
        "weight": 1.5,
        "name": "ü",
        "raw": b"\xff",
        "at": datetime(2026, 5, 1, tzinfo=UTC),
        "day": date(2026, 5, 1),
        "moment": time(1, 2),
        "span": timedelta(hours=1),
        "id": uuid.uuid4(),
        "price": Decimal("3.10"),
        "colour": Colour.RED,
        "kind": "a",
        "airport": Airport("LAX"),
        "places": [Place(1, 2)],
        "more": [1],
        "pair": (1, 2),
        "tags": {"a": "b"},
        "by_name": {"x": Place(3, 4)},
        "anything": {"deep": [1, None, {"x": 1.5}]},
        "maybe": None,
        "either": "text",
        "limited": 0,
    }
    return Everything(**values | changes)


def round_trip(instance: Any) -> Any:
    schema = schema_of(type(instance))
    value = schema.decode(schema.encode("t", instance), schema)
    assert isinstance(value, dict)
    return to_instance(type(instance), value)


def test_instances_survive() -> None:
    instance = everything(parent=everything(maybe=5, either=6, until=datetime(2026, 1, 1, tzinfo=UTC)))
    assert round_trip(instance) == instance
    order = Order(customer="Ada", items=[Order(customer="Bob", theKey=9)])
    assert round_trip(order) == order
    assert round_trip(Checked(amount=5)) == Checked(amount=5)


def test_dicts_do_as_well_as_instances() -> None:
    schema = schema_of(Order)
    assert schema.encode("t", {"customer": "Ada"}) == schema.encode("t", Order(customer="Ada"))
    assert schema.decode(schema.encode("t", {"customer": "Ada"}), schema) == {
        "customer": "Ada",
        "total": Decimal("1.50"),
        "colour": "blue",
        "items": [],
        "reference": uuid.UUID(int=5),
        "key": 3,
    }


def test_only_fields_of_an_instance_count() -> None:
    class Measured(BaseModel):
        model_config = ConfigDict(extra="allow")

        a: int

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.a

    schema, instance = schema_of(Measured), Measured(a=1)
    assert instance.double == 2
    assert schema.decode(schema.encode("t", instance), schema) == {"a": 1}
    with pytest.raises(InvalidPayload) as caught:
        schema.encode("t", Measured.model_validate({"a": 1, "stray": 2}))
    assert caught.value.pointer == "/stray"
    with pytest.raises(InvalidPayload) as caught:
        schema.encode("t", Measured.model_construct())
    assert caught.value.pointer == "/a"


def test_an_instance_that_lies_is_refused() -> None:
    with pytest.raises(InvalidPayload) as caught:
        schema_of(Place).encode("t", Place(lat="north"))  # type: ignore[arg-type]
    assert caught.value.pointer == "/lat"
    with pytest.raises(InvalidPayload) as caught:
        schema_of(Order).encode("t", Order.model_construct(customer="Ada", colour="green"))
    assert caught.value.pointer == "/colour"


def test_the_class_s_own_rules_apply_when_the_handler_gets_it() -> None:
    schema = schema_of(Order)
    value = schema.decode(schema.encode("t", {"customer": "Ada", "items": [{"customer": "B"}]}), schema)
    with pytest.raises(InvalidPayload, match="at least 2") as caught:
        to_instance(Order, value, task_type="shop.order")
    assert caught.value.pointer == "/items/0/customer"
    assert caught.value.task_type == "shop.order"


def test_a_class_can_move() -> None:
    """The schema depends on names and shapes, not on where the class stands or what its docstring says."""

    def module(name: str, doc: str) -> type:
        found = types.ModuleType(name)
        code = f"from dataclasses import dataclass\n@dataclass\nclass Moved:\n    '''{doc}'''\n    a: int\n    b: str = 'x'\n"
        exec(compile(code, name, "exec", dont_inherit=True), found.__dict__)
        moved = found.__dict__["Moved"]
        assert isinstance(moved, type)
        return moved

    here, there = schema_of(module("shop.old", "One.")), schema_of(module("shop.sub.new", "Other."))
    assert here == there
    assert json.loads(here.source) == {
        "type": "record",
        "name": "Moved",
        "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": "string", "default": "x"}],
    }


def test_the_same_class_gives_the_same_schema() -> None:
    assert schema_of(Everything) is schema_of(Everything)
    assert PayloadSchema.parse(schema_of(Everything).source) == schema_of(Everything)


@dataclass
class Inner:
    a: int


def other_inner() -> type:
    return make_dataclass("Inner", [("b", int)])


class Weekday(IntEnum):
    MONDAY = 1


class Spaced(Enum):
    A = "two words"


class Plain:
    def __init__(self, a: int) -> None: ...


@pytest.mark.parametrize(
    ("kind", "default", "reason"),
    [
        (Decimal, ..., "precision"),
        (set[int], ..., "no Avro type"),
        (list, ..., "no Avro type"),
        (dict, ..., "no Avro type"),
        (Any, ..., "no Avro type"),
        (object, ..., "no Avro type"),
        (Plain, ..., "no Avro type"),
        (tuple[int, str], ..., "no Avro type"),
        (dict[int, str], ..., "strings"),
        (complex, ..., "no Avro type"),
        (Code, ..., "no instance"),
        (Weekday, ..., "symbols"),
        (Spaced, ..., "symbols"),
        (Literal["a", 1], ..., "no Avro type"),
        (uuid.UUID, field(default_factory=uuid.uuid4), "different values"),
        (datetime, field(default_factory=lambda: datetime.now(UTC)), "different values"),
        (datetime, datetime(2026, 1, 1), "UTC offset"),  # noqa: DTZ001
        (int, "x", "default"),
        (int, 2**70, "default"),
        (float, float("nan"), "default|not an Avro schema"),
    ],
)
def test_what_has_no_schema(kind: Any, default: Any, reason: str) -> None:
    fields: list[Any] = [("x", kind)] if default is ... else [("x", kind, default)]
    with pytest.raises(InvalidTaskType, match=reason) as caught:
        schema_of(make_dataclass("Odd", fields))
    assert "Odd" in str(caught.value)


def test_two_classes_of_one_name_are_not_confused() -> None:
    with pytest.raises(InvalidTaskType, match="two different classes are called Inner"):
        schema_of(make_dataclass("Both", [("x", Inner), ("y", other_inner())]))


@pytest.mark.parametrize("kind", [int, Plain, Colour, dict, list[int], Place(1, 2), None])
def test_only_classes_with_fields(kind: Any) -> None:
    with pytest.raises(InvalidTaskType, match="neither a dataclass nor a pydantic model"):
        schema_of(kind)


def test_annotations_that_nobody_can_resolve() -> None:
    @dataclass
    class Local:
        x: Undefined  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidTaskType, match="can't be resolved"):
        schema_of(Local)


def test_unions_put_their_default_first() -> None:
    found = json.loads(
        schema_of(make_dataclass("U", [("x", int | str | None, "a"), ("y", int | None, None)])).source
    )
    assert found["fields"][0] == {"name": "x", "type": ["string", "long", "null"], "default": "a"}
    assert found["fields"][1] == {"name": "y", "type": ["null", "long"], "default": None}
