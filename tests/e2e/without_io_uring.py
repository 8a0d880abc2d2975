"""Runs a program on a machine that refuses io_uring the way container runtimes do: io_uring_setup answers EPERM.

usage: without_io_uring.py PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
IO_URING_SETUP = 425  # the same number on every architecture
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO_EPERM = 0x7FFF0000, 0x00050000 | 1


def instruction(code, jump_true, jump_false, value):
    return struct.pack("HBBI", code, jump_true, jump_false, value)


program = b"".join(
    [
        instruction(LOAD_WORD, 0, 0, 0),  # the system call's number
        instruction(JUMP_EQUAL, 0, 1, IO_URING_SETUP),
        instruction(RETURN, 0, 0, ERRNO_EPERM),
        instruction(RETURN, 0, 0, ALLOW),
    ]
)
code = ctypes.create_string_buffer(program)


class SockFprog(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


filter_program = SockFprog(len(program) // 8, ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
for arguments in [
    (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
    (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0),
]:
    if libc.prctl(*arguments) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
