"""A web of pictures on loopback. What it answers is a function of (URL, number of the attempt) alone.

    with serve() as (base, log): ...          # http://127.0.0.1:PORT, and a Counter of requests by path

/pictures/00012.jpg is a picture whose content and size belong to its number. One in ten has a fault, by its number:
see FAULTS. `final` ones never succeed, the others do at the second attempt.
"""

import functools
import io
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

FAULTS = ("missing", "busy", "slow", "cut", "html", "wrong_type", "loop", "huge", "opt_out", "cut_once")
MENDED = {"busy", "slow", "cut_once"}  # by the second attempt


def fault_of(number: int) -> str | None:
    """The fault of picture `number`: one in ten has one, each kind as often."""
    return FAULTS[number // 10 % len(FAULTS)] if number % 10 == 3 else None


def succeeds(number: int) -> bool:
    """Whether picture `number` can be had with more than one attempt."""
    return fault_of(number) in MENDED or fault_of(number) is None


@functools.lru_cache(maxsize=256)
def picture(number: int) -> bytes:
    """A JPEG of 48 to 111 by 64 pixels, another one for every number."""
    random = np.random.default_rng(number)
    small = random.integers(0, 256, (4, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((48 + number % 64, 64), Image.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def bomb(side: int = 20_000) -> bytes:
    """A PNG of some hundred kilobytes that claims, and holds, side x side grey pixels."""
    packer = zlib.compressobj(9)
    rows = packer.compress(bytes(side + 1) * 64)  # the file is cut there: nobody should read so far
    parts = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)), (b"IDAT", rows + packer.flush())]
    parts.append((b"IEND", b""))
    chunks = [struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


class Handler(BaseHTTPRequestHandler):
    log: Counter
    lock: threading.Lock
    slow_s: float

    def do_GET(self) -> None:
        with self.lock:
            self.log[self.path] += 1
            attempt = self.log[self.path]
        try:
            number = int(self.path.removeprefix("/pictures/").removesuffix(".jpg"))
        except ValueError:
            return self.send(404, "text/plain", b"no such thing")
        fault = fault_of(number)
        if fault in MENDED and attempt > 1:
            fault = None
        try:
            self.answer(number, fault)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def answer(self, number: int, fault: str | None) -> None:
        data = picture(number)
        if fault == "missing":
            self.send(404, "text/html", b"<html>not here</html>")
        elif fault == "busy":
            self.send(500, "text/html", b"<html>try later</html>")
        elif fault == "slow":
            time.sleep(self.slow_s)
            self.send(200, "image/jpeg", data)
        elif fault in ("cut", "cut_once"):
            self.send(200, "image/jpeg", data, cut=len(data) // 2)
        elif fault == "html":
            self.send(200, "image/jpeg", b"<!DOCTYPE html><html><body>log in first</body></html>")
        elif fault == "wrong_type":
            self.send(200, "application/pdf", b"%PDF-1.4\n" + bytes(500))
        elif fault == "loop":
            self.send(302, "text/html", b"", Location=self.path)
        elif fault == "huge":
            self.send(200, "image/png", bomb())
        elif fault == "opt_out":
            self.send(200, "image/jpeg", data, **{"X-Robots-Tag": "noai"})
        else:
            self.send(200, "image/jpeg", data)

    def send(self, status: int, kind: str, data: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:cut])

    def log_message(self, *_) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # with the 5 of the standard library, a connection of many at once is sometimes dropped
    daemon_threads = True


@contextmanager
def serve(slow_s: float = 4) -> Iterator[tuple[str, Counter]]:
    """Runs the server in a thread; `slow_s` seconds pass before a slow answer."""
    handler = type("Fresh", (Handler,), {"log": Counter(), "lock": threading.Lock(), "slow_s": slow_s})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.log
    finally:
        server.shutdown()
        server.server_close()
