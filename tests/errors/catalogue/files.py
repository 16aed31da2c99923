"""Readers of data, steps and checkpoints that are given the wrong file, array or argument."""

from tests.errors.catalogue.mistake import Mistake

_ROWS = """
from pathlib import Path

X, T = np.ones((16, 4), "float32"), np.arange(16)
"""
_STEP = """
mesh = mm.SimulatedMesh("rows:2")
x = mm.placeholder("x", "batch:8;d_model:4")
w = mm.get_variable("w", "d_model:4")
y = mm.einsum([x, w], ["batch"])
step = mm.compile(graph, mesh, fetches={"y": y})
X = np.ones((8, 4), "float32")
"""
_SAVED = (
    _STEP
    + """
from pathlib import Path

from meshmpi import checkpoint

saved = checkpoint.save("run", step.variables, 1, {})
"""
)


def _data(title: str, lines: str, says: str, cure: tuple[str, str], hint: str = "", kind: str = "DataError") -> Mistake:
    return Mistake(title, f"{_ROWS}{lines}  # here\n", f"{kind}: {says}", (cure,), hint)


def _step(title: str, lines: str, says: str, cure: tuple[str, str], hint: str = "", kind: str = "FeedError") -> Mistake:
    return Mistake(title, f"{_STEP}{lines}  # here\n", f"{kind}: {says}", (cure,), hint)


def _saved(
    title: str, lines: str, says: str, cure: tuple[str, str], hint: str = "", kind: str = "CheckpointError"
) -> Mistake:
    return Mistake(title, f"{_SAVED}{lines}  # here\n", f"{kind}: {says}", (cure,), hint)


