/** The probabilities of the next character, as bars. */

import { quote } from "./letters";

/** Rows: the likeliest characters. */
const ROWS = 6;
/** Characters that are shown of those that the model remembers. */
const LAST = 12;

interface Props {
  /** Of each character (V,); null: not known yet. */
  probabilities: Float64Array | null;
  characters: string[];
  /** What was read since the state was last reset. */
  memory: string[];
  label: string;
  /** The character that came: it is marked, and has a row of its own if it is none of the likeliest. */
  came?: number;
}

/** A space and a line break, visible. */
const glyph = (character: string) => ({ " ": "␣", "\n": "↵" })[character] ?? character;

function percent(p: number): string {
  if (p > 0 && p < 0.01) return "< 1%";
  return p < 1 && p > 0.99 ? "> 99%" : `${(100 * p).toFixed(0)}%`;
}

export function Bars({ probabilities, characters, memory, label, came }: Props) {
  const p = probabilities ?? new Float64Array();
  const likeliest = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, ROWS);
  if (came !== undefined && probabilities) {
    if (!likeliest.includes(came)) likeliest[ROWS - 1] = came;
  }
  return (
    <>
      <h4>
        {probabilities && <>Remembers <q>{memory.length > LAST && "…"}{memory.slice(-LAST).map(glyph)}</q>, bets on</>}
      </h4>
      <ol class="bars" aria-label={label}>
        {Array.from({ length: ROWS }, (_, row) => {
          const token = likeliest[row];
          if (token === undefined) return <li key={row} />;
          const character = characters[token];
          return (
            <li key={row} class={token === came ? "came" : ""}>
              <span class="glyph" role="img" aria-label={quote(character)}>{glyph(character)}</span>
              <span class="bar-of"><span style={{ width: `${100 * p[token]}%` }} /></span>
              <span>{percent(p[token])}</span>
            </li>
          );
        })}
      </ol>
    </>
  );
}
