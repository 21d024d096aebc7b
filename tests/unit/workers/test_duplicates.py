from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from taskline.schemas.ids import new_task_id
from taskline.workers.duplicates import Duplicates, Verdict, key_of

NOW = 1_800_000_000_000
ONE, TWO = key_of(new_task_id(NOW), 1), key_of(new_task_id(NOW), 1)


def never(_: str) -> bool:
    return False


def test_a_copy_is_dropped_once_the_outcome_is_acknowledged_and_never_before() -> None:
    known: Duplicates[str, str] = Duplicates()
    assert known.take(ONE, "p0", "a") is Verdict.RUN
    assert known.take(ONE, "p0", "copy") is Verdict.WAIT
    assert known.take(TWO, "p0", "b") is Verdict.RUN
    assert known.ended(ONE) == ["copy"]
    assert known.take(ONE, "p1", "another copy") is Verdict.DONE
    assert known.ended(TWO) == []


def test_another_attempt_of_the_same_task_is_no_copy() -> None:
    task = new_task_id(NOW)
    known: Duplicates[str, str] = Duplicates()
    known.take(key_of(task, 1), "p0", "a")
    known.ended(key_of(task, 1))
    assert known.take(key_of(task, 2), "p0", "b") is Verdict.RUN


def test_copies_of_what_is_handed_back_run() -> None:
    known: Duplicates[str, str] = Duplicates()
    known.take(ONE, "p0", "a")
    known.take(ONE, "p1", "copy")
    known.take(ONE, "p1", "second copy")
    assert known.handed_back(ONE) == ["copy", "second copy"]
    assert known.take(ONE, "p1", "copy") is Verdict.RUN
    assert known.take(ONE, "p1", "second copy") is Verdict.WAIT


def test_what_was_learned_under_an_assignment_goes_with_it() -> None:
    known: Duplicates[str, str] = Duplicates()
    for key, holder in ((ONE, "p0"), (TWO, "p1")):
        known.take(key, holder, "a")
        known.ended(key)
    assert known.leave({"p0"}, never) == []
    assert known.take(ONE, "p0", "again") is Verdict.RUN
    assert known.take(TWO, "p0", "again") is Verdict.DONE


def test_what_ends_while_its_assignment_leaves_decides_about_its_copies_but_is_not_kept() -> None:
    known: Duplicates[str, str] = Duplicates()
    known.take(ONE, "p0", "a")
    known.take(ONE, "p0", "copy that goes")
    known.take(ONE, "p1", "copy that stays")
    assert known.leave({"p0"}, lambda copy: copy == "copy that goes") == ["copy that goes"]
    assert known.take(ONE, "p1", "late copy") is Verdict.WAIT
    assert known.ended(ONE) == ["copy that stays", "late copy"]
    assert known.take(ONE, "p1", "a later one") is Verdict.RUN


def test_only_so_many_are_remembered_the_newest() -> None:
    known: Duplicates[str, str] = Duplicates(max_ended=3)
    for number in range(5):
        known.take((number, 1), "p0", "a")
        known.ended((number, 1))
    assert len(known) == 3
    verdicts = [known.take((number, 1), "p0", "again") for number in range(5)]
    assert verdicts == [Verdict.RUN, Verdict.RUN, Verdict.DONE, Verdict.DONE, Verdict.DONE]


class Windows(RuleBasedStateMachine):
    """Against the plainest model: sets, and a list of copies per attempt."""

    holders = st.sampled_from(["p0", "p1", "p2"])
    keys = st.tuples(st.integers(0, 4), st.integers(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.known: Duplicates[str, tuple[str, int]] = Duplicates(max_ended=100)
        self.ended: dict[tuple[int, int], str] = {}
        self.flying: dict[tuple[int, int], tuple[str, list[tuple[str, int]]]] = {}
        self.left: set[tuple[int, int]] = set()
        self.number = 0

    @rule(key=keys, holder=holders)
    def take(self, key: tuple[int, int], holder: str) -> None:
        self.number += 1
        verdict = self.known.take(key, holder, (holder, self.number))
        if key in self.ended:
            assert verdict is Verdict.DONE
        elif key in self.flying:
            assert verdict is Verdict.WAIT
            self.flying[key][1].append((holder, self.number))
        else:
            assert verdict is Verdict.RUN
            self.flying[key] = (holder, [])

    @rule(data=st.data(), acknowledged=st.booleans())
    def over(self, data: st.DataObject, acknowledged: bool) -> None:
        if not self.flying:
            return
        key = data.draw(st.sampled_from(sorted(self.flying)))
        holder, copies = self.flying.pop(key)
        if acknowledged:
            assert self.known.ended(key) == copies
            if key not in self.left:
                self.ended[key] = holder
        else:
            assert self.known.handed_back(key) == copies
        self.left.discard(key)

    @rule(holder=holders)
    def leave(self, holder: str) -> None:
        gone = self.known.leave({holder}, lambda copy: copy[0] == holder)
        expected = [copy for _, copies in self.flying.values() for copy in copies if copy[0] == holder]
        assert sorted(gone) == sorted(expected)
        for _, copies in self.flying.values():
            copies[:] = [copy for copy in copies if copy[0] != holder]
        self.left |= {key for key, (own, _) in self.flying.items() if own == holder}
        self.ended = {key: own for key, own in self.ended.items() if own != holder}

    @invariant()
    def as_many(self) -> None:
        assert len(self.known) == len(self.ended) + len(self.flying)


TestWindows = Windows.TestCase
