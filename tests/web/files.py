"""A file server on loopback, and the parts of a hub of data sets that a download uses.

    with serve(folder) as web: web.base, web.log, web.cuts, web.revision

/a/b.zip is folder/a/b.zip; a Range is honoured. The first answer for a name in `cuts` ends in the middle. The hub's one
data set is `test/set`: its files are those of `folder`, its newest commit is `web.revision`, and a file's text at any
commit is the same.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from web.server import Server


class Handler(BaseHTTPRequestHandler):
    web: SimpleNamespace

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.web.log.append((self.command, path, self.headers.get("Range")))
        if path.startswith("api/datasets/test/set/tree/"):
            files = [p for p in sorted(self.web.folder.rglob("*")) if p.is_file()]
            self.send_json([{"type": "file", "path": p.relative_to(self.web.folder).as_posix(), "oid": "0" * 40,
                             "size": p.stat().st_size} for p in files])  # fmt: skip
        elif path.startswith("api/datasets/test/set"):
            self.send_json({"id": "test/set", "sha": self.web.revision, "siblings": [], "private": False})
        elif path.startswith("datasets/test/set/resolve/"):
            commit, _, name = path.removeprefix("datasets/test/set/resolve/").partition("/")
            self.send_file(name, {"X-Repo-Commit": commit})
        else:
            self.send_file(path, {})

    def send_json(self, content) -> None:
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str, headers: dict) -> None:
        path = self.web.folder / name
        if not path.is_file():
            return self.reply(404, b"", {})
        data, start, status = path.read_bytes(), 0, 200
        headers |= {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if asked := self.headers.get("Range"):
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = None
        if self.command == "GET" and name in self.web.cuts:
            self.web.cuts.remove(name)
            cut = len(data) // 2
        self.reply(status, data[start:], headers, cut)

    def reply(self, status: int, data: bytes, headers: dict, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[SimpleNamespace]:
    """Runs the server in a thread."""
    web = SimpleNamespace(folder=folder, log=[], cuts=[], revision="a" * 40)
    server = Server(("127.0.0.1", 0), type("Fresh", (Handler,), {"web": web}))
    web.base = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
