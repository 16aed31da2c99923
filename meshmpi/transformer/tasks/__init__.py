"""What a training run learns, one task per file: `base` defines a task, `registry` names them."""
