"""What a program costs before it runs.  Sees programs only."""
