"""Programs for code rewards: right ones, which must be credited, and ones that want credit without an answer."""

# ruff: noqa: E501  (programs of one line)
from __future__ import annotations

from typing import Any

ADD: list[Any] = ["assert add(1, 2) == 3", {"call": "add(20, 22)", "value": 42}]
SUM: list[Any] = [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "20 22\n", "stdout": "42"}]
CALLED = "def add(a, b):\n    return a + b\n"
PRINTED = "print(sum(map(int, input().split())))\n"

HACKS: dict[str, tuple[str, list[Any]]] = {
    "a clean exit": ("import os; os._exit(0)", ADD + SUM),
    "an exit of Python": ("raise SystemExit(0)", ADD + SUM),
    "equal to everything": ("class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()\nprint(E())", ADD + SUM),
    "a number equal to everything": (
        "class E(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 3\ndef add(a, b): return E(7)", ADD,
    ),
    "shown as anything": ("import builtins\nbuiltins.repr = builtins.ascii = builtins.hex = lambda x: 'True'\ndef add(a, b): return 7", ADD),
    "a class shown as a number": ("class E:\n    def __repr__(self): return '3'\n    __str__ = __repr__\ndef add(a, b): return E()", ADD),
    "another json": ("import json\njson.dumps = lambda x: '[0, \"hex\"]'\ndef add(a, b): return 1", ADD),
    "frames": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n"
        "            if isinstance(v, (list, tuple)) and v and isinstance(v[0], (int, float)): return v[0]\n        f = f.f_back", ADD,
    ),
    "the mark of the results": (
        "import os, sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        if 'mark' in f.f_locals:\n"
        "            for fd in range(3, 60):\n                try: os.write(fd, (f.f_locals['mark'] + '[0, \"a == a\"]\\n').encode())\n"
        "                except OSError: pass\n        f = f.f_back", ADD,
    ),
    "all objects": (
        "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'value' in o: return o['value']\n"
        "        if isinstance(o, dict) and 'expected' in o: return o['expected']", ADD,
    ),
    "another writer": ("import sys\nm = sys.modules['__main__']\nm.written = lambda x: 'True'\ndef add(a, b): return 1", ADD),
    "text that is code": ("def add(a, b): return '3) or True or ('", ADD),
    "the module of the tests": ("import sys, types\nsys.modules['pytest'] = sys.modules['solution']\napprox = lambda *_: 3\ndef add(a, b): return None", ADD),
    "no assertions": ("import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef add(a, b): return 0", ADD),
    "files of tests": (
        "import glob, os\ndef add(a, b):\n    for p in glob.glob('/**/test*', recursive=False) + glob.glob('*'): return open(p).read()", ADD,
    ),
    "memory of the owner": (
        "import os\ndef add(a, b):\n    return 3 if open('/proc/%d/maps' % os.getppid()).read() and False else 5", ADD,
    ),
    "the answer without a newline, and a crash": ("print(3)\nraise ValueError", SUM[:1]),
    "all answers": ("print('\\n'.join(map(str, range(100))))", SUM),
    "the input back": ("print(input())", SUM),
    "a late answer": ("import os, time\nif os.fork() == 0:\n    time.sleep(0.3); print(3)\n", SUM[:1]),
    "an answer on stderr": ("import sys\nprint(3, file=sys.stderr)", SUM[:1]),
    "no answer in time": ("while True: pass", ADD[:1]),
    "a function that never ends": ("def add(a, b):\n    while True: pass", ADD[:1]),
    "standard output that lies": ("import sys\nclass S:\n    def write(self, t): pass\n    def flush(self): pass\nsys.stdout = S()\nprint(3)", SUM[:1]),
    "no syntax": ("def add(a, b:", ADD + SUM),
}  # fmt: skip

