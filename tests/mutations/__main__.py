"""Lists every mutation with the test that catches it: ``python -m tests.mutations [WORD...]``.

With words, only the mutations whose name or room contains one of them.
"""

from __future__ import annotations

import sys
import time

import tests.conftest  # noqa: F401  (threads)
from tests.mutations import MUTATIONS
from tests.mutations.run import caught

FIRST_CHARACTERS = 110

missed = []
for name, one in MUTATIONS.items():
    if sys.argv[1:] and not any(w in name or w == one.room for w in sys.argv[1:]):
        continue
    start, first, well = time.perf_counter(), "", False
    try:
        found = caught(one)
    except Exception as e:
        how = f"IS WRONG ITSELF: {type(e).__name__}: {e}"
    else:
        well = found is not None
        how = "SURVIVES" if found is None else f"{found.case}: {found.kind}"
        first = "" if found is None else " ".join(found.text.split())[:FIRST_CHARACTERS]
    if not well:
        missed.append(name)
    seconds = time.perf_counter() - start
    print(f"{seconds:5.1f} s  {one.room:12} {name:52} {how}  {first}", flush=True)
print(f"{len(missed)} are not caught: {', '.join(missed)}")
sys.exit(len(missed) > 0)
