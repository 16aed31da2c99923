"""Folders, files and connections: who is let in, and what is believed."""

from __future__ import annotations

import hmac
import itertools
import os
import shlex
import socket
import stat
import types
from typing import Any

from meshmpi.files import cache, private
from meshmpi.guard import flight, host_link, rings
from meshmpi.kernels.native import compiler
from meshmpi.runtime import processes
from tests.mutations.registry import Patch, mutation

ATTACK = "tests/security/test_attacks.py::gains_nothing"


@mutation(f"{ATTACK}('a_cache_made_before_by_another_user')")
def owners_are_not_looked_at(m: Patch) -> None:
    def mode_alone(status: os.stat_result) -> str:
        return "writable" if status.st_mode & private.WRITABLE_BY_OTHERS else ""

    m.setattr(private, "why_not_private", mode_alone)


@mutation(f"{ATTACK}('a_cache_root_that_all_may_write_to')")
def modes_are_not_looked_at(m: Patch) -> None:
    m.setattr(private, "WRITABLE_BY_OTHERS", 0)


@mutation(f"{ATTACK}('a_cache_that_the_group_may_write_to')")
def the_group_is_trusted(m: Patch) -> None:
    m.setattr(private, "WRITABLE_BY_OTHERS", stat.S_IWOTH)


@mutation(f"{ATTACK}('a_link_inside_the_cache')")
def links_to_folders_are_followed(m: Patch) -> None:
    m.setattr(private, "_FOLDER", private._FOLDER & ~os.O_NOFOLLOW)


@mutation(f"{ATTACK}('roots_cache_in_the_home_of_a_user')")
def root_makes_folders_in_the_home_of_a_user(m: Patch) -> None:
    m.setattr(private, "_make", lambda folder: os.makedirs(folder, 0o700, exist_ok=True))


@mutation(f"{ATTACK}('a_place_where_others_can_rename')")
def places_need_not_be_sticky(m: Patch) -> None:
    m.setattr(private.stat, "S_ISVTX", 0o7777)


@mutation(f"{ATTACK}('a_planted_library')")
def libraries_are_not_hashed(m: Patch) -> None:
    m.setattr(compiler, "_kept", lambda folder, key: folder.read(f"{key}.so"))


@mutation(f"{ATTACK}('a_descriptor_used_again')")
def libraries_share_a_path(m: Patch) -> None:
    m.setattr(compiler, "_loads", itertools.repeat(1 << 23))  # by a path that none has had before


@mutation(f"{ATTACK}('a_command_in_the_note_of_the_compiler')")
def commands_are_read_from_the_cache(m: Patch) -> None:
    def command(found: str, accepts: list[Any]) -> tuple[str, ...]:
        words = [w for w in accepts if isinstance(w, str)]
        return tuple(words) or (*shlex.split(found), *compiler.FLAGS)

    m.setattr(compiler, "_command", command)


@mutation(f"{ATTACK}('a_document_under_another_name')")
def hashes_leave_out_the_name(m: Patch) -> None:
    right = cache._hash
    m.setattr(cache, "_hash", lambda name, data: right("", data))


@mutation(f"{ATTACK}('a_document_under_another_name')")
def seals_are_not_looked_at(m: Patch) -> None:
    m.setattr(cache, "read_sealed", lambda f, name: (f.read(name) or b"")[: -cache._SEAL_BYTES])


@mutation(f"{ATTACK}('a_folder_of_another_user_is_swept')")
def folders_of_others_are_swept(m: Patch) -> None:
    m.setattr(flight, "why_not_private", lambda status: "")


@mutation(f"{ATTACK}('a_process_number_used_again')")
def the_start_of_a_process_is_not_compared(m: Patch) -> None:
    right = processes.state
    m.setattr(processes, "state", lambda pid, start: right(pid, processes.start_time(pid)))


@mutation(f"{ATTACK}('a_process_number_used_again')")
def the_boot_of_a_process_is_not_compared(m: Patch) -> None:
    def is_over(mark: str) -> bool:
        pid, start, _ = mark.split("-", 2)
        return processes.state(int(pid), int(start)) == "gone"

    m.setattr(processes, "is_over", is_over)


@mutation(f"{ATTACK}('a_record_whose_folder_can_be_guessed')")
def folders_are_numbered(m: Patch) -> None:
    numbers = itertools.count()
    system = types.SimpleNamespace(**vars(os))
    system.urandom = lambda n: next(numbers).to_bytes(2, "big")
    m.setattr(private, "os", system)


@mutation(f"{ATTACK}('a_wrong_token')")
def every_proof_is_good(m: Patch) -> None:
    m.setattr(host_link.hmac, "compare_digest", lambda a, b: True)


@mutation(f"{ATTACK}('a_greeting_that_was_listened_to')")
def proofs_are_always_the_same(m: Patch) -> None:
    m.setattr(host_link, "_proof", lambda token, who, *n: hmac.digest(token, who, "sha256"))


@mutation(f"{ATTACK}('a_byte_at_a_time')")
def guests_may_stay(m: Patch) -> None:
    right = host_link._Guest.__init__

    def begin(self: Any, connection: socket.socket) -> None:
        right(self, connection)
        self.until = float("inf")

    m.setattr(host_link._Guest, "__init__", begin)


@mutation(f"{ATTACK}('listening_where_nobody_of_the_job_is')")
def all_networks_are_listened_to(m: Patch) -> None:
    m.setattr(host_link, "_listening", lambda others: [socket.create_server(("", 0))])


@mutation(f"{ATTACK}('an_answer_that_is_no_document')")
def who_says_nonsense_is_lost(m: Patch) -> None:
    def refuse(self: host_link.Line, what: str) -> None:
        self.closed = what
        self._socket.close()

    m.setattr(host_link.Line, "refuse", refuse)


@mutation(f"{ATTACK}('an_answer_of_the_wrong_types')")
def types_of_answers_are_not_looked_at(m: Patch) -> None:
    def from_json(told: dict[str, Any]) -> rings.Seen:
        calls = [rings.Call(c[0], c[1], rings.CallKind(*c[2]), *c[3:]) for c in told["calls"]]
        return rings.Seen(**{**told, "calls": calls})

    m.setattr(host_link, "from_json", from_json)


@mutation(f"{ATTACK}('a_record_of_nonsense')")
def damaged_lines_are_taken_in(m: Patch) -> None:
    def read_table(self: rings.Reader) -> bool:
        for line in self.path.with_suffix(".txt").read_bytes().split(b"\n")[:-1]:
            self._take_in(line.decode())
        return True

    m.setattr(rings.Reader, "_read_table", read_table)
