"""`mm.fit`: its arguments, its data, evaluation, callbacks, checkpoints to resume from."""

from tests.errors.catalogue.mistake import Mistake

_STEP = """
mesh = mm.SimulatedMesh("rows:2")
x = mm.placeholder("x", "batch:8;d_model:4")
t = mm.placeholder("t", "batch:8", "int32")
w = mm.get_variable("w", "d_model:4")
loss = mm.reduce_mean(mm.square(x @ w - mm.cast(t, "float32")))
updates = mm.optimize.SGD(0.1).minimize(loss)
step = mm.compile(graph, mesh, "batch:rows", fetches={"loss": loss}, updates=updates)
X, T = np.ones((8, 4), "float32"), np.arange(8)


def data(number):
    return {"x": X, "t": T}


"""


def _row(
    title: str, call: str, says: str, cure: tuple[str, str], hint: str = "", kind: str = "ConfigError", more: str = ""
) -> Mistake:
    return Mistake(title, f"{_STEP}{more}{call}  # here\n", f"{kind}: {says}", (cure,), hint)


def _callback(method: str) -> str:
    return f"class Printer(mm.Callback):\n    {method}\n        print('here')\n\n\n"


FITTING = [
    _row(
        "A graph to train in place of a step",
        "mm.fit(graph, data, steps=2)",
        "fit | not a CompiledStep | step is a Graph | Give what mm.compile(...) returned",
        ("graph, data", "step, data"),
        hint="step",
        kind="ArgumentError",
    ),
    _row(
        "A training without its length",
        "mm.fit(step, data)",
        "fit | is missing | the argument steps | steps=...",
        ("data)", "data, steps=2)"),
        kind="ArgumentError",
    ),
    _row(
        "A length counted in epochs",
        "mm.fit(step, data, epochs=2)",
        "fit | no argument | 'epochs' | steps=...",
        ("epochs", "steps"),
        kind="ArgumentError",
    ),
    _row(
        "A length that is a string",
        "mm.fit(step, data, steps='2')",
        "fit | not a whole number | steps is '2' | Give an int",
        ("'2'", "int('2')"),
        kind="ArgumentError",
    ),
    _row("A negative length", "mm.fit(step, data, steps=-1)", "fit | steps | -1 | at least 0", ("-1", "0")),
    _row(
        "One batch of arrays as data",
        "mm.fit(step, {'x': X, 't': T}, steps=2)",
        "data | one mapping | ndarray of shape (8, 4) | Give lambda step: feeds",
        ("{'x': X, 't': T}", "lambda step: {'x': X, 't': T}"),
    ),
    _row(
        "An array as data",
        "mm.fit(step, X, steps=2)",
        "data | is | ndarray of shape (8, 4) | a function of the step's number",
        ("X, steps", "data, steps"),
        hint="data",
    ),
    _row(
        "The name of a file as data",
        "mm.fit(step, 'train.npy', steps=2)",
        "data | is | 'train.npy' | a reader of mm.data",
        ("'train.npy'", "mm.data.reader({'x': X, 't': T}, batch=8)"),
    ),
    _row(
        "Pairs of arrays as data",
        "mm.fit(step, [(X, T)], steps=2)",
        "the data | not feeds | (ndarray of shape (8, 4), ndarray of shape (8,)) for step 0 | Give feeds by name",
        ("(X, T)", "{'x': X, 't': T}"),
        kind="DataError",
    ),
    _row(
        "Data that return nothing",
        "mm.fit(step, lambda number: print(number), steps=2)",
        "the data | not feeds | None for step 0 | {'x': ..., 't': ...}",
        ("print(number)", "{'x': X, 't': T}"),
        kind="DataError",
    ),
    _row(
        "Data that take no number of the step",
        "mm.fit(step, lambda: {'x': X, 't': T}, steps=2)",
        "fit: data | too many | called with 1 argument | takes 1 argument",
        ("lambda:", "lambda argument:"),
        kind="ArgumentError",
    ),
    _row(
        "Data under another name",
        "mm.fit(step, lambda number: {'xx': X, 't': T}, steps=2)",
        "'xx' | no placeholder | 'xx' | Did you mean 'x'?",
        ("'xx'", "'x'"),
        kind="FeedError",
    ),
    _row(
        "Data without one of the feeds",
        "mm.fit(step, lambda number: {'x': X}, steps=2)",
        "placeholder 't' | not fed | int32[batch=8] | step(x=..., t=...)",
        ("{'x': X}", "{'x': X, 't': T}"),
        kind="FeedError",
    ),
    _row(
        "Data that end before the training",
        "mm.fit(step, iter([data(0)]), steps=2)",
        "the data | before the run does | after 1 batches | Give fewer steps",
        ("steps=2", "steps=1"),
        hint="steps",
        kind="DataError",
    ),
    _row(
        "A reader of other batches than the step's",
        "mm.fit(step, mm.data.reader({'x': X, 't': T}, batch=4), steps=2)",
        "the reader | batches of 4 | the step have 8 | batch=8",
        ("batch=4", "batch=8"),
        kind="DataError",
    ),
    _row(
        "A reader without a column for a feed",
        "mm.fit(step, mm.data.reader({'x': X, 'labels': T}, batch=8), steps=2)",
        "'t' | no column | for the feed 't' | The columns are x, labels",
        ("'labels'", "'t'"),
        hint="t",
        kind="DataError",
    ),
    _row(
        "A number in place of an evaluation",
        "mm.fit(step, data, steps=2, evaluate=0.5)",
        "fit | not a function | evaluate is 0.5 | Give a function",
        ("0.5", "lambda: 0.5"),
        hint="lambda",
        kind="ArgumentError",
    ),
    _row(
        "An evaluation that returns an array",
        "mm.fit(step, data, steps=2, evaluate=lambda: X[0])",
        "evaluate() | not every value is a number | ndarray of shape (4,) | Return a loss",
        ("X[0]", "{'loss': X[0].sum()}"),
    ),
    _row(
        "An evaluation that takes the step",
        "mm.fit(step, data, steps=2, evaluate=lambda step: 0.5)",
        "fit: evaluate | missing a required argument | called with 0 arguments | takes 0 arguments",
        ("lambda step:", "lambda:"),
        hint="lambda",
        kind="ArgumentError",
    ),
    _row(
        "When to evaluate, but not what",
        "mm.fit(step, data, steps=2, evaluate_every=1)",
        "fit | nothing says what to evaluate | evaluate_every is 1 | Give evaluate=",
        ("evaluate_every=1", "evaluate_every=1, evaluate=lambda: 0.5"),
    ),
    _row(
        "The class of a callback",
        "mm.fit(step, data, steps=2, callbacks=[Printer])",
        "fit | not a Callback | callbacks[0] is the type Printer | an object of it",
        ("[Printer]", "[Printer()]"),
        hint="Printer",
        kind="ArgumentError",
        more=_callback("def on_end(self, stopped_by):"),
    ),
    _row(
        "A function as a callback",
        "mm.fit(step, data, steps=2, callbacks=[print])",
        "fit | not a Callback | callbacks[0] is the | Subclass mm.Callback",
        ("[print]", "[mm.Callback()]"),
        kind="ArgumentError",
    ),
    Mistake(
        "A callback with a method that nobody calls",
        """
class Printer(mm.Callback):  # here
    def on_steps(self, step):
        print(step.loss)
""",
        "ArgumentError: Printer | never calls | on_steps() | Did you mean 'on_step'?",
        (("on_steps", "on_step"),),
    ),
    Mistake(
        "A callback whose method takes too little",
        """
class Printer(mm.Callback):  # here
    def on_step(self):
        print("a step")
""",
        "ArgumentError: Printer | with 1 argument besides self | on_step(self) | def on_step(self, step)",
        (("(self)", "(self, step)"),),
    ),
    Mistake(
        "A callback that asks for its run too early",
        """
class Printer(mm.Callback):
    def __init__(self):
        self.folder = self.run.folder  # here


printer = Printer()
""",
        "MissingNameError: Printer | has no run yet | run | from on_begin() on",
        (("__init__(self)", "on_begin(self, done, last)"),),
    ),
    _row(
        "A list of what to log",
        "mm.fit(step, data, steps=2, log=['plot'])",
        "fit | not a whole number or a dict | log is ['plot'] | or a dict, by name",
        ("['plot']", "dict(plot=False)"),
        kind="ArgumentError",
    ),
    _row(
        "A misspelt setting of the log",
        "mm.fit(step, data, steps=2, log={'evry': 10})",
        "fit: log | not a setting | evry | Did you mean 'every'?",
        ("evry", "every"),
    ),
    _row(
        "A negative interval",
        "mm.fit(step, data, steps=2, log={'every': -5})",
        "fit: log | every | is -5 | at least 1",
        ("-5", "1"),
    ),
    _row(
        "A folder where the interval between checkpoints belongs",
        "mm.fit(step, data, steps=2, checkpoint='saved')",
        "fit | not a whole number or a dict | checkpoint is 'saved' | Give an int",
        ("'saved'", "int(2)"),
        kind="ArgumentError",
    ),
    _row(
        "A misspelt setting of checkpoints",
        "mm.fit(step, data, steps=2, checkpoint={'evry': 1})",
        "fit: checkpoint | not a setting | evry | Did you mean 'every'?",
        ("evry", "every"),
    ),
    _row(
        "A guard that is not one of the choices",
        "mm.fit(step, data, steps=2, guard={'non_finite': 'stopp'})",
        "fit: guard | non_finite | 'stopp' | Did you mean 'stop'?",
        ("stopp", "stop"),
    ),
    _row(
        "Steps to skip, but no tensor that says which",
        "mm.fit(step, data, steps=2, guard={'non_finite': 'skip'})",
        "fit: guard | no tensor says which | 'skip' | finite=optimizer.finite",
        ("guard={'non_finite': 'skip'}", "finite=None"),
        hint="finite",
    ),
    _row(
        "Resuming what was never saved",
        "mm.fit(step, data, steps=2, resume=True)",
        "run/checkpoints | no checkpoint | there is no | Start without resuming",
        (", resume=True", ", resume=False"),
        hint="resume",
        kind="CheckpointError",
    ),
    _row(
        "The folder of a run in place of its checkpoint",
        "mm.fit(step, data, steps=4, folder='more', resume='first')",
        "first | no checkpoint | manifest.json is missing | Give first/checkpoints/step-00000002",
        ("resume='first'", "resume='first/checkpoints/step-00000002'"),
        kind="CheckpointError",
        more="mm.fit(step, data, steps=2, folder='first', log={'plot': False})\n",
    ),
    _row(
        "A loss that the step does not return",
        "mm.fit(step, data, steps=2, loss='lose')",
        "loss= | not a scalar that the step returns | 'lose' | Did you mean 'loss'?",
        ("'lose'", "'loss'"),
    ),
    _row(
        "A number as the learning rate to print",
        "mm.fit(step, data, steps=2, learning_rate=0.1)",
        "fit | not a tensor or a string | learning_rate is 0.1 | a tensor that the step fetches",
        ("learning_rate=0.1", "learning_rate='loss'"),
        hint="loss",
        kind="ArgumentError",
    ),
    _row(
        "A step that updates nothing",
        "mm.fit(step, data, steps=2)",
        "fit | nothing would be learned | updates no variable | updates=optimizer.minimize(loss)",
        (", updates=[])", ", updates=updates)"),
        more='step = mm.compile(graph, mesh, "batch:rows", fetches={"loss": loss}, updates=[])\n',
    ),
    _row(
        "A silent run by None",
        "mm.fit(step, data, steps=2, say=None)",
        "fit | not a function | say is None | Give a function",
        ("None", "lambda line: None"),
        hint="lambda",
        kind="ArgumentError",
    ),
]
