"""The dispatcher against a model, and the shares that it promises."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from taskline.schemas.events import Priority
from taskline.workers.dispatch import ALL, Dispatcher, Gate

GATES = ("a", "b", "c")
WEIGHTS = {Priority.HIGH: 16, Priority.NORMAL: 4, Priority.LOW: 1}
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.tuples(
                st.sampled_from(Priority),
                st.sampled_from("xy"),
                st.lists(st.sampled_from(GATES), max_size=2, unique=True).map(tuple),
            ),
        ),
        st.tuples(st.just("take"), st.sets(st.sampled_from(Priority), min_size=1)),
        st.tuples(st.just("drop"), st.integers(2, 4)),
        st.tuples(st.just("turn"), st.sampled_from(GATES)),
    ),
    max_size=60,
)


def everything(gate: Gate) -> bool:
    return True


@given(steps, st.booleans())
def test_what_can_be_taken_is_taken_and_nothing_else(
    sequence: list[tuple[str, object]], weighted: bool
) -> None:
    dispatcher: Dispatcher[int] = Dispatcher(WEIGHTS if weighted else None)
    model: dict[int, tuple[Priority, str, tuple[str, ...]]] = {}
    shut: set[Gate] = set()
    for number, (step, argument) in enumerate(sequence):
        if step == "put":
            dispatcher.put(*argument, number)
            model[number] = argument
        elif step == "turn":
            shut ^= {argument}
            if argument not in shut:
                dispatcher.opened(argument)
        elif step == "take":
            able = {
                item: kind for item, kind in model.items() if kind[0] in argument and not shut & set(kind[2])
            }
            taken = dispatcher.take(lambda gate, shut=shut: gate not in shut, argument)
            assert (taken is None) == (not able)
            if taken is not None:
                kind = able[taken]
                # First in, first out among its like.
                assert taken == min(item for item, other in able.items() if other == kind)
                if not weighted:
                    ranks = list(Priority)
                    assert ranks.index(kind[0]) == min(ranks.index(other[0]) for other in able.values())
                del model[taken]
        else:
            dropped = dispatcher.drop(lambda item, divisor=argument: item % divisor == 0)
            assert sorted(dropped) == [item for item in sorted(model) if item % argument == 0]
            model = {item: kind for item, kind in model.items() if item not in dropped}
        assert len(dispatcher) == len(model)


def test_each_priority_gets_its_share_of_an_endless_flood() -> None:
    dispatcher: Dispatcher[Priority] = Dispatcher(WEIGHTS)
    for _ in range(2_100):
        for priority in Priority:
            dispatcher.put(priority, "acme", (), priority)
    taken = Counter(dispatcher.take(everything) for _ in range(2_100))
    assert taken == {Priority.HIGH: 1_600, Priority.NORMAL: 400, Priority.LOW: 100}


def test_high_comes_first_and_what_was_idle_makes_nothing_up() -> None:
    dispatcher: Dispatcher[Priority] = Dispatcher(WEIGHTS)
    for _ in range(100):
        dispatcher.put(Priority.LOW, "acme", (), Priority.LOW)
    for _ in range(50):
        dispatcher.take(everything)
    for _ in range(10):
        dispatcher.put(Priority.HIGH, "acme", (), Priority.HIGH)
    assert [dispatcher.take(everything) for _ in range(8)] == [Priority.HIGH] * 8


@given(st.integers(1, 50), st.integers(1, 50))
def test_tenants_take_turns_however_much_each_has(many: int, few: int) -> None:
    dispatcher: Dispatcher[str] = Dispatcher(WEIGHTS)
    for _ in range(many):
        dispatcher.put(Priority.LOW, "flood", (), "flood")
    for _ in range(few):
        dispatcher.put(Priority.LOW, "drop", (), "drop")
    both = [dispatcher.take(everything) for _ in range(2 * min(many, few))]
    assert Counter(both) == {"flood": min(many, few), "drop": min(many, few)}


def test_a_closed_gate_holds_up_its_own_lane_only_and_is_not_asked_again_until_it_opens() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(WEIGHTS)
    asked: Counter[Gate] = Counter()

    def is_open(gate: Gate) -> bool:
        asked[gate] += 1
        return gate != "full"

    for number in range(100):
        dispatcher.put(Priority.HIGH, "acme", ("full",), number)
        dispatcher.put(Priority.LOW, "acme", ("free",), 1_000 + number)
    assert [dispatcher.take(is_open) for _ in range(100)] == list(range(1_000, 1_100))
    assert asked["full"] == 1
    assert dispatcher.take(everything, ALL) is None
    dispatcher.opened("full")
    assert dispatcher.take(everything) == 0
