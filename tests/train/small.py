"""The small text and the small model of the tests that train."""

TEXT = "".join(f"the {k % 7} quick brown foxes jump over {k % 5} lazy dogs\n" for k in range(120))
SMALL_MODEL = ("model.length=8", "model.d_model=16", "model.d_ff=32", "model.heads=2", "model.d_kv=8", "model.layers=1")
