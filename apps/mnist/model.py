"""A network of the class of LeNet-5 and its training step; knows no mesh and no layout.

Two convolutions of 5 x 5 with pooling, a hidden layer, ten classes.  Source: LeCun et al. 1998.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import meshmpi as mm


@dataclass(frozen=True)
class Config:
    """Sizes and training.

    Attributes:
        features, deep: Channels of the two convolutions.
        batch: Images of one training step, of all ranks together.
        steps: Training steps, over which the learning rate falls to 0.
        learning_rate: Initial rate of Adam.
        dropout: Share of the hidden layer that is dropped in training.
        dtype: In which everything is computed.
    """

    height: int = 28
    width: int = 28
    features: int = 16
    deep: int = 32
    hidden: int = 128
    batch: int = 120
    steps: int = 1000
    learning_rate: float = 2e-3
    dropout: float = 0.3
    dtype: str = "float32"


CLASSES = mm.Dimension("classes", 10)


class Network(NamedTuple):
    """A graph for one batch: feeds ``images`` (uint8) and ``labels``.

    Attributes:
        graph: The graph.
        loss: Mean cross-entropy.
        right: Number of images whose class is the most probable one.
        updates: Updates of a training step; empty when not training.
    """

    graph: mm.Graph
    loss: mm.Tensor
    right: mm.Tensor
    updates: list[mm.Update]


def logits(config: Config, images: mm.Tensor, is_training: bool) -> mm.Tensor:
    """[batch, classes] of images [batch, height, width, channels] in [0, 1]."""
    y = mm.conv2d(images, mm.Dimension("features", config.features), (5, 5), activation="relu", name="conv1")
    y = mm.max_pool2d(y)
    y = mm.conv2d(y, mm.Dimension("deep", config.deep), (5, 5), activation="relu", name="conv2")
    y = mm.max_pool2d(y)
    y = mm.dense(
        y, mm.Dimension("hidden", config.hidden), ["height", "width", "deep"], activation="relu", name="hidden"
    )
    y = mm.dropout(y, is_training, rate=config.dropout)
    return mm.dense(y, CLASSES, name="classes")


def build(config: Config, batch: int, is_training: bool) -> Network:
    """The network for ``batch`` images, with the updates of a training step or without."""
    with mm.Graph() as graph:
        shape = mm.Shape([("batch", batch), ("height", config.height), ("width", config.width)])
        raw = mm.placeholder("images", shape, "uint8")
        labels = mm.placeholder("labels", [("batch", batch)], "int32")
        images = mm.multiply(mm.cast(raw, config.dtype), 1 / 255)
        images = mm.reshape(images, [*shape, ("channels", 1)])
        y = logits(config, images, is_training)
        loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(y, labels, CLASSES))
        hits = mm.equal(mm.argmax(mm.stop_gradient(y), CLASSES), labels)
        right = mm.reduce_sum(mm.cast(hits, "int32"))
        updates: list[mm.Update] = []
        if is_training:
            falling = mm.schedules.cosine_decay(config.steps)
            rate = mm.schedules.product(config.learning_rate, falling)
            updates = mm.optimize.Adam(rate).minimize(loss)
    return Network(graph, loss, right, updates)
