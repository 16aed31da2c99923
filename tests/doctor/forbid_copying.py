"""Runs a command in which process_vm_readv is forbidden, as in containers of old: a seccomp filter.

python forbid_copying.py COMMAND...        x86-64 only
"""

import ctypes
import os
import struct
import sys

_READ_VM = 310  # the number of process_vm_readv on x86-64
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # the latter: EPERM
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def main() -> None:
    instructions = [(_LOAD, 0, 0, 0), (_JUMP_EQUAL, 0, 1, _READ_VM), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
