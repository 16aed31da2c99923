"""Text to numbers and back: one Protocol (`base`), one file for each family of vocabularies, one table of kinds."""
