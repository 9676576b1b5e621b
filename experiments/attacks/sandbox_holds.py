"""Programs that want more than their limits, and programs that want to live on.

Those of memory write an x for each mebibyte that they hold; with `{mark}` as the name of their processes, they are also
measured from outside. Those of resources must be stopped, or be refused; those of an end must leave nothing.
"""

# ruff: noqa: E501  (programs of one line)
from __future__ import annotations

HOLD = """
import mmap
held = []
def take(count=400, report=1):
    for _ in range(count):
        held.append(bytearray(b'1') * 2**20)
        if report is not None: os.write(report, b'x')
def forks(count, work):
    for _ in range(count):
        if os.fork() == 0:
            try: work()
            except BaseException: pass
            time.sleep(60)
def shared(size=2**20, count=100, drop=True):
    m = mmap.mmap(-1, size * count)
    for n in range(count):
        m[n * size : (n + 1) * size] = b'1' * size
        os.write(1, b'x')
        if drop: m.madvise(4)
    held.append(m)
def memfd(count=40, close=False, size=4):
    for n in range(count):
        fd = os.memfd_create('m')
        for _ in range(size):
            os.write(fd, b'1' * 2**20)
            os.write(1, b'x')
        held.append(fd)
"""
MEMORY = {
    "one process": "take()",
    "four processes": "forks(4, take); time.sleep(60)",
    "eight processes": "forks(8, take); time.sleep(60)",
    "grandchildren": "forks(3, lambda: forks(2, take)); time.sleep(60)",
    "orphans": "forks(1, lambda: (forks(4, take), os._exit(0))); time.sleep(60)",
    "daemons": "forks(4, lambda: (os.setsid(), os.fork() and os._exit(0), take())); time.sleep(60)",
    "one after another": "forks(1, take)\nwhile True: forks(1, lambda: take(30)); time.sleep(0.1)",
    "threads": "import threading\nfor _ in range(8): threading.Thread(target=take).start()",
    "stdin, stdout and stderr closed": "os.close(0); os.close(1); os.close(2); forks(4, lambda: take(report=None)); time.sleep(60)",
    "all descriptors closed": "os.closerange(0, 64); forks(4, lambda: take(report=None)); time.sleep(60)",
    "shared memory": "shared(drop=False, count=300)",
    "shared memory that nobody has mapped": "shared()\nshared()\nshared()",
    "shared memory of forks that nobody has mapped": "forks(4, shared); time.sleep(60)",
    "memfds": "memfd(55)",
    "memfds of forks": "forks(4, lambda: memfd(30)); time.sleep(60)",
    "memfds in messages": "import array\na, b = socket.socketpair()\nfor _ in range(50):\n    memfd(1); a.sendmsg([b'x'], [(1, 1, array.array('i', [held[-1]]))]); os.close(held.pop())",
    "mapped memfds": "for _ in range(30):\n    fd = os.memfd_create('m'); os.ftruncate(fd, 2**22); m = mmap.mmap(fd, 2**22); m[:] = b'1' * 2**22; os.close(fd); held.append(m); os.write(1, b'xxxx')",
    "System V": "libc.shmat.restype = ctypes.c_void_p\nfor _ in range(300):\n    i = libc.shmget(0, 2**20, 0o1600); p = libc.shmat(i, None, 0); ctypes.memset(p, 1, 2**20); libc.shmdt(ctypes.c_void_p(p)); os.write(1, b'x')",
    "files in shared memory": "from multiprocessing import shared_memory\nfor _ in range(300):\n    s = shared_memory.SharedMemory(create=True, size=2**20); s.buf[:] = b'1' * 2**20; held.append(s); os.write(1, b'x')",
    "files": "for n in range(300): open(str(n), 'wb').write(b'1' * 2**20); os.write(1, b'x')",
    "files that are unlinked": "for n in range(60):\n    f = open('f', 'wb', 0); held.append(f); os.unlink('f')\n    for _ in range(4): f.write(b'1' * 2**20); os.write(1, b'x')",
    "pipes": "import fcntl\ndef fill():\n    for _ in range(28):\n        r, w = os.pipe(); fcntl.fcntl(w, 1031, 2**20); os.set_blocking(w, False); n = os.write(w, b'1' * 2**20); os.write(1, b'x' * (n >> 20))\nforks(8, fill); time.sleep(60)",
    "a stack": "import threading\nthreading.stack_size(2**28)\nt = threading.Thread(target=take); t.start()",
    "programs": "import subprocess\nwork = 'import os, time\\nh = []\\ntry:\\n while True: h.append(bytearray(b\"1\") * 2**20); os.write(1, b\"x\")\\nexcept MemoryError: time.sleep(60)'\nfor _ in range(4): held.append(subprocess.Popen([sys.executable, '-c', work]))\ntime.sleep(60)",
    "a higher limit": "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\nexcept (OSError, ValueError): pass\ntake()",
    "large pages": "m = mmap.mmap(-1, 2**28, flags=0x40022)\nfor n in range(256): m[n << 20] = 1; os.write(1, b'x')",
    "locked pages": "m = mmap.mmap(-1, 2**28); libc.mlockall(3)\nfor n in range(256): m[n << 20 : (n + 1) << 20] = b'1' * 2**20; os.write(1, b'x')",
    "while nobody looks": "libc.prctl(4, 0, 0, 0, 0); forks(4, take); time.sleep(60)",
    "by a thread that forks": "import threading\nt = threading.Thread(target=lambda: forks(4, take)); t.start(); t.join(); time.sleep(60)",
    "copies on writing": "take(60)\ndef again():\n    for one in held: one[0] = 2; one[:] = b'2' * 2**20; os.write(1, b'x')\nforks(5, again); time.sleep(60)",
}  # fmt: skip
RESOURCES = {  # "stopped", or what stdout must not be
    "a loop": "while True: pass",
    "a loop in C": "sum(range(10**12))",
    "a long sleep": "time.sleep(3600)",
    "no signal ends it": "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "it stands still": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "loops without streams": "os.closerange(0, 64)\nwhile True: pass",
    "many processes": "n = 0\nwhile n < 200:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nout(); time.sleep(60)",
    "a fork bomb": "for _ in range(2000):\n    try: os.fork()\n    except OSError: time.sleep(0.001)\ntime.sleep(60)",
    "processes by turns": "while True:\n    if os.fork(): os._exit(0)",
    "many threads": "import threading\nthreading.stack_size(65536)\nfor _ in range(500): threading.Thread(target=time.sleep, args=(60,)).start()\nout(); time.sleep(60)",
    "a flood of stdout": "while True: os.write(1, b'x' * 65536)",
    "a flood of stderr": "while True: os.write(2, b'x' * 65536)",
    "a large file": "f = open('f', 'wb')\nfor _ in range(100): f.write(b'1' * 2**20)\nf.flush(); out()",
    "a file by truncation": "os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 2**30); out()",
    "a file by allocation": "os.posix_fallocate(os.open('f', os.O_CREAT | os.O_RDWR), 0, 2**27); out()",
    "many files": "for n in range(50): open(str(n), 'wb').write(b'1' * 2**20)\ntime.sleep(0.5); out()",
    "many empty files": "for n in range(60000): open(str(n), 'wb')\ntime.sleep(1); out()",
    "deep folders": "for n in range(3000): os.mkdir('d' * 50); os.chdir('d' * 50)",
    "folders without access": "os.mkdir('a'); os.mkdir('a/b'); open('a/b/f', 'w')\nos.mkdir('c', 0)\ntry: os.chmod('a', 0)\nexcept OSError: pass",
    "endless recursion": "sys.setrecursionlimit(10**8)\ndef f(): f()\nf()",
    "an endless answer to input": "for line in sys.stdin: pass\nwhile True: sys.stdout.write('y')",
    "time by signals": "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); signal.signal(signal.SIGALRM, lambda *_: None)\nwhile True: pass",
    "an exit that waits": "import atexit; atexit.register(time.sleep, 3600)",
    "a thread that waits": "import threading; threading.Thread(target=time.sleep, args=(3600,)).start()",
    "a finaliser that waits": "class A:\n    def __del__(self): time.sleep(3600)\na = A()",
    "a core dump": "os.abort()",
    "a trace of itself": "libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
}  # fmt: skip
END = {  # leaves processes of the name {mark}
    "a child": "if os.fork() == 0: time.sleep(60)",
    "a daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nos._exit(0)",
    "a daemon without streams": "if os.fork() == 0:\n    os.setsid(); os.closerange(0, 64)\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nos._exit(0)",
    "a child that hears nothing": "if os.fork() == 0:\n    for n in range(1, 65):\n        try: signal.signal(n, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n    time.sleep(60)",
    "a program": "import subprocess; subprocess.Popen(['/bin/sh', '-c', 'sleep 60; : {mark}'], start_new_session=True)",
    "a program by spawn": "os.posix_spawn('/bin/sh', ['sh', '-c', 'sleep 60; : {mark}'], os.environ)",
    "a thread": "import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "by turns": "if os.fork() == 0:\n    while True:\n        if os.fork(): os._exit(0)\n        time.sleep(0.0002)",
    "by turns, many": "for _ in range(5):\n    if os.fork() == 0:\n        while True:\n            if os.fork(): os._exit(0)\n            time.sleep(0.0002)",
    "a child that stands still": "p = os.fork()\nif p == 0: time.sleep(60)\nos.kill(p, signal.SIGSTOP)",
    "killed by itself": "if os.fork() == 0: time.sleep(60)\nos.kill(os.getpid(), signal.SIGKILL)",
    "a parent that is killed": "if os.fork() == 0: time.sleep(60)\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError: pass",
    "its group is killed": "if os.fork() == 0: os.setsid(); time.sleep(60)\ntry: os.kill(0, signal.SIGKILL)\nexcept OSError: pass",
    "no death with a parent": "libc.prctl(1, 0, 0, 0, 0); libc.prctl(36, 1, 0, 0, 0)\nif os.fork() == 0: libc.prctl(1, 0, 0, 0, 0); time.sleep(60)",
    "another program": "pid = os.fork()\nif pid == 0: os.setsid(); os.execv('/bin/sh', ['sh', '-c', 'sleep 60; : {mark}'])",
    "a clone that is no child": "pid = raw(56, 0x8000 | 17, 0, 0, 0, 0)\nif pid == 0: time.sleep(60)",
}  # fmt: skip
