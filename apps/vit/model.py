"""A Vision Transformer (Dosovitskiy et al. 2021): an image is a sequence of patches.

Its size is that of a toy; every dimension has a name, so that layouts split batch, heads and feed-forward layers as
those of a language model.
"""

from __future__ import annotations

from typing import NamedTuple

import meshmpi as mm

PATCH = 4
CLASSES = mm.Dimension("classes", 10)


class Config(NamedTuple):
    """Sizes and training."""

    batch: int = 128
    layers: int = 4
    d_model: int = 64
    heads: int = 4
    d_ff: int = 128
    dropout: float = 0.1
    learning_rate: float = 2e-3
    steps: int = 1000


class Network(NamedTuple):
    """A graph for one batch: feeds ``images`` (uint8 [batch, height, width]) and ``labels`` (int32 [batch])."""

    graph: mm.Graph
    loss: mm.Tensor  # mean cross-entropy
    right: mm.Tensor  # number of images whose class is the most probable one
    finite: mm.Tensor | None  # of a training step
    updates: list[mm.Update]


def patches(images: mm.Tensor, size: int) -> mm.Tensor:
    """[batch, patches, pixels] in [0, 1] of images [batch, size, size]."""
    batch, side = images.shape[0], size // PATCH
    tall, wide = ("tall", side), ("wide", side)
    cut = mm.reshape(images, [batch, tall, ("row", PATCH), wide, ("column", PATCH)])
    cut = mm.transpose(cut, [batch, mm.Dimension(*tall), mm.Dimension(*wide), *cut.shape[2:3], *cut.shape[4:5]])
    flat = mm.reshape(cut, [batch, ("patches", side * side), ("pixels", PATCH * PATCH)])
    return mm.multiply(mm.cast(flat, "float32"), 1 / 255)


def logits(config: Config, x: mm.Tensor, is_training: bool) -> mm.Tensor:
    """[batch, classes] of patches."""
    d_model, heads = mm.Dimension("d_model", config.d_model), mm.Dimension("heads", config.heads)
    d_kv, d_ff = mm.Dimension("d_kv", config.d_model // config.heads), mm.Dimension("d_ff", config.d_ff)
    place = mm.get_variable("places", [x.shape[1], d_model], initializer=mm.random_normal_initializer(stddev=0.02))
    y = mm.dense(x, d_model, name="patch") + place
    for layer in range(config.layers):
        with mm.scope(f"layer_{layer}"):
            z = mm.multihead_attention(mm.layer_norm(y, d_model, name="norm_1"), None, None, d_kv, heads)
            y = y + mm.dropout(z, is_training, rate=config.dropout)
            z = mm.dense_relu_dense(mm.layer_norm(y, d_model, name="norm_2"), d_ff, activation="gelu")
            y = y + mm.dropout(z, is_training, rate=config.dropout)
    pooled = mm.reduce_mean(mm.layer_norm(y, d_model, name="norm"), reduced_dim="patches")
    return mm.dense(pooled, CLASSES, name="classes")


def build(config: Config, batch: int, size: int, is_training: bool) -> Network:
    """The network for ``batch`` images of ``size`` x ``size``, with the updates of a training step or without."""
    with mm.Graph() as graph:
        images = mm.placeholder("images", [("batch", batch), ("height", size), ("width", size)], "uint8")
        labels = mm.placeholder("labels", [("batch", batch)], "int32")
        y = logits(config, patches(images, size), is_training)
        loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(y, labels, CLASSES))
        right = mm.reduce_sum(mm.cast(mm.equal(mm.argmax(mm.stop_gradient(y), CLASSES), labels), "int32"))
        if not is_training:
            return Network(graph, loss, right, None, [])
        rate = mm.schedules.product(
            config.learning_rate, mm.schedules.linear_warmup(50), mm.schedules.cosine_decay(config.steps)
        )
        optimizer = mm.optimize.AdamW(rate, weight_decay=0.05)
        updates = optimizer.minimize(loss, watch=[loss])
    return Network(graph, loss, right, optimizer.finite, updates)
