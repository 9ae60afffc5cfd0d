"""An S3 server of our own on this machine, and a proxy in front of it that misbehaves on demand."""

import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep  # a test may replace that of the module `time`
from typing import Any

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_START = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # ends with the process that has started it, however that ends
"""


@contextmanager
def running_server(log: Path) -> Iterator[str]:
    """An S3 server in a process of its own; yields its URL."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **SETTINGS},
        )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, log.read_text()
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(url)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            assert time.monotonic() < deadline, "the S3 server does not answer"
            sleep(0.05)


# What the proxy does to a request: answers with a status and an error code; `reset`: gives no answer; `lost`: hands it on and gives
# no answer; `cut`: answers with half of the body; a number of seconds to wait; or nothing.
Fault = tuple[int, str] | str | float | None
Decide = Callable[[str, str, int], Fault]


class FaultyProxy:
    """Hands requests on to an S3 server, but first asks `fault(method, path, number)` what to do to this one.

    `number` counts the requests of this method from 1. `seen` lists them all as (method, path).
    """

    def __init__(self, url: str, fault: Decide) -> None:
        self.host = url.removeprefix("http://")
        self.fault = fault
        self.seen: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                _handle(proxy, self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handle(proxy: FaultyProxy, request: BaseHTTPRequestHandler) -> None:
    body = _read_body(request)
    with proxy.lock:
        proxy.seen.append((request.command, request.path))
        number = sum(method == request.command for method, _ in proxy.seen)
    fault = proxy.fault(request.command, request.path, number)
    if fault == "reset":
        request.close_connection = True
        return
    if isinstance(fault, tuple):
        status, code = fault
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        _send(request, status, {"Content-Type": "application/xml"}, content)
        return
    if isinstance(fault, float):
        sleep(fault)
    connection = http.client.HTTPConnection(proxy.host, timeout=60)
    connection.request(request.command, request.path, body, dict(request.headers))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if fault == "lost":
        request.close_connection = True
        return
    headers = {name: value for name, value in answer.getheaders() if name.lower() != "content-length"}
    if request.command == "HEAD":
        headers["Content-Length"] = answer.headers["Content-Length"]
    _send(request, answer.status, headers, content, is_cut=fault == "cut")


def _read_body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue":
        request.send_response_only(100)
        request.end_headers()
    if request.headers.get("Transfer-Encoding", "") == "chunked":
        pieces = []
        while size := int(request.rfile.readline().split(b";")[0], 16):
            pieces.append(request.rfile.read(size))
            request.rfile.readline()
        while request.rfile.readline().strip():
            pass
        del request.headers["Transfer-Encoding"]
        return b"".join(pieces)
    return request.rfile.read(int(request.headers.get("Content-Length") or 0))


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, *, is_cut: bool = False
) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        if name.lower() not in ("connection", "transfer-encoding"):
            request.send_header(name, value)
    if "Content-Length" not in headers:
        request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content[: len(content) // 2] if is_cut else content)
    if is_cut:
        request.close_connection = True


StartProxy = Callable[[Decide], FaultyProxy]
