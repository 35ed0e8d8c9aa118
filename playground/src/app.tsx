/** The page: what all panels share, and the panels. */

import { signal } from "@preact/signals";
import { failure } from "./models";
import type { ModelName } from "./engine/types";
import { Inside } from "./panels/inside";
import { Reach } from "./panels/reach";
import { State } from "./panels/state";
import { Surprise } from "./panels/surprise";
import { setEvery, Writers } from "./panels/writers";
import { dark, toggleDark } from "./screen";
import { every, inWords, model, RESETS, type Panel } from "./view";

const MODELS: [ModelName, string][] = [
  ["astra_alpha", "astra_alpha: GRU, 1 layer"],
  ["astra_beta", "astra_beta: GRU, 2 layers"],
  ["elman_alpha", "elman_alpha: Elman RNN"],
];

const TITLES: [Panel, string][] = [
  ["writers", "Two writers"],
  ["surprise", "Surprise"],
  ["inside", "Inside"],
  ["reach", "Reach"],
  ["state", "Copy the state"],
];

/** Whether all panels are shown, or the first alone: to show all at once would block the page for too long. */
export const whole = signal(false);

/** What of the link cannot be used. */
export const unused = signal<string[]>([]);

function Bar() {
  return (
    <div class="bar" role="group" aria-label="For all panels">
      <label>
        <span>Model</span>
        <select value={model.value} onChange={(event) => (model.value = event.currentTarget.value as ModelName)}>
          {MODELS.map(([name, title]) => <option key={name} value={name}>{title}</option>)}
        </select>
      </label>
      <label class="slider">
        <span>Lose the state <output>{inWords(every.value)}</output></span>
        <input
          type="range"
          min={0}
          max={RESETS.length - 1}
          step={1}
          value={RESETS.indexOf(every.value)}
          aria-label="Lose the state"
          aria-valuetext={inWords(every.value)}
          onInput={(event) => setEvery(RESETS[event.currentTarget.valueAsNumber])}
        />
      </label>
    </div>
  );
}

function Problems() {
  const parts = unused.value.map((part) => `“${part.length > 40 ? `${part.slice(0, 40)}…` : part}”`);
  return (
    <div role="alert">
      {failure.value && <p class="note">{failure}</p>}
      {parts.length > 0 && (
        <p class="note">
          This link has what the page cannot use: {parts.slice(0, 3).join(", ")}; the default is shown instead.
        </p>
      )}
    </div>
  );
}

export function App() {
  return (
    <>
      <header>
        <a class="home" href="../">
          <svg viewBox="0 0 24 24" aria-hidden="true">
            <path d="M2 12C5 0 9 0 12 12s7 12 10 0" />
          </svg>
          jaxgru
        </a>
        <span>Playground</span>
        <button type="button" onClick={toggleDark} aria-pressed={dark.value}>Dark</button>
      </header>
      <Bar />
      <main>
        <h1>What a model loses with its state</h1>
        <p>
          A recurrent language model reads one character at a time and keeps what it needs of the past in its
          state, a vector of numbers. The models in this page are trained on plays by Shakespeare; the slider sets
          their state to zero every so many characters, as a program does that forgets to pass it on.
        </p>
        <nav aria-label="Panels">
          {TITLES.map(([name, title]) => (
            <button key={name} type="button" onClick={() => document.getElementById(name)!.scrollIntoView()}>
              {title}
            </button>
          ))}
        </nav>
        <Problems />
        <Writers />
        {whole.value && [<Surprise />, <Inside />, <Reach />, <State />]}
      </main>
      <footer>
        <p>
          The address of this page holds all that it shows: copy it to send this view to somebody. Nothing
          that is typed here leaves the page.
        </p>
      </footer>
    </>
  );
}
