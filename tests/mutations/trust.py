"""Files of others: what is believed too early, or not compared."""

from __future__ import annotations

import json

from apps.fetching import archives
from meshmpi.checkpoint import manifest, tensor_header
from meshmpi.files import plain
from meshmpi.transformer.pretrained import files
from meshmpi.transformer.training import sealed
from tests.mutations.registry import Patch, mutation

ATTACK = "tests/security/test_attacks.py::gains_nothing"


@mutation(f"{ATTACK}('tokens_are_changed')")
def pieces_of_tokens_are_not_compared(m: Patch) -> None:
    m.setattr(sealed.CheckedArray, "_check", lambda self, k: None)


@mutation(f"{ATTACK}('a_manifest_names_a_huge_tensor')")
def manifests_are_believed(m: Patch) -> None:
    m.setattr(manifest, "_check", lambda content: None)


@mutation(f"{ATTACK}('a_manifest_names_a_huge_tensor')")
def tensors_of_manifests_are_believed(m: Patch) -> None:
    m.setattr(manifest, "_checked_bytes", lambda name, t, axes: 0)


@mutation(f"{ATTACK}('an_index_names_a_file_above')")
def an_index_leads_anywhere(m: Patch) -> None:
    m.setattr(files.plain, "is_plain_name", lambda name: isinstance(name, str))


@mutation(f"{ATTACK}('a_header_has_a_tensor_twice')")
def the_second_of_two_equal_names_counts(m: Patch) -> None:
    m.setattr(plain, "_unique", dict)


@mutation(f"{ATTACK}('deep_nesting_in_place_of_an_index')")
def deep_nesting_exhausts_the_stack(m: Patch) -> None:
    m.setattr(plain, "parse_json", json.loads)


@mutation(f"{ATTACK}('a_token_file_is_a_link')")
def links_among_tokens_are_followed(m: Patch) -> None:
    right = plain.opened
    m.setattr(plain, "opened", lambda path, links=True: right(path))


@mutation(f"{ATTACK}('an_archive_of_another_package_is_fetched')")
def archives_are_not_compared(m: Patch) -> None:
    m.setattr(archives, "expected", lambda what, archive, sha256: archive)


@mutation(f"{ATTACK}('a_header_has_huge_dims')")
def sizes_beyond_any_array_are_taken(m: Patch) -> None:
    m.setattr(tensor_header, "MOST_SIZE", 1 << 200)


@mutation("tests/pretrained/test_files.py::test_any_length_of_header(640)")
def marks_of_other_formats_count_before_the_header(m: Patch) -> None:
    right = tensor_header.os.pread

    def wrong(file: int, n: int, at: int) -> bytes:
        return right(file, min(n, 8), at) if n == 9 else right(file, n, at)

    m.setattr(tensor_header.os, "pread", wrong)
