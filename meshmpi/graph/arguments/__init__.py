"""What an argument of a public function may be: read from its annotation, once for all functions.

`checked` wraps a function.  Each argument is converted where its meaning is plain (a tensor for a list of one, a name
for the dimension, a Variable for its value) and refused otherwise, with an error that names function, argument and
cure.  A new kind of argument is a rule in `rules` and a row in `annotations`; a function needs nothing but annotations.
"""

from meshmpi.graph.arguments.checked import asked, check_all, check_takes, checked, named
from meshmpi.graph.arguments.rules import shown

__all__ = ["asked", "check_all", "check_takes", "checked", "named", "shown"]
