"""Passes, each against the unoptimised program."""
