"""Open the playground, a page on which a model writes with and without its state."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jaxgru.cli.options import Parser
from jaxgru.errors import UserError, check_whole
from jaxgru.files import reason
from jaxgru.lm.pretrained import FOLDER

PAGE = Path(__file__).parent / "page"
"""The built page without the models; `npm run package` in playground/ makes it."""

CONTENT_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""Those that browsers insist on. What `mimetypes` says of .js depends on the machine."""

ANY_ADDRESS = "0.0.0.0"


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(__doc__, ["playground", f"playground --host {ANY_ADDRESS} --no-browser"])
    parser.add_argument(
        "--port", type=int, default=8000, help="port (default: %(default)s; 0: any free one)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: %(default)s, for this computer only; "
        f"{ANY_ADDRESS}: for a class, any computer in the network)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="serve the page, but open no browser"
    )
    return parser


def main() -> None:
    """Parse the arguments, say the page's address, open it, and serve it until Ctrl-C."""
    arguments = make_parser().parse_args()
    host = arguments.host
    with make_server(host, arguments.port) as server:
        port = server.server_port
        address = f"http://{'127.0.0.1' if host == ANY_ADDRESS else host}:{port}/"
        print(f"The playground is at {address}; Ctrl-C ends it.", flush=True)
        if host == ANY_ADDRESS:
            print(f"Others in the network open http://{network_address()}:{port}/.", flush=True)
        if not arguments.no_browser:
            # A browser in the terminal returns only when it is closed.
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        server.serve_forever()


def make_server(host: str, port: int) -> Server:
    """Return a server that listens at an address.

    Raises:
      UserError: it cannot, for example because another program does.
    """
    check_whole("port", port, most=2**16 - 1, least=0)
    try:
        return Server((host, port), Handler)
    except OSError as error:
        remedy = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise UserError(
            f"the page cannot be served at {host}:{port}: {reason(error)}{remedy}."
        ) from error


def network_address() -> str:
    """Return this computer's address in its network, or its name without one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # kept for documentation by RFC 5737
        except OSError:
            return socket.gethostname()
        return route.getsockname()[0]


def served_files() -> dict[str, Path]:
    """Return by its path in the address each file that is served: the page and the models."""
    page = {
        f"/{path.relative_to(PAGE).as_posix()}": path for path in PAGE.rglob("*") if path.is_file()
    }
    models = {f"/weights/{path.name}": path for path in FOLDER.glob("*.safetensors")}
    return page | models | {"/": PAGE / "index.html"}


class Handler(BaseHTTPRequestHandler):
    """Answers with one of the served files. No path that is asked for is looked up on the disk."""

    timeout = 30  # seconds for which a client may neither send nor read
    files = served_files()

    def do_GET(self) -> None:
        """Send a file, or 404."""
        path = self.files.get(self.path.partition("?")[0])
        if path is None:
            self.send_error(404)
            return
        content = path.read_bytes()
        self.send_response(200)
        content_type = CONTENT_TYPES.get(path.suffix, "application/octet-stream")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


class Server(ThreadingHTTPServer):
    """Serves the page to several browsers at once."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless a browser has merely closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
