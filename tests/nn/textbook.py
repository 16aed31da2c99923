"""Transformers as a textbook writes them, in NumPy float64: the yardstick of the models' tests."""

from __future__ import annotations

import numpy as np

from meshmpi.transformer.models import TransformerConfig


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Textbook:
    """Forward passes of a config, given its variables by name; no dropout."""

    def __init__(self, config: TransformerConfig, variables: dict[str, np.ndarray]):
        self.config, self.v = config, variables

    def norm(self, x, name):
        c = self.config
        centred = x - x.mean(-1, keepdims=True) if c.norm == "layer" else x
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + c.norm_epsilon)
        return y * self.v.get(f"{name}/scale", 1.0) + self.v.get(f"{name}/bias", 0.0)

    def attention(self, name, x, memory, mask):
        h, k = self.config.heads, self.config.d_kv

        def project(a, which):
            bias = self.v.get(f"{name}/{which}_bias", np.zeros((h, k)))
            return np.einsum("nld,dhk->nhlk", a, self.v[f"{name}/{which}"]) + bias[None, :, None]

        logits = project(x, "q") @ project(memory, "k").swapaxes(2, 3) * self.config.attention_scale
        logits = np.where(mask, logits, -np.inf)
        y = np.einsum("nhlk,hkd->nld", softmax(logits) @ project(memory, "v"), self.v[f"{name}/o"])
        return y + self.v.get(f"{name}/o_bias", 0.0)

    def feed_forward(self, name, x):
        act = {"relu": lambda a: np.maximum(a, 0), "gelu": gelu}[self.config.activation]
        h = act(x @ self.v[f"{name}/wi/kernel"] + self.v.get(f"{name}/wi/bias", 0.0))
        return h @ self.v[f"{name}/wo/kernel"] + self.v.get(f"{name}/wo/bias", 0.0)

    def layers(self, stack, x, mask, memory=None, memory_mask=None):
        for i in range(self.config.layers):
            p = f"{stack}/layer_{i:03d}"
            h = self.norm(x, f"{p}/attention_norm")
            x = x + self.attention(f"{p}/attention", h, h, mask)
            if memory is not None:
                h = self.norm(x, f"{p}/encdec_attention_norm")
                x = x + self.attention(f"{p}/encdec_attention", h, memory, memory_mask)
            h = self.norm(x, f"{p}/feed_forward_norm")
            x = x + self.feed_forward(f"{p}/feed_forward", h)
        return self.norm(x, f"{stack}/final_norm")

    def embed(self, prefix, tokens):
        x = self.v[f"{prefix}embedding"][tokens]
        if self.config.learned_positions:
            x = x + self.v[f"{prefix}positions"][: tokens.shape[1]]
        return x

    def logits(self, x, embedding):
        c = self.config
        weight = self.v[embedding].T if c.tied_softmax else self.v["decoder/softmax"]
        return (x @ weight) * c.softmax_scale

    def lm(self, tokens):
        mask = np.tril(np.ones((tokens.shape[1],) * 2, bool))
        x = self.layers("decoder", self.embed("decoder/", tokens), mask)
        return self.logits(x, "decoder/embedding")

    def encoder_decoder(self, source, tokens):
        seen = (source != self.config.padding_id)[:, None, None, :]
        memory = self.layers("encoder", self.embed("", source), seen)
        mask = np.tril(np.ones((tokens.shape[1],) * 2, bool))
        x = self.layers("decoder", self.embed("", tokens), mask, memory, seen)
        return self.logits(x, "embedding")


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def cross_entropy(logits, targets):
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_z - np.take_along_axis(logits, targets[..., None].astype(int), -1)[..., 0]
