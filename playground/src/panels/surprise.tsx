/** Panel 2: what each character of a text costs, with the state and without. */

import { computed, signal } from "@preact/signals";
import { analysed, type Analysed, bigram, follow, index, mean, stale, surprises } from "../analysis";
import { Bars } from "../bars";
import { MemoryCurve } from "../curve";
import { Letters, quote, scrollBoth } from "../letters";
import { engine } from "../models";
import { near } from "../screen";
import { every, resetInWords, text, TEXT_LIMIT, type Reset } from "../view";
import { setEvery } from "./writers";
import { capital, Column, Legend, resetTitle, Notes, Panel, ready, TextField } from "./parts";

/** Nats that have the strongest tint: of the cost with the state, and of what the reset adds to it. */
const STRONGEST = 6;
const ADDED = 3;

/** Tints of all characters; the first costs nothing, as it is given. */
function tints(nats: Float32Array, strongest: number): Float32Array {
  const found = new Float32Array(nats.length + 1);
  nats.forEach((nat, i) => (found[i + 1] = Math.max(-1, Math.min(1, nat / strongest))));
  return found;
}

const kept = computed(() => surprises.value.get(null));
const reset = computed(() => surprises.value.get(every.value));
const keptTints = computed(() => kept.value && tints(kept.value, STRONGEST));
const addedTints = computed(() => {
  const [with_, without] = [kept.value, reset.value];
  return with_ && without && tints(without.map((nat, i) => nat - with_[i]), ADDED);
});

const means = computed(
  () => new Map<Reset, number>(Array.from(surprises.value, ([every, nats]) => [every, mean(nats)])),
);

/** The character that is looked at, and what it costs each of the two, and on average up to there. */
const description = computed(() => {
  if (!ready.value) return "";
  const i = index.value;
  const character = capital(quote(analysed.value!.characters[i]));
  if (i === 0) return `${character} is the first character: it is given.`;
  const costs = (nats?: Float32Array) =>
    nats ? `${nats[i - 1].toFixed(2)} nats (${mean(nats.subarray(0, i)).toFixed(2)} per character so far)` : "…";
  return `${character} costs ${costs(kept.value)} with the state, ${costs(reset.value)} when it is ${resetInWords(every.value)}.`;
});

/** What the model remembered before a character came, and the probability that it gave each. */
interface Bet {
  memory: string[];
  probabilities: Float64Array;
}


const bets = signal<{ of: Analysed; at: number; sides: Bet[] } | null>(null);

follow(
  () => [near.surprise.value, index.value, every.value],
  async (of) => {
    const [at, before] = [index.value, of.tokens.slice(0, index.value)];
    if (!near.surprise.value) return bets.value;
    if (at === 0) return null; // nothing is before it
    const sides = [];
    for (const resetEvery of [null, every.value]) {
      const start = await engine.start(of.info.name, before, 0, resetEvery);
      const probabilities = await engine.next(of.info.name, start, { temperature: 1, topK: null, resetEvery });
      const lastReset = resetEvery === null ? 0 : at - 1 - ((at - 1) % resetEvery);
      sides.push({ memory: of.characters.slice(lastReset, at), probabilities });
    }
    return { of, at, sides };
  },
  (found) => (bets.value = found),
);

function Bets({ side, title }: { side: number; title: string }) {
  const known = bets.value?.of === analysed.value ? bets.value : null;
  return (
    <Bars
      probabilities={known?.sides[side].probabilities ?? null}
      characters={analysed.value!.info.vocabulary}
      memory={known?.sides[side].memory ?? []}
      came={known ? known.of.tokens[known.at] : undefined}
      label={`Bets on this character: ${title}`}
    />
  );
}

function Mean({ nats }: { nats: Float32Array | undefined }) {
  return (
    <p class="figure">
      {nats ? mean(nats).toFixed(3) : "…"} <span>nats per character</span>
    </p>
  );
}

export function Surprise() {
  return (
    <Panel name="surprise" title="Surprise" busy={stale.value}>
      <p>
        Here the model reads a text and bets on each next character. On the left, with the state, the redder a character,
        the less the model expected it. On the right, red shows where the reset makes it more surprising than on the left,
        and blue where less. Point at a character to see the bets; the one that came stands out. Type or paste a text of
        your own; the panels below show it, too. Surprise is measured in nats: a character to which the model gave the
        probability p costs −ln p.
      </p>
      <TextField label="Text" rows={6} limit={TEXT_LIMIT} value={text} />
      <Notes />
      {ready.value && (
        <>
          <p class="readout">{description}</p>
          <div class="pair" onScrollCapture={scrollBoth}>
            <Column title="With its state">
              <Letters
                panel="surprise"
                label="What each character costs with the state"
                characters={analysed.value!.characters}
                tints={keptTints.value}
                description={description.value}
              />
              <Legend panel="surprise" low="0" high={`${STRONGEST} nats`} />
              <Mean nats={kept.value} />
              <Bets side={0} title="With its state" />
            </Column>
            <Column title={resetTitle(every.value)}>
              <Letters
                panel="surprise"
                label="What each character costs when the state is reset"
                characters={analysed.value!.characters}
                tints={addedTints.value}
                description={description.value}
              />
              <Legend panel="surprise difference" low={`−${ADDED}`} high={`+${ADDED} nats`} />
              <Mean nats={reset.value} />
              <Bets side={1} title={resetTitle(every.value)} />
            </Column>
          </div>
          <h3 id="curve">The memory curve of this text</h3>
          <p>
            The cost of a character, on average over the text, for each position of the slider. Click a point to move the
            slider there. The dashed line is what a table of letter pairs achieves: it bets from the last character alone.
          </p>
          <MemoryCurve
            means={means.value}
            bigram={bigram.value && mean(bigram.value)}
            selected={every.value}
            onSelect={setEvery}
          />
        </>
      )}
    </Panel>
  );
}
