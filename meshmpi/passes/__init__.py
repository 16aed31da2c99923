"""Program -> Program, one transformation a file; each is checked against the unoptimised program."""
