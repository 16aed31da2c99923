"""Names: of dimensions, axes, tensors, variables."""

from tests.errors.catalogue.mistake import Mistake

NAMES = [
    Mistake(
        "An output dimension is misspelt",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:4;d_ff:12")
y = mm.einsum([x, w], "batch:8;d_fff:12")  # here
""",
        "ShapeError: einsum | output dimension 'd_fff' | [d_model=4, d_ff=12] | Did you mean 'd_ff'?",
        (("d_fff", "d_ff"),),
    ),
    Mistake(
        "A dimension to reduce is misspelt",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
y = mm.reduce_sum(x, reduced_dim="bach")  # here
""",
        "ShapeError: reduce_sum: x float32 | no dimension 'bach' | [batch=8, d_model=4] | Did you mean 'batch'?",
        (("bach", "batch"),),
    ),
    Mistake(
        "A dimension to rename is misspelt",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
y = mm.rename(x, {"d_modell": "d_k"})  # here
""",
        "ShapeError: rename: x float32 | 'd_modell' | [batch=8, d_model=4] | Did you mean 'd_model'?",
        (("d_modell", "d_model"),),
    ),
    Mistake(
        "One name for two dimensions of a tensor",
        """
x = mm.placeholder("x", "length:8;length:8")  # here
""",
        "ShapeError: shape [length=8, length=8] | 'length' | 2 times | its own name",
        (("length:8;length:8", "length:8;memory_length:8"),),
        "memory_length",
    ),
    Mistake(
        "Renaming makes a name occur twice",
        """
x = mm.placeholder("x", "length:8;memory:8")
y = mm.rename(x, {"memory": "length"})  # here
""",
        "ShapeError: [length=8, length=8] | 'length' | 2 times | its own name",
        (('{"memory": "length"}', '{"memory": "other"}'),),
        "other",
    ),
    Mistake(
        "A name with a character that layouts use",
        """
d = mm.Dimension("d+model", 4)  # here
x = mm.placeholder("x", [d])
""",
        "ShapeError: 'd+model' | name for a dimension | 'd+model' | without any of : ; , + =",
        (("d+model", "d_model"),),
        "d_model",
    ),
    Mistake(
        "Two placeholders of one name",
        """
x = mm.placeholder("x", "batch:8")  # here
y = mm.placeholder("x", "batch:8;d_model:4")
""",
        "ShapeError: 'x' | exists | float32[batch=8] | another name",
        (('y = mm.placeholder("x"', 'y = mm.placeholder("y"'),),
        "y",
    ),
    Mistake(
        "Two variables of one name and different shapes",
        """
w = mm.get_variable("w", "d_model:4;d_ff:12")  # here
v = mm.get_variable("w", "d_model:4;d_ff:16")
""",
        "VariableError: variable 'w' | exists as | float32[d_model=4, d_ff=16] | with mm.scope(",
        (("v = mm", 'with mm.scope("v"):\n    v = mm'),),
    ),
    Mistake(
        "A variable of two data types",
        """
w = mm.get_variable("w", "d_model:4")  # here
v = mm.get_variable("w", "d_model:4", "bfloat16")
""",
        "VariableError: variable 'w' | exists as float32 | bfloat16[d_model=4] | with mm.scope(",
        (("v = mm", 'with mm.scope("v"):\n    v = mm'),),
    ),
    Mistake(
        "Two layers of one name",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
hidden = mm.Dimension("d_ff", 6)
a = mm.dense(x, hidden, name="tower")  # here
b = mm.dense(x, hidden, name="tower")
""",
        "VariableError: variable 'tower/kernel' | exists already | silently share | with mm.scope(reuse=True)",
        (("b = mm", "with mm.scope(reuse=True):\n    b = mm"),),
    ),
    Mistake(
        "A layer that is to be shared and does not exist",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
hidden = mm.Dimension("d_ff", 6)
a = mm.dense(x, hidden, name="tower")
with mm.scope(reuse=True):
    b = mm.dense(x, hidden, name="towr")  # here
""",
        "VariableError: no variable 'towr/kernel' | to share | reuse=True | Did you mean 'tower/kernel'?",
        (('"towr"', '"tower"'),),
    ),
    Mistake(
        "A variable that does not exist is read",
        """
w = mm.get_variable("weights", "d_model:4")
step = mm.compile(graph, mesh, fetches=[w])
step.variables["weight"]  # here
""",
        "VariableError: variable 'weight' | there is no | 'weight' | Did you mean 'weights'?",
        (('["weight"]', '["weights"]'),),
    ),
    Mistake(
        "An unknown data type",
        """
x = mm.placeholder("x", "batch:8", "float16")  # here
""",
        "ShapeError: placeholder 'x' | data type | 'float16' | bfloat16",
        (("float16", "bfloat16"),),
    ),
    Mistake(
        "A tensor of another graph",
        """
x = mm.placeholder("x", "batch:8")
with mm.Graph():
    y = mm.placeholder("y", "batch:8")
    z = x + y  # here
""",
        "ShapeError: y | another graph | [batch=8] | one `with mm.Graph():`",
        (("with mm.Graph():", "if True:"),),
        "True",
    ),
    Mistake(
        "A fetch of another graph",
        """
x = mm.placeholder("x", "batch:8")
with mm.Graph() as other:
    y = mm.ones("batch:8") * 2.0  # here
step = mm.compile(graph, mesh, fetches=[y])
""",
        "ShapeError: 'multiply' | another graph | fetch | mm.compile(tensor.graph",
        (("compile(graph", "compile(y.graph"),),
        "graph",
    ),
    Mistake(
        "Building outside of a graph",
        """
def build():
    return mm.placeholder("x", "batch:8")  # here

graph.__exit__()
try:
    x = build()
finally:
    graph.__enter__()
""",
        "ShapeError: graph | under construction | no graph | with mm.Graph() as graph:",
        (("    x = build()", "    with mm.Graph() as other:\n        x = build()"),),
        "Graph",
    ),
]
