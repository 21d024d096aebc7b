"""A seeded simulation: the real roles on the log, view and clock of `taskline.testing`, one integer for everything that happens.

Invariant: a seed and the code decide the run, to the last byte of its trace. Nothing here reads a clock, an address or a
random source of the machine.
"""
