"""Arguments of another kind than is meant: ints, strings, bare tensors, forgotten ones."""

from tests.errors.catalogue.mistake import Mistake

_H = """
h = mm.placeholder("h", "batch:8;d_model:4")
"""
_STEP = """
x = mm.placeholder("x", "batch:8;d_model:4")
t = mm.placeholder("t", "batch:8")
y = mm.reduce_sum(x, reduced_dim="d_model") - t
step = mm.compile(graph, mesh, "batch:rows", fetches=[y])
"""


def _row(
    title: str, program: str, says: str, cure: tuple[str, str], hint: str = "", kind: str = "ArgumentError"
) -> Mistake:
    return Mistake(title, program, f"{kind}: {says}", (cure,), hint)


ARGUMENTS = [
    _row(
        "A number in place of a dimension's name",
        _H + "y = mm.softmax(h, -1)  # here\n",
        "softmax | not a dimension or its name | reduced_dim is -1 | write 'd_model'",
        cure=("-1", "'d_model'"),
    ),
    _row(
        "An axis, as in NumPy",
        _H + "y = mm.reduce_sum(h, axis=-1)  # here\n",
        "reduce_sum | no argument 'axis' | 'axis' | reduced_dim",
        cure=("axis=-1", "reduced_dim='d_model'"),
    ),
    _row(
        "Letters, as in NumPy's einsum",
        _H
        + """
w = mm.get_variable("w", "d_model:4;d_ff:12")
y = mm.einsum("bi,ih->bh", h, w)  # here
""",
        "einsum | not a list of tensors | 'bi,ih->bh' | mm.einsum([h, w], ['batch', 'd_ff'])",
        cure=('"bi,ih->bh", h, w', "[h, w], ['batch', 'd_ff']"),
    ),
    _row(
        "A size in place of a dimension",
        _H + "y = mm.dense(h, 5)  # here\n",
        "dense | not a list of dimensions | new_dims is 5 | mm.Dimension('name', 5)",
        cure=("5", "mm.Dimension('name', 5)"),
    ),
    _row(
        "A name without a size for a new dimension",
        _H + "y = mm.dense(h, 'd_ff')  # here\n",
        "dense | not a list of dimensions | new_dims is 'd_ff' | mm.Dimension('d_ff', size)",
        cure=("'d_ff'", "mm.Dimension('d_ff', 12)"),
    ),
    _row(
        "A choice that a loop needs is forgotten",
        _H + "(y,) = mm.repeat(mm.tanh, 5, h)  # here\n",
        "repeat | is missing | shared_variables | shared_variables=...",
        cure=("5, h", "5, h, shared_variables=True"),
    ),
    _row(
        "A number where a tensor belongs",
        "y = mm.exp(2.0)  # here\n",
        "exp | not a tensor | x is 2.0 | mm.constant(2.0)",
        cure=("2.0", "mm.constant(2.0)"),
    ),
    _row(
        "A list around a tensor",
        _H + "y = mm.relu([h])  # here\n",
        "relu | not a tensor | [<Tensor h float32 | without the list",
        cure=("[h]", "h"),
        hint="h",
    ),
    _row(
        "A number to multiply a matrix with",
        _H + "y = h @ 2.0  # here\n",
        "matmul | not a tensor | b is 2.0 | mm.constant(2.0)",
        cure=("h @ 2.0", "h @ mm.constant(2.0)"),
    ),
    _row(
        "A tensor where a fixed number belongs",
        _H + "y = mm.layer_norm(h, 'd_model', mm.constant(1e-6))  # here\n",
        "layer_norm | not a number | epsilon is <Tensor constant | a Python number",
        cure=("mm.constant(1e-6)", "1e-6"),
        hint="6",
    ),
    _row(
        "A body with too many parameters",
        _H
        + """
def body(h, c):
    return h * c

(y,) = mm.repeat(body, 2, [h], shared_variables=True)  # here
""",
        "repeat | missing a required argument | body(h, c) | takes 1 tensor",
        cure=("body(h, c):\n    return h * c", "body(h):\n    return h * h"),
        hint="h",
    ),
    _row(
        "A slice by position",
        _H + "first = h[:, 0]  # here\n",
        "Tensor h | by position | [batch=8, d_model=4] | mm.slice(h, 0, 1, 'd_model')",
        cure=("h[:, 0]", "mm.slice(h, 0, 1, 'd_model')"),
    ),
    _row(
        "A sum by NumPy",
        _H + "total = np.sum(h)  # here\n",
        "np.add | NumPy cannot compute | Tensor h | mm.reduce_sum(",
        cure=("np.sum(h)", "mm.reduce_sum(h)"),
    ),
    _row(
        "An optimizer looked for in the wrong place",
        "adam = mm.Adam(1e-3)  # here\n",
        "meshmpi | has no | 'Adam' | mm.optimize.Adam",
        cure=("mm.Adam", "mm.optimize.Adam"),
        kind="MissingNameError",
    ),
    _row(
        "An initializer that was not called",
        "w = mm.get_variable('w', 'd_model:4', initializer=mm.zeros_initializer)  # here\n",
        "get_variable | not an initializer | the function zeros_initializer | zeros_initializer()",
        cure=("mm.zeros_initializer", "mm.zeros_initializer()"),
    ),
    _row(
        "A data type that there is not",
        "x = mm.zeros('batch:8', np.float16)  # here\n",
        "zeros | not a data type | float16 | float32",
        cure=("np.float16", "np.float32"),
    ),
    _row(
        "A blank in the name of a dimension",
        "d = mm.Dimension('d model', 4)  # here\n",
        "'d model' | name for a dimension | 'd model' | without blanks",
        cure=("d model", "d_model"),
        hint="d_model",
        kind="ShapeError",
    ),
    _row(
        "A dimension of a negative size",
        "d = mm.Dimension('batch', -3)  # here\n",
        "'batch' | has size | -3 | at least 1",
        cure=("-3", "1"),
        kind="ShapeError",
    ),
    _row(
        "Rules of a layout without a semicolon",
        "layout = mm.Layout('d_ff:model heads:model')  # here\n",
        "layout 'd_ff:model heads:model' | in place of a name | at character 11 | 'd_ff:model;heads:model'",
        cure=("model heads", "model;heads"),
        hint="model",
        kind="LayoutError",
    ),
    _row(
        "A number of ranks in place of a mesh axis",
        _STEP.replace('"batch:rows"', '{"batch": 2}').replace("[y])", "[y])  # here"),
        "'batch' | not the name of a mesh axis | to 2 | dimension:axis",
        cure=("2}", "'rows'}"),
        hint="rows",
        kind="LayoutError",
    ),
    _row(
        "One array for several placeholders",
        _STEP + "step(np.ones((8, 4)))  # here\n",
        "step | placeholders x, t | ndarray of shape (8, 4) | step(x=..., t=...)",
        cure=("step(np.ones((8, 4)))", "step(x=np.ones((8, 4)), t=np.ones(8))"),
        hint="t",
        kind="FeedError",
    ),
    _row(
        "A method of NumPy's arrays on a result",
        _STEP + "mean = step(x=np.ones((8, 4)), t=np.ones(8))[y].mean()  # here\n",
        "ShardedArray | NumPy's arrays have | 'mean' | x.numpy().mean",
        cure=("[y].mean", "[y].numpy().mean"),
        kind="MissingNameError",
    ),
    _row(
        "A mesh in place of the graph",
        _STEP.replace("graph, mesh", "mesh, graph").replace("[y])", "[y])  # here"),
        "compile | not a Graph | graph is a SimulatedMesh | mm.Graph()",
        cure=("mesh, graph", "graph, mesh"),
        hint="graph",
    ),
    _row(
        "The shape of a mesh as a number",
        "m = mm.SimulatedMesh(4)  # here\n",
        "4 | not the shape of a mesh | 4 | 'rows:2;cols:2'",
        cure=("4", "'rows:2;cols:2'"),
    ),
]
