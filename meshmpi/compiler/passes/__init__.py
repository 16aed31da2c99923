"""Program -> Program, one transformation per file; the unoptimised program is their oracle."""
