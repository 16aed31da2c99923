"""Converts text to numbers and back: one Protocol (`base`), one file per family of vocabularies, one table of kinds."""
