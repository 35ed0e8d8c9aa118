/** One step of the cell: what the gates do to one unit when a character is read. */

import { signal } from "@preact/signals";
import { analysed, type Analysed, follow, index } from "./analysis";
import type { LayerStep } from "./engine/types";
import { quote } from "./letters";
import { engine } from "./models";
import { signed } from "./panels/parts";
import { near } from "./screen";
import { at } from "./view";

const step = signal<{ of: Analysed; at: number; layers: LayerStep[] } | null>(null);

follow(
  () => [near.inside.value, index.value],
  async (of) => {
    if (!near.inside.value) return step.value;
    const at = index.value;
    return { of, at, layers: await engine.step(of.info.name, of.tokens.slice(0, at + 1)) };
  },
  (found) => (step.value = found),
);

/** How often the step was played: it plays again when this changes. */
const played = signal(0);

interface Row {
  name: string;
  letter: string;
  value: number;
  meaning: string;
  /** Where its bar starts from when the step is played. */
  from?: number;
}

/** The values of a unit, in the order in which the cell computes them (src/engine/gru.ts). */
function rows({ before, gates, after }: LayerStep, j: number): Row[] {
  const H = before.length;
  const old: Row = { name: "old value", letter: "h", value: before[j], meaning: "what the unit kept until now" };
  const next = { name: "new value", letter: "h′", value: after[j], from: before[j] };
  if (gates.length === H) return [old, { ...next, meaning: "computed anew at every character: this cell has no gates" }];
  const [z, r, n] = [gates[j], gates[H + j], gates[2 * H + j]];
  return [
    old,
    { name: "reset gate", letter: "r", value: r, meaning: "how much of the old value the candidates may see" },
    { name: "candidate", letter: "n", value: n, meaning: "the value that the cell proposes" },
    { name: "update gate", letter: "z", value: z, meaning: "how much of the candidate is taken" },
    { ...next, meaning: `(1 − z)·h + z·n = ${(1 - z).toFixed(2)}·(${signed(before[j])}) + ${z.toFixed(2)}·(${signed(n)})` },
  ];
}

/** Where a bar from 0 to `value` lies on an axis from −1 to 1, in per cent. */
const place = (value: number) => ({ left: `${50 + 50 * Math.min(0, value)}%`, width: `${50 * Math.abs(value)}%` });

export function CellStep({ unit }: { unit: number }) {
  const known = step.value?.of === analysed.value ? step.value : null;
  if (!known) return <div class="cell" />;
  const { of, at: i, layers } = known;
  const { hiddenDim, cell } = of.info;
  const found = rows(layers[Math.floor(unit / hiddenDim)], unit % hiddenDim);
  const kept = found.length > 2 ? `It keeps ${(100 * (1 - found[3].value)).toFixed(0)}% of its old value.` : "";
  return (
    <>
      <p>
        The model reads {quote(of.characters[i])}: unit {unit} goes from {signed(found[0].value)} to{" "}
        {signed(found.at(-1)!.value)}. {kept}
      </p>
      <div class="buttons">
        <button
          type="button"
          disabled={i + 1 >= of.tokens.length}
          onClick={() => ([at.value, played.value] = [i + 1, played.value + 1])}
        >
          Read the next character
        </button>
        <button type="button" onClick={() => played.value++}>Play the step again</button>
      </div>
      <ol class={played.value ? "cell play" : "cell"} key={`${played.value} ${i}`} aria-label={`One step of the ${cell.toUpperCase()}, unit ${unit}`}>
        {found.map(({ name, letter, value, meaning, from = 0 }, row) => {
          const [now, first] = [place(value), place(from)];
          return (
            <li key={letter} style={{ "--row": row }}>
              <span>{name} <i>{letter}</i></span>
              <span class="axis" aria-hidden="true">
                <span class={value < 0 ? "negative" : ""} style={{ ...now, "--left": first.left, "--width": first.width }} />
              </span>
              <b>{signed(value)}</b>
              <small>{meaning}</small>
            </li>
          );
        })}
      </ol>
    </>
  );
}
