"""Generated C: one piece of its text replaced by another, wherever it occurs.

A row: what the mistake is, what shows it, the text, its replacement.  A text that occurs nowhere
changes nothing and so survives, which is seen.
"""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.kernels import native
from tests.mutations.registry import MUTATIONS, Mutation, Patch

ROWS = [
    # indexing
    ("of_equal_elements_the_last_comes_first", "top_k_of_long_rows in C", "((a) > (b) ||", "((a) >= (b) ||"),
    ("of_equal_smallest_the_last_comes_first", "top_k_smallest in C", "((a) < (b) ||", "((a) <= (b) ||"),
    ("a_nan_is_ranked_as_any_number", "top_k_of_special_values in C", "|| ((a) != (a) && (b) == (b))", ""),
    ("a_full_list_of_the_best_grows", "top_k_of_long_rows in C", "held++ :", "held :"),
    (
        "ranks_count_from_one",
        "top_k_of_long_rows in C",
        "(int32_t)(first + place[j])",
        "(int32_t)(first + place[j] + 1)",
    ),
    ("updates_behind_the_last_row_are_added", "kernels: scatter_add", "if (r < 0 || r >= ", "if (r < 0 || r > "),
    ("updates_before_the_first_row_are_added", "scatter_add_in_batches in C", "if (r < 0 || ", "if (r < -1 || "),
    ("sums_of_updates_begin_with_what_was_there", "scatter_add_in_batches in C", "memset(here", "if (0) memset(here"),
    ("one_update_replaces_another", "scatter_add_in_batches in C", "total[c] += u[c]", "total[c] = u[c]"),
    # conversions
    (
        "bfloat16_is_cut_in_memory",
        "kernels: sum of ones bfloat16",
        "uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16",
        "uint32_t r = u >> 16",
    ),
    ("bfloat16_ties_are_rounded_up", "kernels: add bfloat16", "0x7fffu + ((u >> 16) & 1u)", "0x8000u"),
    ("a_nan_in_bfloat16_becomes_infinite", "kernels: cast float32 bfloat16", "? ((u >> 16) | 0x40u) : r", "? r : r"),
    # reductions
    (
        "the_maximum_loses_nan",
        "kernels: special max float32",
        "> 0x7f800000 ? 0x7fffffff : k",
        "> 0x7f800000 ? -0x7fffffff : k",
    ),
    ("the_maximum_of_doubles_loses_nan", "kernels: special max float64", "? INT64_MAX : k", "? -INT64_MAX : k"),
    (
        "keys_of_negative_numbers_are_not_turned",
        "kernels: special max float32",
        "u ^ ((u >> 31) & 0x7fffffff);\n  return",
        "u;\n  return",
    ),
    (
        "a_sum_over_rows_leaves_out_its_last_chunk",
        "kernels: sum float32 a:1000",
        "for (long k = 1; k <",
        "for (long k = 2; k <",
    ),
    ("parts_of_a_sum_are_added_twice", "kernels: sum float32 a:300", "; part", "; if (0) part"),
    ("the_rows_after_the_last_full_block_are_lost", "kernels: sum float32 a:300", "|| row + 1 == last", ""),
    (
        "pieces_of_a_long_row_leave_out_the_first",
        "kernels: sum float32 a:3;n:12345",
        "for (long w = 0; w < 4;",
        "for (long w = 1; w < 4;",
    ),
    ("the_minimum_is_the_maximum", "kernels: min int32", "k < a", "k > a"),
    # functions
    ("exp_overflows_early", "kernels: exp float32", "88.72283f", "88.0f"),
    ("exp_of_small_numbers_is_tiny", "kernels: exp float32", "-87.33654f ? 0.0f", "-87.33654f ? 1e-38f"),
    ("log_of_denormals_is_off", "kernels: log float32", "(small ? 23.0f : 0.0f)", "(small ? 24.0f : 0.0f)"),
    ("log_of_negative_numbers_is_finite", "kernels: log float32", "x < 0.0f ? NAN", "x < 0.0f ? 0.0f"),
    ("log1p_cancels", "kernels: log1p float32", "LOG_f32(u) + c", "LOG_f32(u)"),
    ("tanh_changes_branch_late", "kernels: tanh float32", "a < 0.65f", "a < 1.65f"),
    ("erf_is_even", "kernels: erf float32", "copysignf(a < 1.0f ? q * a : big, x)", "(a < 1.0f ? q * a : big)"),
    ("floor_division_rounds_to_zero", "kernels: floordiv float32", "(b < 0) != (m < 0)) d -= 1", "0) d -= 1"),
    ("remainders_in_c_have_the_sign_of_the_dividend", "kernels: mod float64", "(b < 0) != (m < 0) ? m + b : m", "m"),
    ("whole_division_rounds_to_zero", "kernels: floordiv int32", "q - (a % b != 0 && (a < 0) != (b < 0))", "q"),
    ("powers_of_integers_square_once", "kernels: power int32", "x *= x", "x *= 1"),
    ("maximum_prefers_numbers_to_nan", "kernels: maximum float32", "((a) > (b) || (a) != (a))", "((a) > (b))"),
    ("minimum_prefers_numbers_to_nan", "kernels: minimum float64", "((a) < (b) || (a) != (a))", "((a) < (b))"),
    ("infinity_is_finite", "kernels: isfinite float32", "(u & 0x7f800000u) != 0x7f800000u", "u != 0x7f800000u"),
    ("the_sign_of_nan_is_zero", "kernels: sign float32", "((x) != (x) ? (x) : ", "((x) != (x) ? 0 : "),
    # random numbers
    ("random_numbers_repeat_every_round", "dropout_by_hand in C", "x = x * x + z", "x = x * x"),
    ("random_numbers_reach_one", "random_numbers in C", "* 0x1p-53", "* 0x1p-52"),
    (
        "both_halves_of_a_random_number_are_equal",
        "random_numbers in C",
        "squares(y + (key << 49), key)",
        "squares(y, key)",
    ),
]
"""``kernels: A, B`` stands for the tasks of tests/kernels/test_native.py whose names begin so."""


def _replacing(old: str, new: str) -> Callable[[Patch], None]:
    def put(m: Patch) -> None:
        right = native.load_library
        m.setattr(native, "load_library", lambda source, *rest: right(source.replace(old, new), *rest))

    return put


def check_kernels(*names: str) -> None:
    """The tasks whose names begin with these, by generated C against NumPy."""
    from tests.kernels.native_build import build, check
    from tests.kernels.test_native import TASKS

    chosen = [t for label, t in TASKS.items() if label.startswith(names)]
    assert chosen, names
    kernels = build(chosen)
    for task in chosen:
        check(task, kernels)


def _shown_by(where: str) -> str:
    if not where.startswith("kernels: "):
        return where
    names = ", ".join(repr(n) for n in where.removeprefix("kernels: ").split(", "))
    return f"tests/mutations/generated.py::check_kernels({names})"


for _name, _where, _old, _new in ROWS:
    assert _name not in MUTATIONS, _name
    MUTATIONS[_name] = Mutation("generated", _replacing(_old, _new), _shown_by(_where))
