"""Layouts, storage and meshes."""

from tests.errors.catalogue.mistake import Mistake

_MODEL = """
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:4;d_ff:12")
y = mm.einsum([x, w], "batch:8;d_ff:12")
"""

LAYOUTS = [
    Mistake(
        "Two dimensions of one tensor on one axis",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:4;d_ff:12")  # here
y = mm.einsum([x, w], "batch:8;d_ff:12")
step = mm.compile(graph, mesh, "d_model:cols;d_ff:cols", fetches=[y])
""",
        "LayoutError: tensor [d_model=4, d_ff=12] | split twice over mesh axis 'cols'"
        " | (size 2): by dimensions 'd_model' and 'd_ff' | Legal here: layout 'd_model:cols;d_ff:rows'",
        (('"d_model:cols;d_ff:cols"', '"d_model:cols;d_ff:rows"'),),
    ),
    Mistake(
        "An axis that the mesh does not have",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch:row", fetches=[y])  # here
""",
        "LayoutError: dimension 'batch' | mesh axis 'row' | {rows: 2, cols: 2} | Did you mean 'rows'?",
        (('"batch:row"', '"batch:rows"'),),
    ),
    Mistake(
        "A dimension that no tensor has",
        _MODEL
        + """
step = mm.compile(graph, mesh, "bacth:rows", fetches=[y])  # here
""",
        "LayoutError: 'bacth' | no tensor has | mesh axis 'rows' | Did you mean 'batch'?",
        (("bacth", "batch"),),
    ),
    Mistake(
        "A rule for models that not all have the dimension",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch:rows;experts:cols", fetches=[y])  # here
""",
        "LayoutError: 'experts' | no tensor has | mesh axis 'cols' | 'experts?'",
        (("experts:", "experts?:"),),
        "experts",
    ),
    Mistake(
        "Two rules for one dimension",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch:rows;batch:cols", fetches=[y])  # here
""",
        "LayoutError: layout 'batch:rows;batch:cols' | dimension 'batch' | 2 times | batch:rows+cols",
        (("batch:rows;batch:cols", "batch:rows+cols"),),
    ),
    Mistake(
        "One axis twice in a rule",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch:rows+rows", fetches=[y])  # here
""",
        "LayoutError: dimension 'batch' | mesh axis 'rows' | twice | batch:rows",
        (("rows+rows", "rows"),),
        "rows",
    ),
    Mistake(
        "A rule without an axis",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch;d_ff:cols", fetches=[y])  # here
""",
        "LayoutError: layout 'batch;d_ff:cols' | no colon | 'batch' | name:value",
        (('"batch;', '"batch:rows;'),),
        "rows",
    ),
    Mistake(
        "Storage over an axis that the layout uses for another dimension",
        """
w = mm.get_variable("w", "d_model:4;d_ff:12", storage="d_model:cols")  # here
step = mm.compile(graph, mesh, "d_ff:cols", fetches=[w])
""",
        "LayoutError: tensor [d_model=4, d_ff=12] | split twice over mesh axis 'cols'"
        " | by dimensions 'd_model' and 'd_ff' | Legal here: layout 'd_ff:rows'",
        (('"d_ff:cols"', '"d_ff:rows"'),),
    ),
    Mistake(
        "Storage rules for a dimension that no variable has",
        _MODEL
        + """
step = mm.compile(graph, mesh, "batch:rows", fetches=[y], storage="d_fff:rows")  # here
""",
        "LayoutError: 'd_fff' | no tensor has | mesh axis 'rows' | Did you mean 'd_ff'?",
        (("d_fff", "d_ff"),),
    ),
    Mistake(
        "A constraint on a dimension that the tensor lacks",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
y = mm.constrain(x, "d_modl:cols")  # here
""",
        "LayoutError: constrain | 'd_modl' | [batch=8, d_model=4] | Did you mean 'd_model'?",
        (("d_modl", "d_model"),),
    ),
    Mistake(
        "A constraint over an axis that the mesh lacks",
        """
x = mm.placeholder("x", "batch:8;d_model:4")
y = mm.constrain(x, "d_model:columns") * 2.0
step = mm.compile(graph, mesh, fetches=[y])  # here
""",
        "LayoutError: 'd_model' | 'columns' | {rows: 2, cols: 2} | cols",
        (("columns", "cols"),),
    ),
    Mistake(
        "A mesh with one axis twice",
        """
m = mm.SimulatedMesh("rows:2;rows:2")  # here
""",
        "MeshError: [rows=2, rows=2] | 'rows' | 2 times | its own name",
        (("rows:2;rows", "rows:2;cols"),),
        "cols",
    ),
    Mistake(
        "A mesh without sizes",
        """
m = mm.SimulatedMesh("rows;cols")  # here
""",
        "MeshError: 'rows;cols' | no colon | 'rows' | name:value",
        (('"rows;cols"', '"rows:2;cols:2"'),),
        "2",
    ),
    Mistake(
        "More ranks than the job has",
        """
m = mm.Mesh("rows:4;cols:2")  # here
""",
        "MeshError: mesh {rows: 4, cols: 2} | needs 8 ranks | communicator has 1 | {rows: 1, cols: 1}",
        (("rows:4;cols:2", "rows:1;cols:1"),),
    ),
    Mistake(
        "A mesh given by names alone",
        _MODEL
        + """
step = mm.compile(graph, "rows:2;cols:2", "batch:rows", fetches=[y])  # here
""",
        "MeshError: 'rows:2;cols:2' | not a mesh | 'rows:2;cols:2' | mm.SimulatedMesh(",
        (('graph, "rows:2;cols:2"', 'graph, mm.SimulatedMesh("rows:2;cols:2")'),),
    ),
    Mistake(
        "A collective over an axis that the mesh lacks",
        """
blocks = [np.ones(2) for _ in range(4)]
mesh.all_reduce(blocks, ("row",))  # here
""",
        "MeshError: mesh {rows: 2, cols: 2} | no axis | 'row' | Did you mean 'rows'?",
        (('("row",)', '("rows",)'),),
    ),
]
