/** The bug as code: the state is made inside the loop, or before it. */

import { every, type Reset } from "./view";

interface Line {
  text: string;
  /** It makes a state of zeros. */
  resets?: boolean;
}

const STEP: Line = { text: "    logits, carry = lm.step(params, token, carry)" };
const ZEROS = "carry = lm.initial_carry(params, 1)";

const CARRIED: Line[] = [{ text: ZEROS, resets: true }, { text: "for token in text:" }, STEP];

/** The same three lines with the state reset as the slider says. */
function lines(reset: Reset): Line[] {
  if (reset === null) return CARRIED;
  if (reset === 1) return [{ text: "for token in text:" }, { text: `    ${ZEROS}`, resets: true }, STEP];
  return [
    { text: "for t, token in enumerate(text):" },
    { text: `    if t % ${reset} == 0: ${ZEROS}`, resets: true },
    STEP,
  ];
}

/** "before every character", after "makes a new state". */
const often = (reset: Reset) => (reset === 1 ? "before every character" : `every ${reset} characters`);

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
      <h3 id="code">The bug in three lines of code</h3>
      <p>
        On the left, the state is made once, before the loop, and every step passes it on.{" "}
        {reset === null
          ? "The slider is at never, so the right code is the same. Move it to see the bug."
          : `On the right, the loop makes a new state ${often(reset)}: the model forgets what it has read. ` +
            "No error tells you."}
      </p>
      <div class="pair wide">
        <Snippet label="The state is carried on" of={CARRIED} />
        <Snippet label="The state is reset in the loop" of={lines(reset)} />
      </div>
    </>
  );
}