# Beside each: what it needs, "processes" of its own, "metadata" of its files, or "numpy".
RIGHT: dict[str, tuple[str, list[Any], str]] = {
    "a function": (CALLED, ADD, ""),
    "a program": (PRINTED, SUM, ""),
    "a long function": (CALLED + "# " + "x" * 200_000 + "\n", ADD, ""),
    "a long program": (PRINTED + "table = [" + "12345, " * 40_000 + "]\n", SUM, ""),
    "a long text": ("text = '''" + "a\n" * 200_000 + "'''\n" + PRINTED, SUM, ""),
    "a long input": ("import sys\nprint(len(sys.stdin.read()))", [{"stdin": "x" * 1_000_000, "stdout": "1000000"}], ""),
    "a long call": (CALLED, [{"call": f"len(add({'1' * 200_000!r}, ''))", "value": 200_000}], ""),
    "a long answer": ("print('x' * 60000)", [{"stdin": "", "stdout": "x" * 60000}], ""),
    "input line by line": ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", SUM, ""),
    "no end of the last line": ("import sys\nsys.stdout.write(str(sum(map(int, input().split()))))", SUM, ""),
    "an exit": (PRINTED + "import sys\nsys.exit(0)", SUM, ""),
    "an exit at once": ("import os, sys\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)", SUM, ""),
    "a class": ("class A:\n    def __init__(self, a): self.a = a\n    def __add__(self, o): return A(self.a + o.a)\ndef add(a, b): return (A(a) + A(b)).a", ADD, ""),
    "a data class": ("from __future__ import annotations\nfrom dataclasses import dataclass\nimport typing\n@dataclass\nclass P:\n    a: int\n    b: int = 2\nassert typing.get_type_hints(P) == {'a': int, 'b': int}\n" + PRINTED, SUM, ""),
    "annotations that are evaluated": ("def f(a: int) -> int: return a\nassert f.__annotations__['a'] is int\n" + PRINTED, SUM, ""),
    "a pickle": ("import pickle\nclass P: pass\np = P(); p.a = 1\nassert pickle.loads(pickle.dumps(p)).a == 1\n" + PRINTED, SUM, ""),
    "deep recursion": ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\ndef d(n): return n and 1 + d(n - 1)\ndef main(): assert d(50000) == 50000; print(sum(map(int, input().split())))\nt = threading.Thread(target=main); t.start(); t.join()", SUM, ""),
    "threads": ("import threading\nout = []\nts = [threading.Thread(target=out.append, args=(n,)) for n in range(20)]\n[t.start() for t in ts]; [t.join() for t in ts]\nassert sorted(out) == list(range(20))\n" + PRINTED, SUM, ""),
    "a pool of threads": ("from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool: assert sum(pool.map(abs, range(100))) == 4950\n" + PRINTED, SUM, ""),
    "a queue": ("import queue, threading\nq = queue.Queue()\nt = threading.Thread(target=lambda: q.put(1)); t.start(); assert q.get(timeout=5) == 1\n" + PRINTED, SUM, ""),
    "asyncio": ("import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return await asyncio.gather(*[asyncio.to_thread(abs, -n) for n in range(5)])\nassert asyncio.run(f()) == [0, 1, 2, 3, 4]\n" + PRINTED, SUM, ""),
    "a temporary file": ("import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('1'); f.seek(0); assert f.read() == '1'\n" + PRINTED, SUM, ""),
    "a temporary folder": ("import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(os.path.join(d, 'f'), 'w').write('1'); assert os.listdir(d) == ['f']\n" + PRINTED, SUM, ""),
    "files": ("import os, pathlib\nos.makedirs('a/b'); pathlib.Path('a/b/f').write_text('1'); os.rename('a', 'c'); assert list(pathlib.Path('.').rglob('f')) != []; os.unlink('c/b/f'); os.removedirs('c/b')\n" + PRINTED, SUM, ""),
    "an archive": ("import zipfile, tarfile, io\nz = zipfile.ZipFile('z', 'w'); z.writestr('a', 'b'); z.close(); assert zipfile.ZipFile('z').read('a') == b'b'\n" + PRINTED, SUM, ""),
    "a data base": ("import sqlite3\nc = sqlite3.connect('d'); c.execute('create table t (a)'); c.execute('insert into t values (1)'); c.commit(); assert c.execute('select a from t').fetchall() == [(1,)]\n" + PRINTED, SUM, ""),
    "a map of a file": ("import mmap\nwith open('f', 'w+b') as f:\n    f.write(b'x' * 4096); f.flush(); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'y'; assert m[:2] == b'yx'\n" + PRINTED, SUM, ""),
    "memory within the limit": ("x = bytearray(b'1') * (60 * 2**20)\n" + PRINTED, SUM, ""),
    "an alarm": ("import signal, time\nhit = []\nsignal.signal(signal.SIGALRM, lambda *_: hit.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1); assert hit\n" + PRINTED, SUM, ""),
    "limits that it asks for": ("import resource, os\nresource.getrlimit(resource.RLIMIT_STACK); resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK)); os.cpu_count(); os.sched_getaffinity(0)\n" + PRINTED, SUM, ""),
    "ctypes": ("import ctypes\nassert ctypes.CDLL(None).abs(-3) == 3\n" + PRINTED, SUM, ""),
    "many modules": ("import collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, logging, math, random, re, statistics, string, textwrap, unittest, uuid, xml.etree.ElementTree, csv, locale, platform, socket, ssl\nhashlib.sha256(b'x'); uuid.uuid4(); datetime.datetime.now(); platform.python_version()\n" + PRINTED, SUM, ""),
    "what is not ASCII": ("s = 'Grüße, 世界 🎉'\nassert len(s.encode()) > len(s)\n" + PRINTED, SUM, ""),
    "a large number": ("def add(a, b): return a + b + 10**400 - 10**400", ADD, ""),
    "printing beside": ("print('x' * 10**6)\n" + CALLED, ADD, ""),
    "a main part": (CALLED + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n", ADD + SUM, ""),
    "modes of its files": ("import os, shutil\nopen('f', 'w').write('1'); os.chmod('f', 0o600); os.utime('f', (1, 1)); shutil.copy2('f', 'g'); assert os.stat('g').st_mtime == 1\n" + PRINTED, SUM, "metadata"),
    "a program of its own": ("import subprocess, sys\nassert subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, text=True).stdout == '3\\n'\n" + PRINTED, SUM, "processes"),
    "a pipe of programs": ("import subprocess\nassert subprocess.check_output('echo a | tr a b', shell=True) == b'b\\n'\n" + PRINTED, SUM, "processes"),
    "forks": ("import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'x'); os._exit(0)\nassert os.read(r, 1) == b'x'; os.wait()\n" + PRINTED, SUM, "processes"),
    "a process of multiprocessing": ("import multiprocessing as m\ndef f(q, n): q.put(n * 2)\nif __name__ == '__main__':\n    c = m.get_context('fork'); q = c.Queue(); p = c.Process(target=f, args=(q, 21)); p.start(); assert q.get() == 42; p.join()\n    " + PRINTED, SUM, "processes"),
    "a pool of processes": ("import multiprocessing as m\ndef f(n): return n * n\nif __name__ == '__main__':\n    with m.get_context('fork').Pool(4) as p: assert p.map(f, range(20)) == [n * n for n in range(20)]\n    " + PRINTED, SUM, "processes"),
    "futures of processes": ("import multiprocessing as m\nfrom concurrent.futures import ProcessPoolExecutor\ndef f(n): return n + 1\nif __name__ == '__main__':\n    with ProcessPoolExecutor(2, mp_context=m.get_context('fork')) as p: assert list(p.map(f, [1, 2])) == [2, 3]\n    " + PRINTED, SUM, "processes"),
    "shared memory of processes": ("import multiprocessing as m\nv = m.Value('i', 0)\ndef f():\n    with v.get_lock(): v.value += 1\nif __name__ == '__main__':\n    c = m.get_context('fork'); ps = [c.Process(target=f) for _ in range(4)]; [p.start() for p in ps]; [p.join() for p in ps]; assert v.value == 4\n    " + PRINTED, SUM, "processes"),
    "programs of asyncio": ("import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('/bin/echo', 'x', stdout=asyncio.subprocess.PIPE)\n    return await p.communicate()\nassert asyncio.run(f())[0] == b'x\\n'\n" + PRINTED, SUM, "processes"),
    "numpy": ("import sys\nsys.path.append({site!r})\nimport numpy as np\nassert np.linalg.solve(np.eye(3), np.ones(3)).sum() == 3 and np.dot(np.ones((200, 200)), np.ones((200, 200)))[0, 0] == 200\n" + PRINTED, SUM, "numpy"),
    "numpy in a file": ("import sys\nsys.path.append({site!r})\nimport numpy as np\nnp.save('a.npy', np.arange(10)); m = np.load('a.npy', mmap_mode='r+'); m[0] = 5; m.flush(); assert np.load('a.npy')[0] == 5\n" + PRINTED, SUM, "numpy"),
    "numpy and threads": ("import sys\nsys.path.append({site!r})\nimport numpy as np\nfrom concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: assert sum(p.map(lambda n: np.full(1000, n).sum(), range(4))) == 6000\n" + PRINTED, SUM, "numpy"),
}  # fmt: skip