FILES = [
    _data(
        "A text as a .npy file",
        "Path('x.npy').write_text('1 2 3')\nreader = mm.data.reader({'x': 'x.npy'}, batch=4)",
        "x.npy | not a .npy file | begins with b'1 2 3' | numpy.save(path, array)",
        ("Path('x.npy').write_text('1 2 3')", "np.save('x.npy', X)"),
    ),
    _data(
        "An archive of arrays as a column",
        "np.savez('x.npz', x=X)\nreader = mm.data.reader({'x': 'x.npz'}, batch=4)",
        "x.npz | not a .npy file | begins with b'PK | numpy.save(path, array)",
        ("'x.npz'}", "np.load('x.npz')['x']}"),
        hint="np",
    ),
    _data(
        "A file that was cut",
        "np.save('x.npy', X)\nPath('x.npy').write_bytes(b'\\x93NUMPY')\n"
        "reader = mm.data.reader({'x': 'x.npy'}, batch=4)",
        "x.npy | cannot be read | EOF | Give a complete file",
        ("Path('x.npy').write_bytes(b'\\x93NUMPY')", "file = 'x.npy'"),
    ),
    _data(
        "Python objects in a file",
        "np.save('x.npy', np.array([None, 1, 2, 3]))\nreader = mm.data.reader({'x': 'x.npy'}, batch=4)",
        "x.npy | Python objects | holds | an array of numbers",
        ("[None, 1, 2, 3]", "[0, 1, 2, 3]"),
        hint="0",
    ),
    _data(
        "Strings as data",
        "reader = mm.data.reader({'x': np.array(['a', 'b'])}, batch=1)",
        "'x' | not numbers | <U1 | Give an array of numbers",
        ("['a', 'b']", "[0, 1]"),
        hint="0",
    ),
    _data(
        "Rows of different lengths as data",
        "reader = mm.data.reader({'x': [[1.0], [1.0, 2.0]]}, batch=1)",
        "'x' | not an array | inhomogeneous | rows of one length",
        ("[1.0]", "[0.0, 1.0]"),
        hint="0",
    ),
    _data(
        "An array without the name of its feed",
        "reader = mm.data.reader(X, batch=4)",
        "data.reader | not a string or a path or a dict | source is ndarray of shape (16, 4) | or a dict",
        ("X, batch", "dict(x=X), batch"),
        kind="ArgumentError",
    ),
    _data(
        "A misspelt file",
        "np.save('train.npy', X)\nreader = mm.data.reader('trian.npy', batch=4)",
        "trian.npy | does not exist | trian.npy | Did you mean 'train.npy'?",
        ("'trian.npy'", "'train.npy'"),
    ),
    _data(
        "A file of another format",
        "Path('x.csv').write_text('1,2')\nreader = mm.data.reader('x.csv', batch=1)",
        "x.csv | no known format | x.csv | .npy files",
        (
            "Path('x.csv').write_text('1,2')\nreader = mm.data.reader('x.csv'",
            "np.save('x.npy', X)\nreader = mm.data.reader('x.npy'",
        ),
    ),
    _data(
        "An empty folder as data",
        "import os\n\nos.mkdir('images')\nreader = mm.data.reader('images', batch=4)",
        "images | empty | the folder images | files of data",
        ("os.mkdir('images')", "os.mkdir('images')\nnp.save('images/data.npy', X)"),
    ),
    _data(
        "A column that the file does not have",
        "np.save('images.npy', X)\nreader = mm.data.reader('images.npy', batch=4, columns={'x': 'image'})",
        "images.npy | no column | 'image' for 'x' | Its columns: images",
        ("'image'", "'images'"),
    ),
    _data(
        "Columns of different lengths",
        "reader = mm.data.reader({'x': X, 't': T[:10]}, batch=4)",
        "columns | different numbers of rows | 'x' 16, 't' 10 | columns of the same rows",
        ("T[:10]", "T"),
        hint="T",
    ),
    _data(
        "Files of one column that differ in type",
        "import os\n\nos.mkdir('x')\nnp.save('x/a.npy', X)\nnp.save('x/b.npy', X.astype('float64'))\n"
        "reader = mm.data.reader({'x': 'x'}, batch=4)",
        "x/a.npy | has rows | float32[4], x/b.npy float64[4] | rows of one shape and type",
        ("X.astype('float64')", "X"),
        hint="X",
    ),
    _data(
        "A batch of another framework's name",
        "reader = mm.data.reader({'x': X}, batch_size=4)",
        "data.reader | no argument | 'batch_size' | Did you mean 'batch'?",
        ("batch_size", "batch"),
        kind="ArgumentError",
    ),
    _data(
        "Columns chosen of arrays",
        "reader = mm.data.reader({'x': X, 't': T}, batch=4, columns=['x'])",
        "columns= | for a file with columns | the source is a mapping | Leave them out: its keys are the feeds",
        (", 't': T}, batch=4, columns=['x']", "}, batch=4"),
        hint="4",
    ),
    _data(
        "A loop over a reader",
        "reader = mm.data.reader({'x': X}, batch=4)\nbatches = list(reader)",
        "a reader | not a list of batches | 16 rows | mm.fit(step, reader, steps=...)",
        ("list(reader)", "[reader.feeds(step, {'x': None}) for step in range(4)]"),
        kind="ArgumentError",
    ),
    _data(
        "The length of a reader",
        "reader = mm.data.reader({'x': X}, batch=4)\nsteps = len(reader)",
        "a reader | not a list of batches | 16 rows | mm.fit(step, reader, steps=...)",
        ("len(reader)", "int(reader.steps_per_epoch)"),
        hint="reader",
        kind="ArgumentError",
    ),
    _data(
        "A map that takes the columns only",
        "reader = mm.data.reader({'x': X}, batch=4, map=lambda columns: columns)\nfeeds = reader.feeds(0, {'x': None})",
        "data.reader: map | too many positional arguments | called with 2 arguments | takes 2 arguments",
        ("lambda columns:", "lambda columns, arguments:"),
        kind="ArgumentError",
    ),
    _data(
        "A map that returns an array",
        "reader = mm.data.reader({'x': X}, batch=4, map=lambda columns, places: columns['x'])\n"
        "feeds = reader.feeds(0, {'x': None})",
        "map() | returned | ndarray of shape (4, 4) | a mapping with an array for each feed",
        ("columns['x']", "dict(x=columns['x'])"),
        hint="dict",
    ),
    _data(
        "A map that loses rows",
        "reader = mm.data.reader({'x': X}, batch=4, map=lambda columns, places: {'x': columns['x'][:2]})\n"
        "feeds = reader.feeds(0, {'x': None})",
        "map() | was given 4 rows | returned 2 of 'x' | as many rows as were given",
        ("[:2]", "[:4]"),
        hint="4",
    ),
    _data(
        "A function of mm.data that does not exist",
        "reader = mm.data.readers({'x': X}, batch=4)",
        "'meshmpi.data' | has no | 'readers' | Did you mean 'reader'?",
        ("readers(", "reader("),
        kind="MissingNameError",
    ),
    _data(
        "A text as a file of tokens",
        "Path('text.txt').write_text('To be, or not to be')\nreader = mm.data.tokens('text.txt', batch=1, length=4)",
        "text.txt | is text | b'To be, or not to be' | dtype='uint8'",
        ("length=4", "length=4, dtype='uint8'"),
    ),
    _data(
        "A text shorter than a window",
        "T.astype('uint16').tofile('tokens.bin')\nreader = mm.data.tokens('tokens.bin', batch=1, length=32)",
        "tokens.bin | a window of 32 | has 16 tokens | a shorter length",
        ("length=32", "length=8"),
    ),
    _data(
        "Fractions as tokens",
        "np.save('tokens.npy', T * 0.5)\nreader = mm.data.tokens('tokens.npy', batch=1, length=4)",
        "tokens.npy | not a row of tokens | float64 of shape (16,) | whole numbers",
        ("T * 0.5", "T"),
        hint="T",
    ),
    _step(
        "Nothing as a feed",
        "step(x=None)",
        "feed 'x' | not an array | None | array of shape (8, 4)",
        ("None", "np.ones((8, 4))"),
        hint="8",
    ),
    _step(
        "A set as a feed",
        "step(x={1, 2})",
        "feed 'x' | not an array | a set | array of shape (8, 4)",
        ("{1, 2}", "np.ones((8, 4))"),
        hint="8",
    ),
    _step(
        "A feed given twice",
        "step({'x': X}, x=X)",
        "feed 'x' | given twice | 'x' | in the mapping or by name",
        ("{'x': X}, x=X", "{'x': X}"),
        hint="x",
    ),
    _step(
        "A number as the name of a feed",
        "step({0: X})",
        "0 | no placeholder | 0 | Known names: x",
        ("{0: X}", "{'x': X}"),
    ),
    _step(
        "A result as an attribute",
        "result = step(x=X).y",
        "results | no attribute | 'y' | Write result['y']",
        (".y", "['y']"),
        kind="MissingNameError",
    ),
    _step(
        "A layout the wrong way round",
        "step = mm.compile(graph, mesh, 'rows:batch', fetches=[y])",
        "'rows' | to mesh axis 'batch' | {rows: 2} | write 'batch:rows'",
        ("rows:batch", "batch:rows"),
        hint="batch",
        kind="LayoutError",
    ),
    _step(
        "A step without a mesh",
        "step = mm.compile(graph, fetches=[y])",
        "compile | is missing | the argument mesh | mm.compile(graph, mesh, ...)",
        ("graph, fetches", "graph, mesh, fetches"),
        kind="ArgumentError",
    ),
    _step(
        "A mesh by its shape",
        "step = mm.compile(graph, 'rows:2', fetches=[y])",
        "'rows:2' | not a mesh | 'rows:2' | mm.SimulatedMesh(...)",
        ("'rows:2'", "mm.SimulatedMesh('rows:2')"),
        kind="MeshError",
    ),
    _step(
        "A step in place of its variables",
        "step = mm.compile(graph, mesh, fetches=[y], variables=step)",
        "compile | not variables of a step | variables is a CompiledStep | Give step.variables",
        ("variables=step", "variables=step.variables"),
        kind="ArgumentError",
    ),
    Mistake(
        "A mesh without a shape",
        "mesh = mm.Mesh()  # here\n",
        "ArgumentError: Mesh | is missing | the argument shape | mm.Mesh(shape, ...)",
        (("mm.Mesh()", "shape = 'rows:1'\nmesh = mm.Mesh(shape)"),),
    ),
    Mistake(
        "A mesh of a number of ranks",
        "mesh = mm.SimulatedMesh(4)  # here\n",
        "ArgumentError: SimulatedMesh | not the shape of a mesh | shape is 4 | 'rows:2;cols:2'",
        (("4", "'rows:4'"),),
    ),
    Mistake(
        "A mesh of sizes without names",
        "mesh = mm.SimulatedMesh([2, 2])  # here\n",
        "MeshError: 2 | not a mesh axis | 2 | a (name, size) pair",
        (("[2, 2]", "[('rows', 2), ('cols', 2)]"),),
        hint="rows",
    ),
    Mistake(
        "A machine file that is not TOML",
        "from pathlib import Path\n\nPath('mine.toml').write_text('cores: many')\n"
        "machine = mm.load_machine('mine.toml')  # here\n",
        "ConfigError: mine.toml | not valid TOML | line 1 | Correct the line",
        (("mine.toml')", "core')"),),
        hint="core",
    ),
    _saved(
        "A step in place of what is loaded into",
        "checkpoint.load(saved, step)",
        "checkpoint.load | not variables of a step | store is a CompiledStep | Give step.variables",
        ("saved, step)", "saved, step.variables)"),
        kind="ArgumentError",
    ),
    _saved(
        "A checkpoint saved without its step number",
        "checkpoint.save('run', step.variables)",
        "checkpoint.save | is missing | the argument step | checkpoint.save(folder, store, step, about, ...)",
        ("step.variables)", "step.variables, 2, about={})"),
        kind="ArgumentError",
    ),
    _saved(
        "A step number that is a word",
        "checkpoint.save('run', step.variables, 'last', {})",
        "checkpoint.save | not a whole number | step is 'last' | Give an int",
        ("'last'", "int(2)"),
        kind="ArgumentError",
    ),
    _saved(
        "The folder of all checkpoints in place of one",
        "checkpoint.load('run', step.variables)",
        "run | no checkpoint | manifest.json is missing | Give run/step-00000001",
        ("load('run'", "load('run/step-00000001'"),
    ),
    _saved(
        "A damaged manifest",
        "Path(saved, 'manifest.json').write_text('{')\ncheckpoint.load(saved, step.variables)",
        "manifest of run/step-00000001 | damaged | 0 whole lines, expected 2 | Remove run/step-00000001",
        ("Path(saved, 'manifest.json').write_text('{')", "print('run/step-00000001')"),
    ),
    _saved(
        "A shard that was cut",
        "Path(saved, 'rank-00000.safetensors').write_bytes(b'')\ncheckpoint.load(saved, step.variables)",
        "shard rank-00000 | damaged | 0 bytes | put a good copy of run/step-00000001/rank-00000.safetensors",
        ("Path(saved, 'rank-00000.safetensors').write_bytes(b'')", "copy = 'run/step-00000001/rank-00000.safetensors'"),
    ),
]
