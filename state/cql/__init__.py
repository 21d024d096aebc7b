"""The view's tables, one migration a file."""
