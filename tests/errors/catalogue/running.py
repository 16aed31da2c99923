"""Feeds, variables, gradients, optimizers, plans."""

from tests.errors.catalogue.mistake import Mistake

_STEP = """
x = mm.placeholder("x", "batch:8;d_model:4")
i = mm.placeholder("i", "batch:8", "int32")
y = mm.reduce_sum(x, reduced_dim="d_model") * mm.cast(i, "float32")
step = mm.compile(graph, mesh, "batch:rows", fetches=[y])
"""
_X = "x=np.ones((8, 4)), i=np.arange(8)"

RUNNING = [
    Mistake(
        "A placeholder is not fed",
        _STEP
        + """
step(x=np.ones((8, 4)))  # here
""",
        "FeedError: placeholder 'i' | not fed | int32[batch=8] | step(x=..., i=...)",
        (("step(x=np.ones((8, 4)))", f"step({_X})"),),
        "i",
    ),
    Mistake(
        "A feed for a placeholder that does not exist",
        _STEP
        + """
step({"xx": np.ones((8, 4)), "i": np.arange(8)})  # here
""",
        "FeedError: 'xx' | no placeholder | 'xx' | Did you mean 'x'?",
        (('"xx"', '"x"'),),
    ),
    Mistake(
        "A feed of another shape",
        _STEP
        + """
step(x=np.ones((4, 8)), i=np.arange(8))  # here
""",
        "FeedError: feed 'x' | float32[batch=8/rows, d_model=4] | has shape (4, 8) | array of shape (8, 4)",
        (("np.ones((4, 8))", "np.ones((8, 4))"),),
        "8",
    ),
    Mistake(
        "A feed of another data type",
        _STEP
        + """
step(x=np.ones((8, 4)), i=np.ones(8))  # here
""",
        "FeedError: feed 'i' | data type | float64, the placeholder has int32 | array.astype('int32')",
        (("np.ones(8)", "np.ones(8).astype('int32')"),),
    ),
    Mistake(
        "A tensor as a feed",
        _STEP
        + """
step(x=x, i=np.arange(8))  # here
""",
        "FeedError: feed 'x' | a tensor of the graph | float32[batch=8, d_model=4] | NumPy array",
        (("x=x", "x=np.ones((8, 4))"),),
        "np",
    ),
    Mistake(
        "Rows of different lengths as a feed",
        _STEP
        + """
step(x=[[1.0, 2.0], [3.0]], i=np.arange(8))  # here
""",
        "FeedError: feed 'x' | not an array | inhomogeneous | array of shape (8, 4)",
        (("[[1.0, 2.0], [3.0]]", "np.ones((8, 4))"),),
        "8",
    ),
    Mistake(
        "One rank's block on a mesh where this process plays all",
        _STEP
        + """
step(x=mm.local(np.ones((4, 4))), i=np.arange(8))  # here
""",
        "FeedError: feed 'x' | plays all 4 ranks | (4, 4) | array of shape (8, 4)",
        (("mm.local(np.ones((4, 4)))", "np.ones((8, 4))"),),
        "8",
    ),
    Mistake(
        "A result that was not fetched",
        _STEP
        + f"""
step({_X})["z"]  # here
""",
        "KeyError: 'z' | not fetched | fetched: multiply | fetched: multiply",
        (('["z"]', '["multiply"]'),),
    ),
    Mistake(
        "A fetch by name in place of the tensor",
        """
x = mm.placeholder("x", "batch:8")
step = mm.compile(graph, mesh, fetches=["x"])  # here
""",
        "ArgumentError: compile: fetches[0] | not a tensor | 'x' | the tensor itself",
        (('fetches=["x"]', "fetches=[x]"),),
        "x",
    ),
    Mistake(
        "A variable updated twice in a step",
        """
w = mm.get_variable("w", "d_model:4")
updates = [mm.assign(w, w + 1.0), mm.assign(w, w * 2.0)]  # here
step = mm.compile(graph, mesh, fetches=[w], updates=updates)
""",
        "VariableError: variable 'w' | updated twice | 'add' and to 'multiply' | one mm.assign()",
        (("[mm.assign(w, w + 1.0), mm.assign(w, w * 2.0)]", "[mm.assign(w, (w + 1.0) * 2.0)]"),),
        "assign",
    ),
    Mistake(
        "A new value of another shape",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:4")
update = mm.assign(w, x)  # here
""",
        "ShapeError: variable 'w' | float32[d_model=4] | float32[batch=8, d_model=4] | reduce",
        (("assign(w, x)", 'assign(w, mm.reduce_mean(x, output_shape="d_model:4"))'),),
        "d_model",
    ),
    Mistake(
        "Assigning to what is no variable",
        """
x = mm.placeholder("x", "d_model:4")
update = mm.assign(x, x * 2.0)  # here
""",
        "ShapeError: <Tensor x float32[d_model=4]> | value of a variable | x float32 | mm.get_variable()",
        (('mm.placeholder("x", "d_model:4")', 'mm.get_variable("x", "d_model:4")'),),
    ),
    Mistake(
        "An update that is a tensor",
        """
w = mm.get_variable("w", "d_model:4")
step = mm.compile(graph, mesh, fetches=[w], updates=[w + 1.0])  # here
""",
        "ShapeError: <Tensor add float32[d_model=4]> | updates[0] | Update | mm.assign(",
        (("[w + 1.0]", "[mm.assign(w, w + 1.0)]"),),
    ),
    Mistake(
        "First values of another shape",
        """
w = mm.get_variable("w", "d_model:4", initializer=np.zeros(5))  # here
""",
        "VariableError: variable 'w' | [d_model=4] | (5,) | array of shape (4,)",
        (("np.zeros(5)", "np.zeros(4)"),),
    ),
    Mistake(
        "Fractions as first values of whole numbers",
        """
n = mm.get_variable("n", "d_model:2", "int32", np.array([1.7, 2.0]))  # here
""",
        "VariableError: variable 'n' | int32 | float64 | astype('int32')",
        (("np.array([1.7, 2.0])", "np.array([1.7, 2.0]).round().astype('int32')"),),
    ),
    Mistake(
        "A value of another shape into a variable",
        """
w = mm.get_variable("w", "d_model:4")
step = mm.compile(graph, mesh, fetches=[w])
step.assign({"w": np.zeros(7)})  # here
""",
        "VariableError: variable 'w' | [d_model=4] | (7,) | array of shape (4,)",
        (("np.zeros(7)", "np.zeros(4)"),),
    ),
    Mistake(
        "Variables of another layout",
        """
w = mm.get_variable("w", "d_model:4")
first = mm.compile(graph, mesh, "d_model:rows", fetches=[w])
second = mm.compile(graph, mesh, "d_model:cols", fetches=[w], variables=first.variables)  # here
""",
        "VariableError: variable 'w' | d_model=4/rows | d_model=4/cols | same layout",
        (('second = mm.compile(graph, mesh, "d_model:cols"', 'second = mm.compile(graph, mesh, "d_model:rows"'),),
        "d_model",
    ),
    Mistake(
        "A loss that is no number",
        """
w = mm.get_variable("w", "d_model:4")
loss = mm.square(w)
updates = mm.optimize.SGD(0.1).minimize(loss)  # here
""",
        "ShapeError: the loss is | minimize | float32[d_model=4] | mm.reduce_mean()",
        (("mm.square(w)", "mm.reduce_mean(mm.square(w))"),),
    ),
    Mistake(
        "A loss that depends on no variable",
        """
x = mm.placeholder("x", "d_model:4")
w = mm.get_variable("w", "d_model:4", trainable=False)
loss = mm.reduce_mean(mm.square(x * w))
updates = mm.optimize.SGD(0.1).minimize(loss)  # here
""",
        "ShapeError: the loss | depends on none of | [] | trainable",
        ((", trainable=False", ", trainable=True"),),
        "trainable",
    ),
    Mistake(
        "Two optimizers of one name",
        """
w = mm.get_variable("w", "d_model:4")
loss = mm.reduce_mean(mm.square(w))
updates = mm.optimize.Adam(0.1).minimize(loss)  # here
more = mm.optimize.Adam(0.2).minimize(loss)
""",
        "VariableError: optimizer 'adam' | exists | adam/step | name='adam_2'",
        (("Adam(0.2)", "Adam(0.2, name='adam_2')"),),
    ),
    Mistake(
        "A gradient with respect to a number",
        """
w = mm.get_variable("w", "d_model:4")
loss = mm.reduce_mean(mm.square(w))
grads = mm.gradients(loss, [3.0])  # here
""",
        "ShapeError: gradients | xs[0] is 3.0 | not a Variable or a tensor | mm.get_variable()",
        (
            (
                "grads = mm.gradients(loss, [3.0])",
                'v = mm.get_variable("v", "d_model:4")\ngrads = mm.gradients(loss + mm.reduce_sum(v), [v])',
            ),
        ),
    ),
    Mistake(
        "A seed of another shape",
        """
x = mm.placeholder("x", "d_model:4")
y = x * 2.0
grads = mm.gradients([y], [x], [mm.ones("d_model:5")])  # here
""",
        "ShapeError: gradients | [d_model=5] | multiply [d_model=4] | of shape [d_model=4]",
        (('"d_model:5"', '"d_model:4"'),),
        "d_model",
    ),
    Mistake(
        "A memory limit that cannot be met",
        """
w = mm.get_variable("w", "d_model:256;d_ff:1024")
x = mm.placeholder("x", "batch:8;d_model:256")
y = mm.einsum([x, w], "batch:8;d_ff:1024")
step = mm.plan(graph, "rows:2;cols:2", "batch:rows", fetches=[y], memory_limit="1 MB")  # here
""",
        "ConfigError: the step needs | limit is 1,048,576 | bytes per rank | Split more dimensions",
        (('"batch:rows"', '"batch:rows;d_ff:cols"'),),
        "d_ff",
    ),
    Mistake(
        "A memory limit that is not a number of bytes",
        """
w = mm.get_variable("w", "d_model:4")
step = mm.plan(graph, "rows:2", fetches=[w], memory_limit="1 gigabyte")  # here
""",
        "ConfigError: memory_limit | number of bytes | '1 gigabyte' | '1.5 GB'",
        (("1 gigabyte", "1 GB"),),
    ),
    Mistake(
        "Kernels that do not exist",
        """
w = mm.get_variable("w", "d_model:4")
step = mm.compile(graph, mesh, fetches=[w], kernels="nativ")  # here
""",
        "ConfigError: 'nativ' | no kernels | 'nativ' | Did you mean 'native'?",
        (('"nativ"', '"native"'),),
    ),
    Mistake(
        "An index outside its dimension",
        """
ids = mm.placeholder("ids", "batch:8", "int32")
rows = mm.gather(mm.get_variable("table", "vocab:10;d_model:4"), ids, "vocab")  # here
step = mm.compile(graph, mesh, "batch:rows", fetches=[rows], debug=True)
step(ids=np.array([3, 0, 1, 9, 2, 10, 7, 4]))
""",
        "RangeError: [batch=5] of 'ids' | outside dimension 'vocab' | index 10 | Give 0 to 9",
        ((", 10, ", ", 9, "),),
    ),
    Mistake(
        "A machine that is not described",
        """
w = mm.get_variable("w", "d_model:4")
mm.search_layouts(graph, 2, "tpuv3", fetches=[w], seconds=1)  # here
""",
        "ConfigError: 'tpuv3' | no machine | No such file | tpuv2",
        (('"tpuv3"', '"tpuv2"'),),
    ),
]
