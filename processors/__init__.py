"""All that folds or moves the log: the projector of the view, and the delay role that forwards what waits.

The pure core is `projection`; `projector` needs a store and a log; `faust_app` and `role` need the `projector` extra and are
imported by their full names. The `delay_*` modules need nothing besides Kafka: `delay_core` has the rules, `delay_engine` follows them.
"""

from __future__ import annotations

from taskline.processors.projection import Halt, Layout, Projection, project
from taskline.processors.projector import Projector

__all__ = ["Halt", "Layout", "Projection", "Projector", "project"]
