"""The example that types on a page: its answers are the texts of `stream_text`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import runpy
import threading
import urllib.error
import urllib.request

import pytest
from annotations import unchecked
from conftest import ROOT
from random_models import lines_model

from jaxgru import lm
from jaxgru.lm.generation import Options


@contextlib.contextmanager
def served(model):
    """Yields a function that sends a question and returns the answer and the state's number."""
    server_of = runpy.run_path(str(ROOT / "examples" / "serve.py"))["server_of"]
    with server_of(model, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # straight to it, whatever proxy the environment names
        open_ = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

        def ask(question=None, raw=None, **headers):
            data = raw if question is None else json.dumps(question).encode()
            address = f"http://127.0.0.1:{server.server_port}/"
            with open_(urllib.request.Request(address, data, headers), timeout=60) as answer:
                return answer.read().decode(), answer.headers["State"]

        ask.handler = server.RequestHandlerClass  # pyright: ignore[reportFunctionMemberAccess]
        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def ask():
    with served("astra_alpha") as ask:
        yield ask


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


def test_of_a_model_of_lines_each_text_is_one(tmp_path):
    """Which goes on as a new one after the end of another."""
    path = tmp_path / "lines.safetensors"
    params, _, tokenizer = lines_model(path)
    options = dict(num_tokens=99, seed=1, temperature=3)
    with served(path) as ask:
        state = None
        for prompt in ("ab", "\n", "ab\nc", "ab"):
            text, state = ask(options | {"prompt": prompt, "after": state and int(state)})
            alone = lm.stream_text(params, tokenizer, prompt, Options(**options, separator="line"))
            assert text == "".join(alone) and len(text) < 99


@pytest.mark.parametrize(
    "raw, says",
    [
        (b'{"prompt": "\xc3\xa9"}', "lacks 'é'"),
        (b'{"prompt": "a", "haste": 1}', "there is no field 'haste', only ['last_token_only', "),
        (b"{}", "must be like"),
        (b"[]", "must be like"),
        (rb'{"prompt": "\ud83d"}', "surrogates not allowed"),
        (b"ROMEO", "Expecting value"),
    ],
)
def test_what_cannot_be_done_is_said(ask, raw, says):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(raw=raw)
    assert refused.value.code == 400 and says in refused.value.read().decode()


@unchecked()
def test_every_field_takes_a_value_or_says_what_it_must_be(ask):
    fields = ["prompt", "after", *(field.name for field in dataclasses.fields(Options))]
    values = [None, True, -1, 1.5, 10**400, [], [1], [[]], {}, {"a": 1}]
    for name, value in itertools.product(fields, values):
        try:
            ask({"prompt": "a", "num_tokens": 2, name: value})
        except urllib.error.HTTPError as refused:
            says = refused.read().decode()
            assert refused.code == 400 and f"{name} is" in says and "must be" in says, says


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
