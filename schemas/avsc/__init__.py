"""The Avro contracts of everything on Taskline's topics, as `*.avsc` files.

A changed contract keeps its predecessor under `<Name>.<n>.avsc`: records written under it are still in the log.
"""
