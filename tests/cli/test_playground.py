"""`jaxgru playground`: the page and the models over HTTP, nothing else, and how it ends."""

from __future__ import annotations

import http.client
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import webbrowser

import pytest
from conftest import Outcome

from jaxgru.cli.playground import PAGE, Server, make_server
from jaxgru.lm.pretrained import FOLDER


@pytest.fixture(scope="module")
def ask():
    """Sends a request as it is typed; returns the status, the type and the content."""
    with make_server("127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def ask(path, method="GET"):
            client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            client.request(method, path)
            answer = client.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read()

        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


def test_the_page_and_what_it_asks_for(ask):
    """From index.html on, each file that another one names is there, with a type browsers take."""
    types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    status, kind, page = ask("/")
    assert (status, kind, page) == (200, "text/html", (PAGE / "index.html").read_bytes())
    assert ask("/?from=a+link") == ask("/index.html") == ask("/")
    seen = set()
    waiting = {"index.html"}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        status, kind, content = ask(f"/{name}")
        path = FOLDER / name.removeprefix("weights/") if "weights/" in name else PAGE / name
        assert (status, content) == (200, path.read_bytes()), name
        assert kind == types.get(path.suffix, "application/octet-stream")
        if path.suffix in types:
            named = re.findall(rb"(?:assets|weights)/[\w-]+\.\w+|worker-[\w-]+\.js", content)
            files = {each.decode() for each in named}
            waiting |= {each if "/" in each else f"assets/{each}" for each in files} - seen
    assert {name.partition("/")[2] for name in seen if "weights" in name} == {
        f"{model}.safetensors" for model in ("astra_alpha", "astra_beta", "elman_alpha")
    }
    assert {path.suffix for path in map(PAGE.joinpath, seen)} >= set(types)


@pytest.mark.parametrize("path", [
    "/nothing", "/assets", "/assets/", "/weights/", "/index.html/", "index.html", "*",
    "/../playground.py", "/assets/../../playground.py", "/%2e%2e/playground.py",
    "/assets/..%2f..%2fplayground.py", r"/..\playground.py", "/etc/passwd", "//etc/passwd",
    "/weights/losses.json", "/weights/astra_beta.md", "/weights/../losses.json",
])  # fmt: skip
def test_nothing_else_is_served(ask, path):
    assert ask(path)[0] == 404


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get(ask, method):
    assert ask("/", method)[0] == 501


def test_it_says_where_and_ctrl_c_ends_it_quietly():
    """Also after a browser that closed its connection before it had asked."""
    command = [sys.executable, "-m", "jaxgru", "playground", "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    says = re.fullmatch(
        r"The playground is at http://127\.0\.0\.1:(\d+)/; Ctrl-C ends it\.\n", line
    )
    assert says, line
    port = int(says[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as browser:
        browser.sendall(b"GET /")
        reset_at_once = struct.pack("ii", 1, 0)
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_once)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("GET", "/")
    assert client.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)


@pytest.fixture
def opened(monkeypatch):
    """The addresses that a browser is asked to open; the command ends instead of serving."""
    addresses: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(webbrowser, "open", addresses.put)
    monkeypatch.setattr(Server, "serve_forever", lambda server: None)
    return addresses


def test_it_opens_a_browser_unless_it_is_told_not_to(script, opened):
    done = script("playground", "--port", 0)
    assert f"at {opened.get(timeout=60)};" in done.out and done.code == 0
    script("playground", "--port", 0, "--no-browser")
    assert opened.empty()


def test_for_a_class_it_says_what_others_open(script, opened):
    done = script("playground", "--host", "0.0.0.0", "--port", 0, "--no-browser")
    mine, others = re.findall(r"http://(\S+):\d+/", done.out)
    assert mine == "127.0.0.1" and others not in (mine, "0.0.0.0")


@pytest.mark.parametrize("options, says", [
    ("--port {taken}",
     "the page cannot be served at 127.0.0.1:{taken}: Address already in use; --port 0 takes a "
     "free port."),
    ("--port 65536", "port is 65536; it must be a whole number from 0 to 65535."),
    ("--host 192.0.2.77",
     "the page cannot be served at 192.0.2.77:8000: Cannot assign requested address."),
])  # fmt: skip
def test_a_mistake_is_one_sentence(script, opened, options, says):
    with make_server("127.0.0.1", 0) as other:
        taken = other.server_port
        done = script("playground", *options.format(taken=taken).split())
    assert done == Outcome(2, "", f"jaxgru playground: {says.format(taken=taken)}\n")
