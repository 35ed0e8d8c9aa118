/** The page: what all panels share, and the panels. */

import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { goTo, SITE } from "./address";
import { failure } from "./models";
import type { ModelName } from "./engine/types";
import { Inside } from "./panels/inside";
import { Reach } from "./panels/reach";
import { State } from "./panels/state";
import { Surprise } from "./panels/surprise";
import { setEvery, Writers } from "./panels/writers";
import { dark, toggleDark } from "./screen";
import { ForAClass, Share } from "./share";
import { ask, Tour } from "./tour";
import { choose, every, inWords, model, projector, RESETS, type Panel } from "./view";

const MODELS: [ModelName, string][] = [
  ["astra_beta", "GRU, 2 layers (astra_beta)"],
  ["astra_alpha", "GRU, 1 layer (astra_alpha)"],
  ["elman_alpha", "Elman RNN (elman_alpha)"],
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
  const last = RESETS.length - 1;
  const bar = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const height = () => document.documentElement.style.setProperty("--bar", `${bar.current!.offsetHeight}px`);
    new ResizeObserver(height).observe(bar.current!);
    height();
  }, []);
  return (
    <div ref={bar} class="bar" role="group" aria-label="For all panels">
      <label>
        <span>Model</span>
        <select value={model.value} onChange={(event) => choose(event.currentTarget.value as ModelName)}>
          {MODELS.map(([name, title]) => <option key={name} value={name}>{title}</option>)}
        </select>
      </label>
      <label class="slider">
        <span>Reset the state: <output>{inWords(every.value)}</output></span>
        <span class="slide">
          <input
            type="range"
            min={0}
            max={last}
            step={1}
            value={RESETS.indexOf(every.value)}
            aria-label="Reset the state"
            aria-valuetext={inWords(every.value)}
            onInput={(event) => setEvery(RESETS[event.currentTarget.valueAsNumber])}
          />
          <span class="ticks" aria-hidden="true">
            {RESETS.map((reset, i) => (
              <span key={i} class={reset === every.value ? "here" : ""} style={{ left: `${(100 * i) / last}%` }}>
                {reset ?? "never"}
              </span>
            ))}
          </span>
        </span>
      </label>
      <Share />
      <button type="button" class="large" aria-pressed={projector.value} onClick={() => (projector.value = !projector.value)}>
        Large type
      </button>
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
        <a class="home" href={SITE ?? undefined}>
          <svg viewBox="0 0 24 24" aria-hidden="true">
            <path d="M2 12C5 0 9 0 12 12s7 12 10 0" />
          </svg>
          jaxgru
        </a>
        <span class="name">Playground</span>
        {SITE && <a href={`${SITE}tutorials/gru_by_hand/`}>Tutorial</a>}
        <button type="button" onClick={toggleDark}>{dark.value ? "Light" : "Dark"}</button>
      </header>
      <Bar />
      <main>
        <h1>Why does my RNN write gibberish?</h1>
        <p>
          An RNN, a recurrent neural network, reads one character at a time and keeps what it remembers in its state, a
          list of numbers. To reset it means to set them all to zero. Here one model, a GRU (gated recurrent unit, a kind
          of RNN), writes twice with the same random numbers. On the left, it keeps its state. On the right, the state is
          reset as often as the slider says. Move it while they write, or take the tour of five questions. Below the texts
          are the code and a check for your own network.
        </p>
        <nav aria-label="Panels">
          <button id="take-the-tour" type="button" class="primary" onClick={() => ask(1)}>Take the tour</button>
          {TITLES.map(([name, title]) => (
            <a
              key={name}
              href={name === "writers" ? "#" : `#panel=${name}`}
              onClick={(event) => {
                if (event.ctrlKey || event.metaKey || event.shiftKey) return; // in a tab of its own
                event.preventDefault();
                goTo(name);
              }}
            >
              {title}
            </a>
          ))}
        </nav>
        <Writers><Problems /></Writers>
        {whole.value && [<Surprise />, <Inside />, <Reach />, <State />, <ForAClass />]}
      </main>
      <Tour />
      <footer>
        <p>
          The models were trained on plays by Shakespeare. They run in this page: nothing that is typed here leaves it.
          The address holds all that the page shows, so that a link shows somebody else the same.
        </p>
      </footer>
    </>
  );
}
