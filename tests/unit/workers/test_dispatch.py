from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskline.schemas.events import Priority
from taskline.workers.dispatch import StrictDispatcher

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(Priority)),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("drop"), st.integers(2, 4)),
    )
)


@given(steps)
def test_the_most_urgent_then_the_oldest(sequence: list[tuple[str, object]]) -> None:
    dispatcher: StrictDispatcher[tuple[int, int]] = StrictDispatcher()
    model: list[tuple[int, int]] = []
    ranks = list(Priority)
    for number, (step, argument) in enumerate(sequence):
        if step == "put":
            item = (ranks.index(argument), number)
            dispatcher.put(argument, item)
            model.append(item)
        elif step == "take":
            expected = min(model, default=None)
            assert dispatcher.take() == expected
            if expected is not None:
                model.remove(expected)
        else:
            dropped = dispatcher.drop(lambda item, divisor=argument: item[1] % divisor == 0)
            assert sorted(dropped) == sorted(item for item in model if item[1] % argument == 0)
            model = [item for item in model if item not in dropped]
        assert len(dispatcher) == len(model)
        assert dispatcher.urgency() == min((rank for rank, _ in model), default=None)
