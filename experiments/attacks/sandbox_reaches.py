"""Programs that reach out of a sandbox: each line says "out" if it got there, or leaves a mark on its target.

{...} are the targets of `sandbox_host`. A program is an expression or statements; a promise of `GUARDS` for each group.
"""

# ruff: noqa: E501  (programs of one line)
from __future__ import annotations

BEGIN = """
import ctypes, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(one) if type(one) is int else one for one in arguments])
def out(reached=True):
    if reached: os.write(1, b"out\\n")
def got(found): out(found >= 0)
def read(path): return open(path, "rb").read()
libc.prctl(15, b"{mark}", 0, 0, 0)
"""

READING = {
    "open": "out(read({secret!r}) == b'secret')",
    "open for appending": "open({plain!r}, 'a').write('x')",
    "a symbolic link": "os.symlink({secret!r}, 'link'); out(read('link') == b'secret')",
    "a hard link": "os.link({secret!r}, 'link'); out(read('link') == b'secret')",
    "renamed into the folder": "os.rename({secret!r}, 'here')",
    "renamed over": "open('x', 'w').write('x'); os.rename('x', {plain!r})",
    "upwards": "out(read('../' * 30 + {secret!r}) == b'secret')",
    "a path without access": "fd = os.open({secret!r}, os.O_PATH); out(read('/proc/self/fd/%d' % fd) == b'secret')",
    "mapped": "import mmap; fd = os.open({secret!r}, os.O_RDONLY); out(mmap.mmap(fd, 6, prot=1)[:] == b'secret')",
    "sent": "os.sendfile(1, os.open({secret!r}, os.O_RDONLY), 0, 6); out()",
    "by a program": "os.execv('/bin/sed', ['sed', 's/.*/out/', {secret!r}])",
    "by the C library": "out(ctypes.c_void_p(libc.fopen({secret!r}.encode(), b'r')).value not in (None, 0))",
    "listed": "out('secret' in os.listdir({folder!r}))",
    "walked": "out(any('secret' in names for _, _, names in os.walk({folder!r})))",
    "users": "out(b'root' in read('/etc/passwd'))",
    "the environment of the owner": "out(len(read('/proc/{owner}/environ')) > 0)",
    "the memory of the owner": "out(os.open('/proc/{owner}/mem', os.O_RDWR) >= 0)",
    "the root of the owner": "out(read('/proc/{owner}/root' + {secret!r}) == b'secret')",
    "the folder of the victim": "out(len(os.listdir('/proc/{victim}/cwd')) >= 0)",
    "descriptors of the victim": "out(len(os.listdir('/proc/{victim}/fd')) >= 0)",
    "an inherited descriptor": "out(os.read({descriptor}, 6) == b'secret')",
    "any descriptor": "[os.fstat(n) for n in range(3, 61) if out(os.path.exists('/proc/self/fd/%d' % n))]",
    "a handle": "got(raw(304, -100, struct.pack('Ii8s', 8, 1, b''), 0))",
    "a root of one's own": "os.chroot({folder!r}); out(read('/secret') == b'secret')",
    "a root above": "os.mkdir('r'); os.chroot('r'); [os.chdir('..') for _ in range(50)]; out(read('.' + {secret!r}) == b'secret')",
    "a mount": "got(libc.mount({folder!r}.encode(), b'.', None, 4096, None))",
    "another root": "got(raw(155, b'.', b'.'))",
    "a new mount": "got(raw(428, -100, {folder!r}.encode(), 1))",
    "a disk": "import glob\nfor path in [*glob.glob('/dev/vd*'), *glob.glob('/dev/sd*')]: out(os.open(path, os.O_RDONLY) >= 0)",
    "a device of one's own": "os.mknod('d', 0o60600, os.makedev(254, 0)); out(os.open('d', os.O_RDONLY) >= 0)",
    "a terminal": "out(os.open('/dev/tty', os.O_RDWR) >= 0)",
    "settings of the kernel": "out(open('/proc/sys/kernel/core_pattern').read() != '')",
    "hardware": "out(len(os.listdir('/sys')) > 0)",
    "namespaces within": "libc.unshare(0x10020000); libc.mount({folder!r}.encode(), b'.', None, 4096, None); out(os.path.exists('secret'))",
    "namespaces of the victim": "got(libc.setns(os.open('/proc/{victim}/ns/mnt', os.O_RDONLY), 0))",
}  # fmt: skip
WRITING = {
    "open": "open({plain!r}, 'w').write('x')",
    "truncated": "os.truncate({plain!r}, 0)",
    "truncated while it is opened to read": "os.open({plain!r}, os.O_RDONLY | os.O_TRUNC)",
    "truncated where it may be read": "os.truncate({read!r}, 0)",
    "opened to read and truncated, where it may be read": "os.open({read!r}, os.O_RDONLY | os.O_TRUNC)",
    "written where it may be read": "open({read!r}, 'w').write('x')",
    "mapped to write where it may be read": "import mmap; mmap.mmap(os.open({read!r}, os.O_RDWR), 4)[0:1] = b'x'",
    "removed": "os.unlink({plain!r})",
    "removed where it may be read": "os.unlink({read!r})",
    "a new file": "open({folder!r} + '/new', 'w')",
    "a new file where it may read": "open({open!r} + '/new', 'w')",
    "a new folder": "os.mkdir({folder!r} + '/new')",
    "a new pipe": "os.mkfifo({folder!r} + '/new')",
    "a new link": "os.symlink('x', {folder!r} + '/new')",
    "a file without a name": "out(os.open({folder!r}, os.O_TMPFILE | os.O_RDWR) >= 0)",
    "exchanged": "got(raw(316, -100, {plain!r}.encode(), -100, {secret!r}.encode(), 2))",
    "in the standard library": "p = {python!r} + '/sandbox_attack'; open(p, 'w'); os.unlink(p); out()",
    "a cached module": "import inspect; p = {python!r} + '/__pycache__/os.cpython-311.pyc'; open(p, 'r+b'); out()",
    "where all may write": "p = '/var/tmp/{mark}'; open(p, 'w'); os.unlink(p); out(os.path.realpath(p).startswith('/var'))",
    "shared memory of the host": "p = '/dev/shm/{mark}'; open(p, 'w'); os.unlink(p); out(os.path.realpath(p).startswith('/dev'))",
}  # fmt: skip
CHANGING = {
    "mode": "os.chmod({plain!r}, 0o777)",
    "mode of what may be read": "os.chmod({read!r}, 0o777)",
    "mode by descriptor": "os.fchmod(os.open({read!r}, os.O_RDONLY), 0o777)",
    "mode in a folder": "os.chmod('read', 0o777, dir_fd=os.open({open!r}, os.O_RDONLY))",
    "mode of a folder": "os.chmod({folder!r}, 0o777)",
    "mode by a young call": "raw(452, -100, {plain!r}.encode(), 0o777, 0)",
    "mode through a link": "os.symlink({plain!r}, 'l'); os.chmod('l', 0o777)",
    "times": "os.utime({plain!r}, (1, 1))",
    "times of what may be read": "os.utime({read!r}, (1, 1))",
    "times by descriptor": "os.utime(os.open({read!r}, os.O_RDONLY), (1, 1))",
    "times by an old call": "raw(235, {plain!r}.encode(), 0)",
    "times by an older call": "raw(132, {plain!r}.encode(), 0)",
    "attribute": "os.setxattr({plain!r}, 'user.mark', b'2')",
    "attribute of what may be read": "os.setxattr({read!r}, 'user.mark', b'2')",
    "attribute by descriptor": "os.setxattr(os.open({read!r}, os.O_RDONLY), 'user.mark', b'2')",
    "attribute removed": "os.removexattr({plain!r}, 'user.mark')",
    "owner": "os.chown({plain!r}, os.getuid(), 12345); os.chown({plain!r}, 12345, -1)",
    "owner of a link": "os.lchown({plain!r}, 12345, 12345)",
    "owner by descriptor": "os.fchown(os.open({read!r}, os.O_RDONLY), 12345, 12345)",
    "attributes by a call to the device": "fd = os.open({read!r}, os.O_RDONLY); out(libc.ioctl(fd, 0x40086602, struct.pack('l', 64)) == 0)",
    "by a program": "os.execv('/bin/chmod', ['chmod', '777', {plain!r}])",
}  # fmt: skip
SEEING = {
    "stat": "out(os.stat({secret!r}).st_size == 6)",
    "lstat": "out(os.lstat({secret!r}).st_size == 6)",
    "exists": "out(os.path.exists({secret!r}))",
    "access": "out(os.access({secret!r}, os.F_OK))",
    "an attribute": "out(os.getxattr({plain!r}, 'user.mark') == b'1')",
    "statx": "out(raw(332, -100, {secret!r}.encode(), 0, 0xfff, bytes(256)) == 0)",
    "a change that is told": "fd = raw(253); out(raw(254, fd, {secret!r}.encode(), 2) >= 0)",
    "a folder entered": "os.chdir({folder!r}); out(os.path.exists('secret'))",
    "a process": "out(os.path.exists('/proc/{victim}'))",
}  # fmt: skip
NETWORK = {
    "TCP": "socket.create_connection(('127.0.0.1', {port}), 1); out()",
    "TCP by IPv6": "socket.create_connection(('::ffff:127.0.0.1', {port}), 1); out()",
    "TCP by asyncio": "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', {port})); out()",
    "HTTP": "import http.client; c = http.client.HTTPConnection('127.0.0.1', {port}, timeout=1); c.request('GET', '/'); out()",
    "a fast open": "s = socket.socket(); s.sendto(b'x', 0x20000000, ('127.0.0.1', {port})); out()",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp})); time.sleep(0.05)",
    "a UNIX stream": "socket.socket(socket.AF_UNIX).connect({stream!r}); out()",
    "a UNIX datagram": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {datagram!r}); out()",
    "an abstract stream": "socket.socket(socket.AF_UNIX).connect('\\0{name}1'); out()",
    "an abstract datagram": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '\\0{name}2'); out()",
    "a datagram of a pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', {datagram!r}); out()",
    "an abstract datagram of a pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', '\\0{name}2'); out()",
    "a message of a pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendmsg([b'x'], [], 0, {datagram!r}); out()",
    "a client of multiprocessing": "from multiprocessing.connection import Client; Client({stream!r}, 'AF_UNIX'); out()",
    "by a chdir": "os.chdir({folder!r}); socket.socket(socket.AF_UNIX).connect('stream'); out()",
    "netlink of the host": "s = socket.socket(16, 3, 0); s.bind((0, 0)); s.send(struct.pack('IHHII', 20, 18, 0x301, 1, 0) + bytes(4)); out(b'{link}' in s.recv(65536))",
    "a virtual socket": "out(socket.socket(40, 1).fileno() >= 0)",
    "packets": "s = socket.socket(17, 3); s.bind(('{link}', 0)); out()",
}  # fmt: skip
PROCESSES = {
    "a signal": "os.kill({victim}, signal.SIGTERM)",
    "a signal that stops": "os.kill({victim}, signal.SIGSTOP)",
    "a signal that tests": "os.kill({victim}, 0); out()",
    "a signal to the owner": "os.kill({owner}, 0); out()",
    "a signal to the parent": "out(os.getppid() > 1 and os.kill(os.getppid(), 0) is None)",
    "a signal to a group": "os.killpg(os.getpgid({victim}), 0); out()",
    "a signal to a thread": "got(raw(200, {victim}, 0))",
    "a signal to a thread of a group": "got(raw(234, {victim}, {victim}, 0))",
    "a signal with a value": "raw(129, {victim}, 15, struct.pack('iiiiQ', 15, 0, -1, 0, 0) + bytes(104)); time.sleep(0.05)",
    "a signal by descriptor": "out(raw(424, os.pidfd_open({victim}), 0, 0, 0) == 0)",
    "a signal when a pipe is read": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, {victim}); fcntl.fcntl(r, 10, 15); fcntl.fcntl(r, 4, 0o20000); os.write(w, b'x'); time.sleep(0.05)",
    "a signal when a pair is read": "import fcntl; a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', {victim})); fcntl.fcntl(a, 4, 0o20000); b.send(b'x'); time.sleep(0.05)",
    "limits": "import resource; resource.prlimit({victim}, resource.RLIMIT_NOFILE, (5, 5))",
    "limits of the owner, read": "import resource; resource.prlimit({owner}, resource.RLIMIT_NOFILE); out()",
    "affinity": "os.sched_setaffinity({victim}, [0])",
    "affinity of the owner": "os.sched_setaffinity({owner}, [0])",
    "priority": "os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "priority of a group": "os.setpriority(os.PRIO_PGRP, os.getpgid({victim}), 19)",
    "priority of a user": "os.setpriority(os.PRIO_USER, os.getuid(), 19); out(os.getpriority(os.PRIO_PROCESS, {victim}) == 19)",
    "scheduling": "os.sched_setscheduler({victim}, os.SCHED_BATCH, os.sched_param(0)); out()",
    "scheduling by a young call": "out(raw(314, {victim}, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0) == 0)",
    "scheduling of the disk": "out(raw(251, 1, {victim}, 3 << 13) == 0)",
    "a trace": "out(libc.ptrace(16, {victim}, 0, 0) == 0)",
    "a trace by a younger request": "out(libc.ptrace(0x4206, {victim}, 0, 0) == 0)",
    "memory read": "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8); out(raw(310, {victim}, v, 1, struct.pack('QQ', 4096, 8), 1, 0) >= 0 or ctypes.get_errno() == 14)",
    "memory written": "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8); out(raw(311, {victim}, v, 1, struct.pack('QQ', 4096, 8), 1, 0) >= 0 or ctypes.get_errno() == 14)",
    "a descriptor of it": "out(raw(438, os.pidfd_open({victim}), 0, 0) >= 0)",
    "compared": "out(raw(312, {victim}, {victim}, 0, 0, 0) == 0)",
    "memory moved": "out(raw(256, {victim}, 8, bytes(8), bytes(8)) >= 0)",
    "its group": "os.setpgid({victim}, 0)",
    "its score for a shortage": "open('/proc/{victim}/oom_score_adj', 'w').write('900')",
    "its locks": "out(raw(274, {victim}, bytes(8), bytes(8)) == 0)",
    "keys": "out(raw(250, 10, -3, b'user', b'{name}', 0) >= 0)",
    "measured": "out(raw(298, struct.pack('IIQ', 1, 128, 0) + bytes(112), {victim}, -1, -1, 0) >= 0)",
}  # fmt: skip

REACHES: dict[str, dict[str, str]] = {
    "files": {
        **{f"read: {name}": code for name, code in READING.items()},
        **{f"written: {name}": code for name, code in WRITING.items()},
        **{f"changed: {name}": code for name, code in CHANGING.items()},
    },
    "metadata": SEEING,
    "network": NETWORK,
    "processes": PROCESSES,
}
