"""Shapes and data types of operations."""

from tests.errors.catalogue.mistake import Mistake

SHAPES = [
    Mistake(
        "Sizes of one dimension disagree in a product",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:5;d_ff:12")
y = mm.einsum([x, w], "batch:8;d_ff:12")  # here
""",
        "ShapeError: einsum | 'd_model' | 4 and 5 | make the sizes equal, here to d_model=4",
        (('"d_model:5', '"d_model:4'),),
        "4",
    ),
    Mistake(
        "Sizes of one dimension disagree in a sum",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
b = mm.placeholder("b", "d_model:5")
y = x + b  # here
""",
        "ShapeError: add | 'd_model' | has sizes 4 and 5 | mm.rename_dimension()",
        (("x + b", 'x + mm.rename_dimension(b, "d_model", "other")'),),
    ),
    Mistake(
        "An output with a size that is not the dimension's",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
y = mm.reduce_sum(x, output_shape="batch:4")  # here
""",
        "ShapeError: reduce_sum | batch=4 | x [batch=8, d_model=4] | Its dimension is batch=8",
        (('"batch:4"', '"batch:8"'),),
        "8",
    ),
    Mistake(
        "Data types that do not mix",
        """
x = mm.placeholder("x", "batch:8")
i = mm.placeholder("i", "batch:8", "int32")
y = x + i  # here
""",
        "ShapeError: add | data types | float32 and int32 | mm.cast",
        (("x + i", 'x + mm.cast(i, "float32")'),),
    ),
    Mistake(
        "A product of two data types",
        """
x = mm.placeholder("x", "batch:8;d_model:4", "bfloat16")
w = mm.get_variable("w", "d_model:4;d_ff:12")
y = mm.einsum([x, w], "batch:8;d_ff:12")  # here
""",
        "ShapeError: einsum | data types | bfloat16 and float32 | mm.cast",
        (("[x, w]", '[mm.cast(x, "float32"), w]'),),
    ),
    Mistake(
        "A fraction added to whole numbers",
        """
i = mm.placeholder("i", "batch:8", "int32")
y = i + 0.5  # here
""",
        "ShapeError: add | int32 | 0.5 | mm.cast",
        (("i + 0.5", 'mm.cast(i, "float32") + 0.5'),),
    ),
    Mistake(
        "A function of whole numbers that needs floats",
        """
i = mm.placeholder("i", "batch:8", "int32")
y = mm.exp(i)  # here
""",
        "ShapeError: exp | data type | int32 | mm.cast",
        (("exp(i)", 'exp(mm.cast(i, "float32"))'),),
    ),
    Mistake(
        "The mean of whole numbers",
        """
i = mm.placeholder("i", "batch:8", "int32")
y = mm.reduce_mean(i)  # here
""",
        "ShapeError: reduce_mean | int32 | [batch=8] | mm.cast",
        (("mean(i)", 'mean(mm.cast(i, "float32"))'),),
    ),
    Mistake(
        "A condition that is no truth value",
        """
x = mm.placeholder("x", "batch:8")
y = mm.where(x, x, 0.0)  # here
""",
        "ShapeError: where | not bool | float32 | x > 0",
        (("where(x,", "where(x > 0,"),),
    ),
    Mistake(
        "A reshape that loses elements",
        """
x = mm.placeholder("x", "batch:8;d_model:6")
y = mm.reshape(x, "batch:8;heads:4;d_k:2")  # here
""",
        "ShapeError: reshape | [batch=8, heads=4, d_k=2] | has 48 elements, [batch=8, heads=4, d_k=2] has 64"
        " | product is 48",
        (("heads:4;d_k:2", "heads:3;d_k:2"),),
        "3",
    ),
    Mistake(
        "A transpose that adds a dimension",
        """
x = mm.placeholder("x", "batch:8;d_model:6")
y = mm.transpose(x, "d_model:6;length:8")  # here
""",
        "ShapeError: transpose | [d_model=6, length=8] | [batch=8, d_model=6] | the dimensions of [batch=8, d_model=6]",
        (("length:8", "batch:8"),),
        "batch",
    ),
    Mistake(
        "Joining tensors that differ in another dimension",
        """
x = mm.placeholder("x", "batch:8;length:6")
y = mm.placeholder("y", "batch:4;length:6")
z = mm.concat([x, y], "length")  # here
""",
        "ShapeError: concat | 'length' | [batch=4, length=6] | here to float32[batch=8]",
        (('"batch:4;', '"batch:8;'),),
        "8",
    ),
    Mistake(
        "A slice beyond the end",
        """
x = mm.placeholder("x", "batch:8;length:6")
y = mm.slice(x, 3, 4, "length")  # here
""",
        "ShapeError: slice | 'length' | [3:7:1] | Take 1 to 3 elements",
        (("3, 4,", "3, 3,"),),
    ),
    Mistake(
        "A split that does not come out even",
        """
x = mm.placeholder("x", "batch:8;length:6")
parts = mm.split(x, "length", 4)  # here
""",
        "ShapeError: split | 'length' (6) | 4 equal parts | [2, 2, 1, 1]",
        (('"length", 4', '"length", [2, 2, 1, 1]'),),
        "2",
    ),
    Mistake(
        "Parts that do not add up",
        """
x = mm.placeholder("x", "batch:8;length:6")
parts = mm.split(x, "length", [1, 2])  # here
""",
        "ShapeError: split | 'length' | sum to 3 | sum to 6",
        (("[1, 2]", "[1, 5]"),),
        "5",
    ),
    Mistake(
        "Negative padding",
        """
x = mm.placeholder("x", "batch:8;length:6")
y = mm.pad(x, [-1, 0], "length")  # here
""",
        "ShapeError: pad | 'length' | -1 | mm.slice()",
        (('mm.pad(x, [-1, 0], "length")', 'mm.slice(x, 1, 5, "length")'),),
    ),
    Mistake(
        "More of the largest than there are",
        """
x = mm.placeholder("x", "batch:8;vocab:6")
best, where = mm.top_k(x, "vocab", mm.Dimension("k", 7))  # here
""",
        "ShapeError: top_k | 'vocab' | k=7 | 6",
        (("7", "6"),),
    ),
    Mistake(
        "Indices that are floats",
        """
table = mm.get_variable("table", "vocab:10;d_model:4")
ids = mm.placeholder("ids", "batch:8")
rows = mm.gather(table, ids, "vocab")  # here
""",
        "ShapeError: gather | float32 | [batch=8] | mm.cast",
        (("ids, ", 'mm.cast(ids, "int32"), '),),
    ),
    Mistake(
        "A table without the dimension that is looked up",
        """
table = mm.get_variable("table", "words:10;d_model:4")
ids = mm.placeholder("ids", "batch:8", "int32")
rows = mm.gather(table, ids, "word")  # here
""",
        "ShapeError: gather | 'word' | [words=10, d_model=4] | Did you mean 'words'?",
        (('"word"', '"words"'),),
    ),
    Mistake(
        "A convolution without a dimension of channels",
        """
image = mm.placeholder("image", "batch:2;height:8;width:8;color:3")
y = mm.conv2d(image, mm.Dimension("maps", 4), channels="colour")  # here
""",
        "ShapeError: conv2d: image | 'colour' | color=3 | Did you mean 'color'?",
        (('"colour"', '"color"'),),
    ),
    Mistake(
        "An image smaller than the filter",
        """
image = mm.placeholder("image", "batch:2;height:2;width:8;color:3")
y = mm.conv2d(image, mm.Dimension("maps", 4), padding="VALID")  # here
""",
        "ShapeError: conv2d | height=2 | 3 elements | padding='SAME'",
        (("VALID", "SAME"),),
    ),
    Mistake(
        "Attention heads that share a name with the model",
        """
x = mm.placeholder("x", "batch:2;length:4;d_model:8")
y = mm.dense(x, mm.Dimension("d_model", 8))  # here
z = y
""",
        "ShapeError: dense | 'd_model' | x [batch=2, length=4, d_model=8] | mm.rename",
        (('Dimension("d_model", 8)', 'Dimension("d_ff", 8)'),),
        "d_ff",
    ),
    Mistake(
        "A NumPy array where a tensor belongs",
        """
x = mm.placeholder("x", "batch:8")
y = x * np.ones(8)  # here
""",
        "ShapeError: ndarray | multiply | (8,) | mm.placeholder",
        (("np.ones(8)", 'mm.placeholder("ones", "batch:8")'),),
    ),
    Mistake(
        "A tensor as a condition of Python",
        """
x = mm.placeholder("x", "batch:8")
y = x if x > 0 else -x  # here
""",
        "TypeError: greater | if or while | bool[batch=8] | mm.where(condition, a, b)",
        (("x if x > 0 else -x", "mm.where(x > 0, x, -x)"),),
    ),
    Mistake(
        "The length of a tensor",
        """
x = mm.placeholder("x", "batch:8;length:6")
n = len(x)  # here
""",
        "TypeError: Tensor x | len() | [batch=8, length=6] | x.shape.size",
        (("len(x)", "x.shape.dim('length').size"),),
    ),
    Mistake(
        "A loop over a tensor",
        """
x = mm.placeholder("x", "batch:8;length:6")
rows = [row * 2.0 for row in x]  # here
""",
        "TypeError: Tensor x | iterate | [batch=8, length=6] | mm.unstack(x, dim)",
        (("in x", 'in mm.unstack(x, "batch")'),),
    ),
    Mistake(
        "An element by its position",
        """
x = mm.placeholder("x", "batch:8;length:6")
first = x[0]  # here
""",
        "TypeError: Tensor x | index | [batch=8, length=6] | mm.slice(x, begin, size, dim)",
        (("x[0]", 'mm.slice(x, 0, 1, "batch")'),),
    ),
    Mistake(
        "The number in a tensor",
        """
x = mm.placeholder("x", "batch:8")
total = mm.reduce_sum(x)
print(float(total))  # here
""",
        "TypeError: reduce_sum | float() | float32[] | mm.compile(",
        (("print(float(total))", "step = mm.compile(graph, mesh, fetches=[total])\nprint(step(x=np.ones(8))[total])"),),
    ),
    Mistake(
        "Writing into a tensor",
        """
x = mm.placeholder("x", "batch:8;length:6")
x[0] = 1.0  # here
""",
        "TypeError: Tensor x | cannot be written | [batch=8, length=6] | mm.where(condition, new, x)",
        (("x[0] = 1.0", 'x = mm.where(mm.equal(mm.range(mm.Dimension("batch", 8)), 0), 1.0, x)'),),
    ),
    Mistake(
        "A tensor made into an array",
        """
x = mm.placeholder("x", "batch:8")
y = np.asarray(x * 2.0)  # here
""",
        "TypeError: multiply | array | float32[batch=8] | mm.compile(",
        (("np.asarray(x * 2.0)", "mm.compile(graph, mesh, fetches=[x * 2.0])(x=np.ones(8))"),),
    ),
    Mistake(
        "A shape without names",
        """
x = mm.placeholder("x", (8, 4))  # here
""",
        "ShapeError: 8 | not a dimension | 8 | mm.Dimension(name, size)",
        (("(8, 4)", '[mm.Dimension("batch", 8), ("d_model", 4)]'),),
    ),
    Mistake(
        "A dimension without a size",
        """
x = mm.placeholder("x", "batch:8;d_model:")  # here
""",
        "ShapeError: 'd_model' | size | '' | an integer of at least 1",
        (('d_model:"', 'd_model:1"'),),
    ),
    Mistake(
        "A negative size",
        """
x = mm.placeholder("x", [("batch", -1)])  # here
""",
        "ShapeError: 'batch' | size | -1 | an integer of at least 1",
        (("-1", "1"),),
    ),
]
