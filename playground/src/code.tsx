/** The bug as code: the state is made inside the loop, or before it. */

import { signal } from "@preact/signals";
import { every, inWords, type Reset } from "./view";

/** Whether it would give away the answer to a question. */
export const secret = signal(false);

interface Library {
  name: string;
  /** Makes a state of zeros. */
  zeros: string;
  step: string;
  draw: string;
}

const LIBRARIES: Library[] = [
  { name: "PyTorch", zeros: "h = None", step: "y, h = gru(x, h)", draw: "x = draw(y)" },
  {
    name: "JAX",
    zeros: "carry = lm.initial_carry(params, 1)",
    step: "logits, carry = lm.step(params, x, carry)",
    draw: "x = draw(logits)",
  },
];

interface Line {
  text: string;
  /** It makes a state of zeros. */
  resets?: boolean;
}

/** The loop that writes n characters, with the state reset so often. */
function lines({ zeros, step, draw }: Library, reset: Reset): Line[] {
  const rest = [{ text: `    ${step}` }, { text: `    ${draw}` }];
  if (reset === null) return [{ text: zeros, resets: true }, { text: "for t in range(n):" }, ...rest];
  const condition = reset === 1 ? "" : `if t % ${reset} == 0: `;
  return [{ text: "for t in range(n):" }, { text: `    ${condition}${zeros}`, resets: true }, ...rest];
}

/** The same with a reset at each step, as it is more often written: the new state is thrown away. The slider does not move it. */
const UNNAMED: Line[] = [{ text: "for t in range(n):" }, { text: "    y, _ = gru(x)", resets: true }, { text: "    x = draw(y)" }];

function Snippet({ label, caption, of }: { label: string; caption: string; of: Line[] }) {
  return (
    <>
      <p class="small">{caption}</p>
      <pre class="code" role="group" aria-label={label}>
        {of.map(({ text, resets }, i) => (
          <code key={i} class={resets ? "resets" : ""}>{`${text}\n`}</code>
        ))}
      </pre>
    </>
  );
}

export function Code() {
  const reset = every.value;
  return (
    <div hidden={secret.value}>
      <h3>The bug in code</h3>
      <p>
        The loop writes <code>n</code> characters: it reads the newest one, <code>x</code>, and draws the next. The first
        code makes the state once, before the loop, and each step passes it on.{" "}
        {reset === null
          ? "The slider is at never, so the second code is the same. Move it to see the bug."
          : `In the second, the loop makes a new state ${inWords(reset)}: the model forgets what it has read. ` +
            "No error is raised."}
      </p>
      {LIBRARIES.map((library) => (
        <div key={library.name} id={library.name === "PyTorch" ? "code" : undefined}>
          <p class="small">
            {library.name === "PyTorch" ? "PyTorch calls the state h; None stands for zeros" : "JAX calls it the carry"}
          </p>
          <div class="pair wide">
            <div>
              <Snippet label={`${library.name}: the state is carried on`} caption="State kept (left)" of={lines(library, null)} />
            </div>
            <div>
              <Snippet
                label={`${library.name}: the state is reset in the loop`}
                caption={reset === null ? "State never reset (right)" : `State reset ${reset === 1 ? "at every step" : inWords(reset)} (right)`}
                of={lines(library, reset)}
              />
              {library.name === "PyTorch" && (
                <Snippet label="PyTorch: the state is not kept" caption="A reset at every step is more often written like this:" of={UNNAMED} />
              )}
            </div>
          </div>
        </div>
      ))}
      <p>
        To check your own network, print its state on the line above each call. From the second call on, it must be
        neither <code>None</code> nor all zeros; where the call names no state, as in <code>y, _ = gru(x)</code>, it is
        reset. Other causes of gibberish are a temperature that is too high, characters numbered differently than in
        training, and too little training.
      </p>
    </div>
  );
}
