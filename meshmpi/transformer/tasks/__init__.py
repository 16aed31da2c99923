"""What a training run learns, one task a file: `base` says what a task is, `registry` names them."""
