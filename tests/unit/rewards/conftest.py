"""A real server on loopback that scores, and misbehaves when told to."""

import json
import socket
import threading
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server:
    """`answer(request, number)` gives (status, headers, body) or None to hang up; `requests` are those received.

    A body is bytes, what JSON can hold, or a list of bytes that are sent 0.1 s apart.
    """

    def __init__(self):
        self.requests = []
        self.answer = lambda request, number: (200, {}, {"score": 0.5})
        self.released = threading.Event()
        """Set at the end: an answer that hangs waits for it."""
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                length = int(self.headers.get("content-length", 0))
                self.reply(self.rfile.read(length))

            def do_GET(self):
                self.reply(b"")

            def reply(self, body):
                request = Request(self.command, self.path, dict(self.headers.items()), body)
                with server._lock:
                    number = len(server.requests)
                    server.requests.append(request)
                found = server.answer(request, number)
                if found is None:
                    self.close_connection = True
                    return
                status, headers, content = found
                chunks = content if isinstance(content, list) else [content]
                chunks = [c if isinstance(c, bytes) else json.dumps(c).encode() for c in chunks]
                self.send_response(status)
                for name, value in ({"Content-Length": str(sum(map(len, chunks)))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(chunk)
                    if len(chunks) > 1 and server.released.wait(0.1):
                        break
                self.close_connection = "Content-Length" in headers  # a length that is not the body's

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, address):
                pass  # the client hung up, as several tests want it to

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.root = f"http://127.0.0.1:{self._server.server_port}"

    def posts(self):
        """The samples that were posted, those of the start's check left out."""
        found = [request.json for request in self.requests if request.method == "POST"]
        return [sample for sample in found if sample.get("id") != "canary"]

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class Request:
    def __init__(self, method, path, headers, body):
        self.method, self.path, self.body = method, path, body
        self.headers = {name.lower(): value for name, value in headers.items()}

    @property
    def parts(self):
        """The parts of multipart/form-data: (name, media type, bytes)."""
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        message = BytesParser(policy=HTTP).parsebytes(head + self.body)
        return [
            (
                part.get_param("name", header="content-disposition"),
                part.get_content_type(),
                part.get_payload(decode=True),
            )
            for part in message.iter_parts()
        ]

    @property
    def json(self):
        if self.headers["content-type"].startswith("multipart/"):
            return json.loads(next(data for name, _, data in self.parts if name == "sample"))
        return json.loads(self.body)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def closed_port():
    """A port of this machine that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
