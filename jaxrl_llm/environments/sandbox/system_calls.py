"""The filter of system calls: those that programs need are allowed, some with conditions; all others are refused.

The program is built here, outside, and only installed in the sandbox. Numbers are those of x86-64 and of AArch64; "-"
where an architecture has no such call.
"""

import struct
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

FILES = """read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57,
close_range 436 436, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50, getdents 78 -,
getdents64 217 61, lseek 8 62, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, rename 82 -,
renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45, ftruncate 77 46, fallocate 285 47, fsync 74 82,
fdatasync 75 83, fadvise64 221 223, readahead 187 213, statfs 137 43, fstatfs 138 44, umask 95 166, flock 73 32,
sendfile 40 71, copy_file_range 326 285, mknod 133 -, mknodat 259 33, getxattr 191 8, lgetxattr 192 9,
fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13"""
MEMORY = """mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, mincore 27 232,
msync 26 227, membarrier 324 283"""
ITSELF = """exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, execve 59 221, execveat 322 281, getpid 39 172,
getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156, setsid 112 157, setpgid 109 154,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148,
getresgid 120 150, capget 125 90, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, futex 202 98,
futex_waitv 449 449, arch_prctl 158 -, sched_yield 24 124, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, getcpu 309 168, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163,
sysinfo 99 179, uname 63 160, getrandom 318 278, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, restart_syscall 219 128"""
WAITING = """poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, signalfd 282 -, signalfd4 289 74,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209"""
# With namespaces: no file and no process of the host is in reach.
METADATA = """chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16"""
PROCESSES = """fork 57 -, vfork 58 -, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434 434,
pidfd_send_signal 424 424, setpriority 141 140, getpriority 140 141, sched_getaffinity 204 123,
sched_setaffinity 203 122, sched_getparam 143 121, sched_setparam 142 118, sched_getscheduler 145 120,
sched_setscheduler 144 119, sched_getattr 315 275, sched_setattr 314 274, sched_rr_get_interval 148 127"""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
MISSING = 424  # calls from here on are younger than what C libraries take for granted: they try others
EPERM, ENOSYS, EINVAL, ENOTTY = 1, 38, 22, 25
OWN_PID = 0x5EED51D5  # stands in the program for the process that installs it

WHOLE = 0xFFFFFFFF
NEW_NAMESPACES = 0x7E020000
THREAD = 0x10000
TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)  # what a stream asks of itself
DESCRIPTOR = (*range(8), 1030, 1032, 36, 37, 38)  # no owner, lease, notice or larger pipe
OF_ITSELF = (0, OWN_PID)
NOT_DATA = (0, 1, *range(3, 16))  # limits but that of data


FAILS = 0x00050000  # with an error added


class Condition(NamedTuple):
    """A half of an argument that must have one of these values, after a mask; else the call fails."""

    word: int  # 2 * number of the argument, + 1 for its upper half
    values: tuple[int, ...]
    mask: int = WHOLE
    otherwise: int = FAILS | EPERM


class _Rule(NamedTuple):
    """A call that is allowed under conditions, all of them."""

    numbers: str
    conditions: tuple[Condition, ...]


RULES = (
    _Rule("setrlimit 160 164", (Condition(0, NOT_DATA),)),
    # Anonymous memory that is shared, or of large pages, outlives what the limit of a process counts.
    _Rule("mmap 9 222", (Condition(6, (0, 1, 0x20), 0x40021),)),
    _Rule("ioctl 16 29", (Condition(2, TERMINAL, WHOLE, FAILS | ENOTTY),)),
    _Rule("fcntl 72 25", (Condition(2, DESCRIPTOR, WHOLE, FAILS | EINVAL),)),
    _Rule("prctl 157 167", (Condition(0, (2, 3, 15, 16, 21, 23, 38, 39, 0x53564D41), WHOLE, FAILS | EINVAL),)),
    _Rule("socketpair 53 199", (Condition(0, (1,)), Condition(2, (1,), 0xF))),  # UNIX streams, which have no addresses
    _Rule("sendto 44 206", (Condition(8, (0,)), Condition(9, (0,)))),
)
# Processes share their memory: none changes its part.
TOGETHER = (
    _Rule("clone 56 220", (Condition(0, (0,), NEW_NAMESPACES),)),
    _Rule("prlimit64 302 261", (Condition(2, NOT_DATA),)),
)
ALONE = (  # no child processes, and nothing is done to others
    _Rule("clone 56 220", (Condition(0, (THREAD,), NEW_NAMESPACES | THREAD),)),
    _Rule("kill 62 129", (Condition(0, (OWN_PID,)),)),
    _Rule("tgkill 234 131", (Condition(0, (OWN_PID,)),)),
    _Rule("setpriority 141 140", (Condition(0, (0,)), Condition(2, OF_ITSELF))),
    _Rule("getpriority 140 141", (Condition(0, (0,)), Condition(2, OF_ITSELF))),
    *[
        _Rule(call, (Condition(0, OF_ITSELF),))
        for call in PROCESSES.replace("\n", " ").split(", ")
        if call.startswith("sched_")
    ],
    _Rule("prlimit64 302 261", (Condition(0, OF_ITSELF), Condition(2, NOT_DATA))),
)


def _numbers(table: str, column: int) -> list[int]:
    """Of the calls in a table, for an architecture."""
    found = [entry.split()[column] for entry in table.replace("\n", " ").split(",")]
    return [int(number) for number in found if number != "-"]


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow one another, in their order."""
    out: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if out and out[-1][1] == number - 1:
            out[-1] = out[-1][0], number
        else:
            out.append((number, number))
    return out


@cache
def filter_program(machine: str, namespaces: bool) -> bytes:
    """The BPF program for a machine's architecture. ValueError for one that it is not known for.

    namespaces: the code has processes and files of its own, to which it may do what it likes. Without them it may not
    start processes, change metadata, or name a process other than itself, which `OWN_PID` stands for.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no filter is known for {machine}")
    column, audit = ARCHITECTURES[machine]
    load, equal, above, masked, end, allow = 0x20, 0x15, 0x35, 0x54, 0x06, 0x7FFF0000
    tables = [FILES, MEMORY, ITSELF, WAITING, *([METADATA, PROCESSES] if namespaces else [])]
    allowed = [number for table in tables for number in _numbers(table, column)]
    # (code, jump if true, jump if false, value); jumps are counted in instructions. Killed: another architecture.
    out = [(load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, 0x80000000), (load, 0, 0, 0)]
    for first, last in _ranges(allowed):
        out += [(above, 0, 2, first), (above, 1, 0, last + 1), (end, 0, 0, allow)]
    for rule in (*RULES, *(TOGETHER if namespaces else ALONE)):
        body = []
        for word, values, mask, otherwise in rule.conditions:
            body += [(load, 0, 0, 16 + 4 * word), (masked, 0, 0, mask)]
            body += [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
            body.append((end, 0, 0, otherwise))
        body.append((end, 0, 0, allow))
        for number in _numbers(rule.numbers, column):
            out += [(equal, 0, len(body), number), *body]
    out += [(above, 0, 1, MISSING), (end, 0, 0, FAILS | ENOSYS), (end, 0, 0, FAILS | EPERM)]
    return b"".join(struct.pack("=HBBI", *one) for one in out)
