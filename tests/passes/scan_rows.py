"""Broken programs of top_k, block_sum, cumsum and batched indexing: rows for test_verify."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.ir.program import LocalType
from tests.passes.hand import Hand, t

Row = Callable[[Hand], object]
INDEX = t("a k", dtype="int32")


def _top_k(h: Hand, x: LocalType, values: LocalType, index: LocalType, *given: LocalType) -> None:
    inputs = [h.feed("x", x), *(h.feed("given", g) for g in given)]
    h.add("top_k", inputs, values, index, dim="b", k="k")


def _block_sum(h: Hand, x: LocalType, y: LocalType) -> int:
    return h.add("block_sum", [h.feed("x", x)], y, dim="b", blocks="r")


def _cumsum(h: Hand, x: LocalType, y: LocalType, *sums: LocalType) -> None:
    inputs = [h.feed("x", x), *(h.feed("sums", s) for s in sums)]
    h.add("cumsum", inputs, y, dim="b", blocks="r", exclusive=False, reverse=False)


ROWS: dict[str, tuple[Row, str]] = {
    "a top_k along a split dim": (
        lambda h: _top_k(h, t("a b/cols"), t("a k"), INDEX),
        "splits its result in another way",
    ),
    "a top_k with uneven results of blocks": (
        lambda h: _top_k(h, t("a b/cols"), t("a k=3/cols"), t("a k=3/cols", dtype="int32")),
        "takes not one number",
    ),
    "a top_k of more than a block has": (
        lambda h: _top_k(h, t("a b/cols"), t("a k=10/cols"), t("a k=10/cols", dtype="int32")),
        "or more than 4",
    ),
    "a top_k with the index of other elements": (
        lambda h: _top_k(h, t("a b"), t("a k"), INDEX, t("a c", dtype="int32")),
        "an index that is not one of a whole dim",
    ),
    "a top_k of blocks with an index": (
        lambda h: _top_k(h, t("a b/cols"), t("a k/cols"), t("a k/cols", dtype="int32"), t("a b/cols", dtype="int32")),
        "an index that is not one of a whole dim",
    ),
    "sums of blocks of a whole dim": (
        lambda h: _block_sum(h, t("a b"), t("a r=1")),
        "sums blocks of a whole dimension",
    ),
    "sums of too few blocks": (
        lambda h: _block_sum(h, t("a b/rows+cols"), t("a r=2/rows+cols")),
        "is not a sum of each block",
    ),
    "sums of blocks that round": (
        lambda h: _block_sum(h, t("a b/cols", dtype="bfloat16"), t("a r=2/cols", dtype="bfloat16")),
        "is not a sum of each block",
    ),
    "a cumsum that forgets the blocks before": (
        lambda h: _cumsum(h, t("a b/cols"), t("a b/cols")),
        "has not the sums of all blocks",
    ),
    "a cumsum with its own sum of a block only": (
        lambda h: _cumsum(h, t("a b/cols"), t("a b/cols"), t("a r=2/cols")),
        "has not the sums of all blocks",
    ),
    "a cumsum of a whole dim with sums of blocks": (
        lambda h: _cumsum(h, t("a b"), t("a b"), t("a r=2")),
        "has not the sums of all blocks",
    ),
    "a cumsum of an unfinished sum": (
        lambda h: h.add("cumsum", [h.pending("b", "cols")], t("b", "cols"), dim="b", exclusive=False, reverse=False),
        "changes the type of its input",
    ),
    "a gather whose batch is split in another way": (
        lambda h: h.add(
            "gather", [h.feed("w", t("a/rows b")), h.feed("i", t("a c", dtype="int32"))], t("a c"), dim="b"
        ),
        "dimension 'a' is not the same",
    ),
    "a scatter_add that calls a batch pending": (
        lambda h: h.add(
            "scatter_add",
            [h.feed("x", t("a/rows c")), h.feed("i", t("a/rows c", dtype="int32"))],
            t("a/rows b", "cols"),
            dim="b",
        ),
        "must leave a reduction pending over []",
    ),
}
