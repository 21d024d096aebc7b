"""Taskline in memory, for tests of tasks: no Kafka, no Cassandra, and time that passes when the test says so.

```python
with InMemoryTaskline(registry) as tl:
    task = tl.submit("geo.nearest", {"airport": "ATL"})
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "completed"
```

The pieces that it is made of can be used by themselves (docs/testing.md).
"""

from __future__ import annotations

from taskline.testing.broker import Fault, MemoryBroker
from taskline.testing.clock import VirtualClock
from taskline.testing.errors import BackgroundError, Deadlock, FencedCommit, NeverIdle
from taskline.testing.intake import MemoryIntake
from taskline.testing.kit import InMemoryTaskline
from taskline.testing.log import MemoryLog
from taskline.testing.loop import VirtualLoop
from taskline.testing.projector import MemoryProjector
from taskline.testing.view import MemoryView
from taskline.testing.worker import MemoryWorker

__all__ = [
    "BackgroundError",
    "Deadlock",
    "Fault",
    "FencedCommit",
    "InMemoryTaskline",
    "MemoryBroker",
    "MemoryIntake",
    "MemoryLog",
    "MemoryProjector",
    "MemoryView",
    "MemoryWorker",
    "NeverIdle",
    "VirtualClock",
    "VirtualLoop",
]
