"""A server on this machine in the place of a recipe's reward endpoints, for rehearsals.

It speaks what the endpoint rewards speak: a score for a POST, and an OpenAI-compatible chat that answers with points
on each axis it is asked for. What it answers follows from a hash of the request, so that responses differ in reward.
"""

import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_AXIS = re.compile(r"^([^\n:]+): <1 to 5>$", re.MULTILINE)


@contextmanager
def loopback(models: list[str]) -> Iterator[str]:
    """Serve while the block runs; gives the address. `models` are the names that the chat serves."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"models": models}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    models: list[str] = []

    def do_GET(self) -> None:
        self._reply({"data": [{"id": name} for name in self.models]} if self.path.endswith("/models") else {"ok": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chance = zlib.crc32(body)
        if not self.path.endswith("/chat/completions"):
            self._reply({"score": chance % 101 / 100})
            return
        texts = [part.get("text", "") for turn in json.loads(body)["messages"] for part in turn["content"]]
        axes = _AXIS.findall("\n".join(texts))
        points = "\n".join(f"{axis}: {(chance >> index) % 5 + 1}" for index, axis in enumerate(axes))
        self._reply({"choices": [{"message": {"role": "assistant", "content": points}}]})

    def _reply(self, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        """Nothing on the console."""
