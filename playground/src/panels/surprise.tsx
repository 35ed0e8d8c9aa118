/** Panel 2: what each character of a text costs, with the state and without. */

import { computed } from "@preact/signals";
import { analysed, bigram, index, mean, stale, surprises } from "../analysis";
import { MemoryCurve } from "../curve";
import { Letters, quote, scrollBoth } from "../letters";
import { every, lostInWords, text, TEXT_LIMIT, type Reset } from "../view";
import { Column, Legend, lostTitle, Notes, Panel, ready, TextField } from "./parts";

/** Nats that have the strongest tint. */
const STRONGEST = 6;

/** Tints of all characters; the first costs nothing, as it is given. */
function tints(nats: Float32Array | undefined): Float32Array | undefined {
  if (!nats) return undefined;
  const found = new Float32Array(nats.length + 1);
  for (let i = 0; i < nats.length; i++) found[i + 1] = Math.min(1, nats[i] / STRONGEST);
  return found;
}

const kept = computed(() => surprises.value.get(null));
const lost = computed(() => surprises.value.get(every.value));
const keptTints = computed(() => tints(kept.value));
const lostTints = computed(() => tints(lost.value));

const means = computed(
  () => new Map<Reset, number>(Array.from(surprises.value, ([reset, nats]) => [reset, mean(nats)])),
);

/** The character that is looked at, and what it costs each of the two, and on average up to there. */
const description = computed(() => {
  if (!ready.value) return "";
  const i = index.value;
  const character = quote(analysed.value!.characters[i]);
  if (i === 0) return `${character} is the first character: it is given.`;
  const costs = (nats?: Float32Array) =>
    nats ? `${nats[i - 1].toFixed(2)} nats (${mean(nats.subarray(0, i)).toFixed(2)} per character so far)` : "…";
  return `${character} costs ${costs(kept.value)} with the state, ${costs(lost.value)} when it is ${lostInWords(every.value)}.`;
});

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
        A character costs −ln p nats, where p is the probability that the model gave it after reading those before
        it: the stronger the tint, the more surprising the character. Type or paste a text, point at its
        characters, and move the slider at the top to see what the state is worth.
      </p>
      <p>
        The panels Inside and Reach show this text, too.
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
              <Mean nats={kept.value} />
            </Column>
            <Column title={lostTitle(every.value)}>
              <Letters
                panel="surprise"
                label="What each character costs when the state is lost"
                characters={analysed.value!.characters}
                tints={lostTints.value}
                description={description.value}
              />
              <Mean nats={lost.value} />
            </Column>
          </div>
          <Legend panel="surprise" low="0 nats" high={`${STRONGEST} nats or more`} />
          <h3>The memory curve of this text</h3>
          <MemoryCurve
            means={means.value}
            bigram={bigram.value && mean(bigram.value)}
            selected={every.value}
          />
        </>
      )}
    </Panel>
  );
}
