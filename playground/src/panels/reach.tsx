/** Panel 4: how much the cost of a character changes with each character before it. */

import { computed, signal } from "@preact/signals";
import { analysed, type Analysed, follow, index, stale } from "../analysis";
import { engine } from "../models";
import { Letters, quote, scrollBoth } from "../letters";
import { near } from "../screen";
import { every } from "../view";
import { capital, Column, Legend, resetTitle, Panel, ready } from "./parts";

/** Characters that are looked back on, at least. A multiple of all resets, so that those stay where they are. */
const BACK = 256;

interface Reach {
  of: Analysed;
  at: number;
  /** Gradient norms of the characters before `at`, from `start` on: with the state, and without. */
  start: number;
  norms: Float32Array[];
}

const reach = signal<Reach | null>(null);

follow(
  () => [near.reach.value, index.value, every.value],
  async (of) => {
    if (!near.reach.value) return reach.value;
    const at = index.value;
    const start = Math.max(0, BACK * (Math.ceil(at / BACK) - 2));
    const tokens = of.tokens.slice(start, at + 1);
    const norms = [];
    for (const reset of [null, every.value]) {
      norms.push(at ? await engine.reach(of.info.name, tokens, at - start, reset) : new Float32Array());
    }
    return { of, at, start, norms };
  },
  (found) => (reach.value = found),
);

const current = computed(() => (reach.value?.of === analysed.value ? reach.value : null));

/** The largest norm on both sides: the strongest tint. */
const largest = computed(() =>
  Math.max(1e-9, ...(current.value?.norms ?? []).map((norms) => norms.reduce((most, norm) => Math.max(most, norm), 0))),
);

const tints = [0, 1].map((side) =>
  computed(() => {
    if (!current.value) return undefined;
    const { start, at, norms } = current.value;
    const found = new Float32Array(at);
    norms[side].forEach((norm, i) => (found[start + i] = Math.sqrt(norm / largest.value)));
    return found;
  }),
);

/** How far back one must go for 90% of the sum of the norms. */
function farBack(norms: Float32Array): number {
  let rest = 0.1 * norms.reduce((sum, norm) => sum + norm, 0);
  return norms.length - norms.findIndex((norm) => (rest -= norm) < 0);
}

const descriptions = [0, 1].map((side) =>
  computed(() => {
    if (!current.value) return "…";
    const { of, at, start, norms } = current.value;
    if (at === 0) return `${capital(quote(of.characters[0]))} is the first character: nothing is before it.`;
    const found = norms[side];
    if (!found.some((norm) => norm > 0)) return "Nothing before it matters: the state was just reset.";
    const most = found.indexOf(found.reduce((a, b) => Math.max(a, b)));
    const distance = found.length - most;
    return (
      `${capital(quote(of.characters[at]))} depends most on ${quote(of.characters[start + most])}, ` +
      `${distance === 1 ? "just" : `${distance} characters`} before it; ` +
      `90% of all influence comes from the last ${farBack(found) === 1 ? "character" : `${farBack(found)} characters`}.`
    );
  }),
);

export function Reach() {
  return (
    <Panel name="reach" title="Reach" busy={stale.value}>
      <p>
        How far back does the model look? Point at a character, or move along the text with the arrow keys. Earlier
        characters glow if a small change to them would change the bet on this one. On the left, with the state, the
        glow reaches back over letters and words. On the right, it ends where the state was last reset.
      </p>
      {ready.value && (
        <>
          <div class="pair" onScrollCapture={scrollBoth}>
            {["With its state", resetTitle(every.value)].map((title, side) => (
              <Column key={side} title={title}>
                <Letters
                  panel="reach"
                  label={`What the character depends on: ${title}`}
                  characters={analysed.value!.characters}
                  tints={tints[side].value}
                  description={descriptions[side].value}
                />
                <p class="readout">{descriptions[side]}</p>
              </Column>
            ))}
          </div>
          <Legend panel="reach" low="no influence" high="the strongest" />
          <details>
            <summary>How it is computed</summary>
            <p class="small">
              The influence of a character is the norm of the gradient of the cost with respect to its embedding. A
              quarter of the strongest has half the tint.
            </p>
          </details>
        </>
      )}
    </Panel>
  );
}
