"""``python -m tests.golden``: which golden programs differ; ``--update`` rewrites them."""

import sys

from tests.golden import GOLDEN, path, update

if "--update" in sys.argv:
    print("rewritten:", ", ".join(update()) or "none")
else:
    for name, text in GOLDEN.items():
        same = path(name).exists() and path(name).read_text() == text() + "\n"
        print(f"{'same     ' if same else 'DIFFERENT'} {name}")
