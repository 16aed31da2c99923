"""Program -> Program, one transformation a file; the unoptimised program is their oracle."""
