"""The example that types on a page: its answers are the texts of `stream_text`."""

from __future__ import annotations

import json
import runpy
import threading
import urllib.error
import urllib.request

import pytest
from conftest import ROOT

from jaxgru import lm
from jaxgru.lm.generation import Options


@pytest.fixture(scope="module")
def ask():
    """Returns a function that sends a question and returns the answer and the state's number."""
    server_of = runpy.run_path(str(ROOT / "examples" / "serve.py"))["server_of"]
    with server_of("astra_alpha", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # straight to it, whatever proxy the environment names
        open_ = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

        def ask(question=None, raw=None, **headers):
            data = raw if question is None else json.dumps(question).encode()
            address = f"http://127.0.0.1:{server.server_port}/"
            with open_(urllib.request.Request(address, data, headers), timeout=60) as answer:
                return answer.read().decode(), answer.headers["State"]

        ask.handler = server.RequestHandlerClass
        yield ask
        server.shutdown()
        thread.join()


def test_the_page(ask):
    page, state = ask()
    assert 'method: "POST"' in page and state is None


def test_a_text_goes_on_from_its_state(ask):
    params, _, tokenizer = lm.load("astra_alpha")
    options = Options(num_tokens=20, temperature=0)
    question = {"num_tokens": 20, "temperature": 0, "stop": ["\n\n"]}
    text, state = ask({"prompt": "ROMEO: ", **question})
    assert text == "".join(lm.stream_text(params, tokenizer, "ROMEO: ", options))
    more, _ = ask({"prompt": "\nJULIET: ", "after": int(state), **question})
    whole = text + "\nJULIET: "
    assert text + more == "".join(lm.stream_text(params, tokenizer, whole, options))


@pytest.mark.parametrize(
    "raw, says",
    [
        (b'{"prompt": "\xc3\xa9"}', "lacks 'é'"),
        (b'{"prompt": "a", "temperature": -1}', "temperature is -1"),
        (b'{"prompt": "a", "haste": 1}', "haste"),
        (b'{"prompt": "a", "stop": "END"}', "stop is 'END'; it must be a tuple or list"),
        (b"{}", "must be like"),
        (b"[]", "must be like"),
        (b"ROMEO", "Expecting value"),
        *(
            (b'{"prompt": "a", "after": %s}' % after, f"after is {seen}; it must be a number")
            for after, seen in [(b"[1]", "[1]"), (b"{}", "{}"), (b"true", "True"), (b'"1"', "'1'")]
        ),
    ],
)
def test_what_cannot_be_done_is_said(ask, raw, says):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(raw=raw)
    assert refused.value.code == 400 and says in refused.value.read().decode()


@pytest.mark.parametrize(
    "headers, says",
    [
        ({"Content-length": "-1"}, "Content-Length is '-1'; it must be 0 to 65536"),
        ({"Content-length": "65537"}, "Content-Length is '65537'"),
        ({"Content-length": ""}, "Content-Length is ''"),  # as if there were none
        ({"Content-length": "3"}, "timed out"),
    ],
)
def test_a_size_other_than_the_questions_is_refused(ask, monkeypatch, headers, says):
    monkeypatch.setattr(ask.handler, "timeout", 1)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(raw=b"{}", **headers)
    assert refused.value.code == 400 and says in refused.value.read().decode()
