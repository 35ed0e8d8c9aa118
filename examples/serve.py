"""Serve a page on which a model types, and continue each text from the state that was kept.

    python examples/serve.py
    python examples/serve.py --model runs/astra_alpha --port 8000

The server keeps the state after each text, a few hundred numbers. If you add to a text, the model
continues from this state, and never reads the text again.

`POST /` with {"prompt": "ROMEO: "} returns plain text while it is generated. Its header State is a
number. Send it as "after" with the next prompt to continue that text. The other fields are those of
`jaxgru.lm.generation.Options`. A model that was trained in documents, such as lines, writes one:

    curl --no-buffer -d '{"prompt": "ROMEO: ", "num_tokens": 400}' http://127.0.0.1:8000

Besides jaxgru, the script needs only the standard library. It accepts connections only from this
machine.
"""

import argparse
import dataclasses
import itertools
import json
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxgru import UserError, lm
from jaxgru.lm.generation import Options

MOST_STATES = 1000  # kept; the oldest are dropped first, and a text after one of them begins anew
MOST_BYTES = 2**16  # of a question
FIELDS = {field.name for field in dataclasses.fields(Options)}
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>jaxgru</title>
<style>
  body { max-width: 40em; margin: 2em auto; font: 1.1em/1.5 serif; }
  pre { white-space: pre-wrap; font: inherit; }
  input[name=prompt] { width: 25em; font: inherit; }
</style>
<pre id="text"></pre>
<form>
  <input name="prompt" value="ROMEO: " autofocus>
  <button>type</button>
</form>
<script>
  let after = null;
  const [form, text] = [document.querySelector("form"), document.querySelector("#text")];
  form.onsubmit = async (event) => {
    event.preventDefault();
    form.querySelector("button").disabled = true;
    const question = { prompt: form.prompt.value || "\\n", after };
    const answer = await fetch("/", { method: "POST", body: JSON.stringify(question) });
    if (answer.ok) after = Number(answer.headers.get("State"));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; !(part = await reader.read()).done; ) text.append(part.value);
    form.prompt.value = "";
    form.querySelector("button").disabled = false;
  };
</script>
"""


class Model:
    """A model, and the states after its texts, by their numbers."""

    def __init__(self, name):
        self.params, self.config, self.tokenizer = lm.load(name)
        self.states = OrderedDict()
        self.numbers = itertools.count(1)

    def text(self, question):
        """Return an iterator over the text that a question asks for.

        Raises:
          ValueError: it cannot be written; the message says why.
        """
        prompt = question.pop("prompt")
        after = question.pop("after", None)
        str(prompt).encode()  # half a surrogate pair, which JSON can hold, is no text
        if type(after) not in (int, type(None)):
            raise UserError(f"after is {after!r}; it must be a number that State gave.")
        unknown = question.keys() - FIELDS
        if unknown:
            raise UserError(f"there is no field {min(unknown)!r}, only {sorted(FIELDS)}.")
        defaults = {
            "num_tokens": 200,
            "seed": next(self.numbers),
            "separator": self.config.data.separator,
        }
        options = Options(**defaults | question)  # whose values `stream_text` checks
        carry = self.states.get(after)
        return lm.stream_text(self.params, self.tokenizer, prompt, options, carry=carry)

    def keep(self, number, carry):
        """Keep the state after a text, and drop the oldest states."""
        self.states[number] = carry
        while len(self.states) > MOST_STATES:
            self.states.popitem(last=False)


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with the text that a question asks for."""

    timeout = 10  # seconds for which a client may neither send nor read

    def do_GET(self):
        self.begin(200, "text/html")
        self.wfile.write(PAGE.encode())

    def do_POST(self):
        model = self.server.model
        try:
            text = model.text(self.question())
        except (ValueError, RecursionError, TimeoutError) as error:
            self.begin(400, "text/plain")
            self.wfile.write(f"{error}\n".encode(errors="backslashreplace"))
            return
        number = next(model.numbers)
        self.begin(200, "text/plain", State=number)
        try:
            for piece in text:
                self.wfile.write(piece.encode())
                self.wfile.flush()
        except ConnectionError:
            return  # the reader has gone, so nothing more is generated
        finally:
            model.keep(number, text.carry)

    def question(self):
        """Read the question; raise a ValueError if it is none."""
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > MOST_BYTES:
            raise UserError(f"Content-Length is {size!r}; it must be 0 to {MOST_BYTES}.")
        question = json.loads(self.rfile.read(int(size)))
        if not (isinstance(question, dict) and "prompt" in question):
            raise UserError('the question must be like {"prompt": "ROMEO: "}.')
        return question

    def begin(self, code, kind, **headers):
        """Begin an answer of this kind."""
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()  # without a length: HTTP/1.0 ends an answer with the connection

    def log_message(self, format, *args):
        """Print nothing for each request."""


class Server(ThreadingHTTPServer):
    """Serves a model on this machine."""

    def __init__(self, model, port):
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model


def server_of(model: str, port: int) -> Server:
    """Return the server of a model that `lm.load` knows; port 0 is any that is free."""
    return Server(Model(model), port)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="astra_beta", help="name, run or file (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port, or 0 for any (%(default)s)")
    arguments = parser.parse_args()
    try:
        server = server_of(arguments.model, arguments.port)
    except (UserError, OSError) as error:
        parser.error(str(error))
    with server:
        print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
