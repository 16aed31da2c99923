"""Timings of parts of meshmpi, to be run again: each module prints a table of its own."""
