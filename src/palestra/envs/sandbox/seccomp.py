"""The system calls that commands in a sandbox are refused, as a program for the kernel."""

from __future__ import annotations

import struct

# What a command has no use for, by architecture: nested namespaces and mounts; memory that belongs to no process
# (System V IPC, message queues, memfd); looking into other processes; rarely used kernel interfaces.
DENIED = {
    "x86_64": dict(
        shmget=29, semget=64, msgget=68, ptrace=101, pivot_root=155, chroot=161, mount=165, umount2=166, reboot=169,
        init_module=175, delete_module=176, mq_open=240, kexec_load=246, add_key=248, request_key=249, keyctl=250,
        unshare=272, perf_event_open=298, open_by_handle_at=304, setns=308, process_vm_readv=310,
        process_vm_writev=311, finit_module=313, memfd_create=319, bpf=321, userfaultfd=323,
    ),
    "aarch64": dict(
        shmget=194, semget=190, msgget=186, ptrace=117, pivot_root=41, chroot=51, mount=40, umount2=39, reboot=142,
        init_module=105, delete_module=106, mq_open=180, kexec_load=104, add_key=217, request_key=218, keyctl=219,
        unshare=97, perf_event_open=241, open_by_handle_at=265, setns=268, process_vm_readv=270,
        process_vm_writev=271, finit_module=273, memfd_create=279, bpf=280, userfaultfd=282,
    ),
}  # fmt: skip
DENIED_EVERYWHERE = dict(
    pidfd_getfd=438, io_uring_setup=425, io_uring_enter=426, io_uring_register=427, open_tree=428, move_mount=429,
    fsopen=430, fsconfig=431, fsmount=432, fspick=433, mount_setattr=442, memfd_secret=447,
)  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMESPACE_FLAGS = 0x7E020000


def seccomp_filter(machine: str) -> bytes | None:
    """A BPF program that refuses the system calls above and permits all others; None where there is no list."""
    if machine not in DENIED:
        return None
    load, jump_equal, jump_from, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, errno = 0x80000000, 0x7FFF0000, 0x00050000
    eperm, enosys = errno | 1, errno | 38

    def op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    program = [op(load, 4), op(jump_equal, AUDIT_ARCH[machine], 1, 0), op(give, kill), op(load, 0)]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        program += [op(jump_from, 0x40000000, 0, 1), op(give, eperm)]
    program += [op(jump_equal, CLONE3, 0, 1), op(give, enosys)]  # its flags cannot be seen: libc then takes clone
    for number in (*DENIED[machine].values(), *DENIED_EVERYWHERE.values()):
        program += [op(jump_equal, number, 0, 1), op(give, eperm)]
    program += [op(jump_equal, CLONE[machine], 0, 3), op(load, 16), op(jump_set, NAMESPACE_FLAGS, 0, 1)]
    return b"".join([*program, op(give, eperm), op(give, allow)])
