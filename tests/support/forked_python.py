"""A Python that starts in a quarter of the time: copies of one process that has imported what verl needs of others.

Most of what a process of a job takes is spent on imports, and a job on two ranks has about ten. `forked_python` is a
command that stands where Python's would, also in Ray (``runtime_env.py_executable``). It asks a server for a copy of
itself, which gets its arguments, environment, folder and streams, and lives no longer than it. verl, Hydra, Ray and the
plug-in are not imported before: each copy does it anew, in its own environment. All copies hash texts alike, and none
is a child of who asks: where that matters, Python itself is to be taken.

Run as a script, with ``-I -S``, it is that command; so nothing is imported here that takes time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from functools import cache
from typing import Any

IMPORTED = (
    "accelerate",
    "aiohttp",
    "codetiming",
    "datasets",
    "fastapi",
    "google.protobuf.message",
    "jsonschema",
    "msgspec",
    "pandas",
    "PIL.Image",
    "psutil",
    "pyarrow.parquet",
    "requests",
    "safetensors.torch",
    "tensordict",
    "tokenizers",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchdata.stateful_dataloader",
    "transformers",
    "uvicorn",
    "zmq",
)
"""What takes long, and what no test asks about."""
NOT_BEFORE = {"verl_padding", "verl", "hydra", "omegaconf", "ray"}
"""Ours; what it waits for to be imported; and what reads its environment as it is."""
READ_BY_IMPORTED = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that these do read, as all jobs of tests have them."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SERVE = "--serve"
LENGTH = 8
"""Bytes of a number on the socket."""


@cache
def forked_python() -> str:
    """The command, with a server that this process starts, and that ends with it."""
    import atexit
    import shlex
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="vp", dir="/tmp")  # a socket wants a short path
    path = f"{folder}/socket"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | READ_BY_IMPORTED
    server = subprocess.Popen(
        [sys.executable, __file__, SERVE, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.stdin.close()
        server.wait()

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return shlex.join([sys.executable, "-I", "-S", __file__, path])


def ask_for_copy(path: str, arguments: list[str]) -> int:
    """Has the server run Python with these arguments in a copy of itself, to its end; returns the exit code."""
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.nice(0),
    }
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [_bytes(len(text))], [0, 1, 2])
        server.sendall(text)
        copy = _number(_read(server, LENGTH))

        def pass_on(number: int, _: Any) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(copy, number)

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        return _number(_read(server, LENGTH))


def serve(path: str) -> dict[str, Any]:
    """Makes copies until nobody is left at the other end of stdin; in a copy, returns what it was asked for."""
    import gc
    import importlib
    import select
    import shutil
    import threading

    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a copy would be without the others"
    assert not NOT_BEFORE & set(sys.modules)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who look after a copy
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, listener], [], [])
        if 0 in readable:
            shutil.rmtree(os.path.dirname(path))
            sys.exit()
        asks, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _end_with_parent()
            return _copy_for(asks)
        asks.close()


def _copy_for(asks: socket.socket) -> dict[str, Any]:
    """Looks after a copy to its end, which comes at the latest with who has asked; in the copy, returns the request."""
    import select

    length, streams, _, _ = socket.recv_fds(asks, LENGTH, 3)
    request = json.loads(_read(asks, _number(length)))
    copy = os.fork()
    if copy == 0:
        _end_with_parent()
        asks.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    with contextlib.suppress(OSError):  # who asks has ended already
        asks.sendall(_bytes(copy))
    readable, _, _ = select.select([os.pidfd_open(copy), asks], [], [])
    if asks in readable:
        os.kill(copy, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    with contextlib.suppress(OSError):
        asks.sendall(_bytes(code))
    os._exit(0)


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def become(request: dict[str, Any]) -> None:
    """Runs what a copy was asked for: Python's own ways with a script, ``-m`` or ``-c``."""
    import importlib
    import runpy
    import tempfile

    import numpy
    import torch

    os.setpgid(0, 0)  # as Ray has it: when a worker has ended, it ends all of its group
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.nice(max(0, request["niceness"] - os.nice(0)))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through="PYTHONUNBUFFERED" in os.environ)
    tempfile.tempdir = None  # its environment names one
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    importlib.invalidate_caches()
    first, *rest = request["arguments"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.path[:0] = [request["folder"], *paths]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[:0] = ["", *paths]
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:0] = [os.path.dirname(os.path.abspath(first)), *paths]
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other end is gone")
        data += part
    return data


def _bytes(number: int) -> bytes:
    return number.to_bytes(LENGTH, "little", signed=True)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        del sys.path[0]  # the folder of this file
        become(serve(sys.argv[2]))
    else:
        code = ask_for_copy(sys.argv[1], sys.argv[2:])
        if code < 0:
            if -code in PASSED_ON:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
