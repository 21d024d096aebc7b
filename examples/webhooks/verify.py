"""What was to happen against what the view says and the receiver has seen. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from examples.webhooks.receiver import Record
from examples.webhooks.scenarios import Scenario
from examples.webhooks.story import SUCCEEDED, Story, tell

# Instants in the view have whole milliseconds, and a wait is the difference of two.
_ROUNDING_SECONDS = 0.002


def differences(scenario: Scenario, story: Story, record: Record | None) -> list[str]:
    """What is wrong with one delivery before anything is mended, one line each.

    Args:
        scenario: the subscriber.
        story: the task, from the view.
        record: what the receiver has noted of its key; None: nothing.
    """
    return [
        *_wrong_end(scenario, story),
        *_wrong_failures(scenario, story),
        *_too_early(scenario, story),
        *_wrong_deliveries(scenario, story, record),
    ]


def replay_differences(dead: Story, replayed: Story | None, record: Record | None) -> list[str]:
    """What is wrong with a dead delivery that was replayed after its subscriber was mended, one line each.

    Args:
        dead: the task that died, read again.
        replayed: the task that replays it; None: there is none.
        record: what the receiver has noted of their key; None: nothing.
    """
    if replayed is None:
        return ["was not replayed"]
    wrong = []
    if dead.status != "dead":
        wrong.append(f"the dead task reads {dead.status} after its replay")
    if (replayed.replay_of, dead.replayed_as) != (dead.task_id, replayed.task_id):
        wrong.append(
            f"replay_of {replayed.replay_of} and replayed_as {dead.replayed_as} do not name each other"
        )
    if replayed.root_id != dead.task_id:
        wrong.append(f"the replay's root_id is {replayed.root_id}")
    if [act.outcome for act in replayed.tried] != [SUCCEEDED] or replayed.status != "completed":
        wrong.append(f"the replay: {tell(replayed, {})}")
    came = len(dead.tried) + len(replayed.tried)
    most = came + _handed_on(dead) + _handed_on(replayed)
    if record is None or not came <= len(record.came) <= most or record.taken != 1:
        wrong.append(f"the receiver has {record} of {came} deliveries under one key")
    return wrong


def expected(scenario: Scenario) -> str:
    """What is to happen, in words."""
    failures = _counted(scenario.failures)
    if scenario.or_more:
        failures = f"1+ {scenario.failures[0]}"
    return _words(failures, scenario.status, scenario.reason)


def seen(scenario: Scenario, stories: Iterable[Story]) -> str:
    """What has happened, in the same words; more than one clause if it was not always the same."""
    clauses: Counter[str] = Counter()
    for story in stories:
        failures = _counted(story.failures)
        if scenario.or_more and story.failures and set(story.failures) == set(scenario.failures):
            failures = f"1+ {scenario.failures[0]}"
        clauses[_words(failures, story.status, story.reason)] += 1
    if len(clauses) == 1:
        return next(iter(clauses))
    return "; ".join(f"{count} of {clause}" for clause, count in clauses.most_common())


def _words(failures: str, status: str, reason: str | None) -> str:
    end = status if reason is None else f"{status} ({reason})"
    return f"{failures}, {end}" if failures else end


def _counted(failures: Iterable[str]) -> str:
    """E.g. "2 server"; runs of the same kind are counted."""
    runs: list[tuple[str, int]] = []
    for kind in failures:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs)


def _wrong_end(scenario: Scenario, story: Story) -> Iterator[str]:
    if (story.status, story.reason) != (scenario.status, scenario.reason):
        yield f"ended {story.status} ({story.reason}), not {scenario.status} ({scenario.reason})"
    if story.status == "completed" and story.result != {"status": 200, "duplicate": scenario.duplicate}:
        yield f"the receipt is {story.result}"


def _wrong_failures(scenario: Scenario, story: Story) -> Iterator[str]:
    kinds = story.failures
    right = (
        len(kinds) >= 1 and set(kinds) == set(scenario.failures)
        if scenario.or_more
        else kinds == scenario.failures
    )
    if not right:
        yield f"failed as {kinds}, not as {scenario.failures}"
    if [act.attempt for act in story.tried] != list(range(1, len(story.tried) + 1)):
        yield f"attempts {[act.attempt for act in story.tried]}"
    if story.retry_count != len(story.tried) - 1:
        yield f"retry_count {story.retry_count} with {len(story.tried)} attempts"


def _too_early(scenario: Scenario, story: Story) -> Iterator[str]:
    if story.tried and story.scheduled_at is not None and story.tried[0].started_at < story.scheduled_at:
        yield f"started {story.tried[0].started_at}, before {story.scheduled_at}"
    for failed, following in pairwise(story.tried):
        least = scenario.least_wait(failed.attempt)
        if following.waited < least - _ROUNDING_SECONDS:
            yield f"attempt {following.attempt} after {following.waited:.3f} s, sooner than {least:.3f} s"


def _wrong_deliveries(scenario: Scenario, story: Story, record: Record | None) -> Iterator[str]:
    tried, failed = len(story.tried), len(story.failures)
    # A connection that was refused is none that the receiver knows of.
    most = tried - (failed if scenario.away else 0) + _handed_on(story)
    # Whether an attempt that ended at its time limit had got so far is not told; one of them had, if the last one was a repetition.
    least = tried - failed + scenario.duplicate if scenario.or_more else tried
    if record is None:
        yield "the receiver has never seen its key"
        return
    if not least <= len(record.came) <= most:
        yield (
            f"the receiver has counted {len(record.came)} deliveries ({', '.join(record.heard)}), "
            f"not {least} to {most}"
        )
    if record.taken != (scenario.status == "completed"):
        yield f"taken in {record.taken} times"
    if record.too_early:
        yield f"came {record.too_early} times before it was asked to"
    if story.scheduled_at is not None and record.came and record.came[0] < story.scheduled_at.timestamp():
        yield "was delivered before it was due"


def _handed_on(story: Story) -> int:
    """How many executions were taken over by another worker: whether they had delivered is not told."""
    return len(story.acts) - len(story.tried)
