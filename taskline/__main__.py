"""`python -m taskline` is the `taskline` command."""

from taskline.cli import main

main()
