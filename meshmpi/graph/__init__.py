"""Tensors with named dimensions and what is computed from them; no mesh, no arrays."""

from meshmpi.graph.graph import (
    MOST_NAMED,
    Graph,
    Operation,
    Tensor,
    Update,
    Variable,
    building,
    builds_graphs,
    call_of,
    check_dtype,
    current_graph,
    layer_name,
    only,
    part,
    scope,
    shared_turns,
)
