"""The cost of a program before it runs.  Depends on programs only."""
