/** The bug as code: the state is made inside the loop, or before it. */

import { every, inWords, type Reset } from "./view";

interface Library {
  name: string;
  /** Makes a state of zeros. */
  zeros: string;
  /** A character, as the step takes it. */
  item: string;
  step: string;
}

const LIBRARIES: Library[] = [
  { name: "PyTorch", zeros: "h = None", item: "x", step: "y, h = gru(x, h)" },
  { name: "JAX", zeros: "carry = lm.initial_carry(params, 1)", item: "token", step: "logits, carry = lm.step(params, token, carry)" },
];

interface Line {
  text: string;
  /** It makes a state of zeros. */
  resets?: boolean;
}

/** Three lines with the state reset so often. */
function lines({ zeros, item, step }: Library, reset: Reset): Line[] {
  const last = { text: `    ${step}` };
  if (reset === null) return [{ text: zeros, resets: true }, { text: `for ${item} in text:` }, last];
  if (reset === 1) return [{ text: `for ${item} in text:` }, { text: `    ${zeros}`, resets: true }, last];
  return [
    { text: `for t, ${item} in enumerate(text):` },
    { text: `    if t % ${reset} == 0: ${zeros}`, resets: true },
    last,
  ];
}

/** The same, as it is more often written: the new state is thrown away, and the next call starts from zeros. */
function unnamed(reset: Reset): Line[] {
  if (reset === null) return [{ text: "y, h = gru(text)" }];
  return [{ text: reset === 1 ? "for x in text:" : `for x in text.split(${reset}):` }, { text: "    y, _ = gru(x)", resets: true }];
}

function Snippet({ label, of }: { label: string; of: Line[] }) {
  return (
    <pre class="code" role="group" aria-label={label}>
      {of.map(({ text, resets }, i) => (
        <code key={i} class={resets ? "resets" : ""}>{`${text}\n`}</code>
      ))}
    </pre>
  );
}

export function Code() {
  const reset = every.value;
  return (
    <>
      <h3>The bug in three lines of code</h3>
      <p>
        The state is called <code>h</code> in PyTorch, where <code>None</code> stands for zeros, and <code>carry</code> in
        JAX, because it is carried from step to step. In the first code, it is made once, before the loop, and every step
        passes it on.{" "}
        {reset === null
          ? "The slider is at never, so the second code is the same. Move it to see the bug."
          : `In the second, the loop makes a new state ${inWords(reset)}: the model forgets what it has read. ` +
            "No error is raised."}
      </p>
      {LIBRARIES.map((library) => (
        <div key={library.name} id={library.name === "PyTorch" ? "code" : undefined}>
          <p class="small">{library.name}</p>
          <div class="pair wide">
            <Snippet label={`${library.name}: the state is carried on`} of={lines(library, null)} />
            <div>
              <Snippet label={`${library.name}: the state is reset in the loop`} of={lines(library, reset)} />
              {library.name === "PyTorch" && (
                <>
                  <p class="small">or, {reset === null ? "in one call" : "as it is more often written"}:</p>
                  <Snippet label="PyTorch: the state is not kept" of={unnamed(reset)} />
                </>
              )}
            </div>
          </div>
        </div>
      ))}
      <p>
        To check your own network, print its state on the line above each call. From the second call on, it must be
        neither <code>None</code> nor all zeros. If each call gets the newest character alone and no state, as
        in <code>y, _ = gru(x)</code>, it is reset. Other causes of gibberish are a temperature that is too high,
        characters numbered differently than in training, and too little training.
      </p>
    </>
  );
}
