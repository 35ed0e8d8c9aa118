"""Serve a page on which a model types, and continue each text from the state that was kept.

    python examples/serve.py
    python examples/serve.py --model runs/astra_alpha --port 8000

The server keeps the state after each text, a few hundred numbers. If you add to a text, the model
continues from this state, and never reads the text again.

`POST /` with {"prompt": "ROMEO: "} returns plain text while it is generated. Its header State is a
number. Send it as "after" with the next prompt to continue that text. The other fields are those of
`jaxgru.lm.generation.Options`. A model that was trained in units, such as lines, writes one:

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


def server_of(model: str, port: int) -> ThreadingHTTPServer:
    """Return the server of a model that `lm.load` knows; port 0 is any that is free."""
    params, config, tokenizer = lm.load(model)
    states, numbers = OrderedDict(), itertools.count(1)
    names = {field.name for field in dataclasses.fields(Options)}

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for which a client may neither send nor read

        def do_GET(self):
            self.begin(200, "text/html")
            self.wfile.write(PAGE.encode())

        def do_POST(self):
            try:
                size = self.headers.get("Content-Length", "")
                if not size.isdecimal() or int(size) > MOST_BYTES:
                    raise UserError(f"Content-Length is {size!r}; it must be 0 to {MOST_BYTES}.")
                question = json.loads(self.rfile.read(int(size)))
                if not (isinstance(question, dict) and "prompt" in question):
                    raise UserError('the question must be like {"prompt": "ROMEO: "}.')
                prompt, after = question.pop("prompt"), question.pop("after", None)
                str(prompt).encode()  # half a surrogate pair, which JSON can hold, is no text
                if type(after) not in (int, type(None)):
                    raise UserError(f"after is {after!r}; it must be a number that State gave.")
                if unknown := question.keys() - names:
                    raise UserError(f"there is no field {min(unknown)!r}, only {sorted(names)}.")
                defaults = {"num_tokens": 200, "seed": next(numbers), "unit": config.data.unit}
                options = Options(**defaults | question)  # whose values `stream_text` checks
                text = lm.stream_text(params, tokenizer, prompt, options, carry=states.get(after))
            except (ValueError, RecursionError, TimeoutError) as error:
                self.begin(400, "text/plain")
                self.wfile.write(f"{error}\n".encode(errors="backslashreplace"))
                return
            state = next(numbers)
            self.begin(200, "text/plain", State=state)
            try:
                for piece in text:
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
            except ConnectionError:
                return  # the reader has gone, so nothing more is generated
            finally:
                states[state] = text.carry
                while len(states) > MOST_STATES:
                    states.popitem(last=False)

        def begin(self, code, kind, **headers):
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()  # without a length: HTTP/1.0 ends an answer with the connection

        def log_message(self, format, *args):
            """Print nothing for each request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


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
