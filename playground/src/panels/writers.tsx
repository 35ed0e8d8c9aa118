/** Panel 1: one prompt, one seed, one set of weights; the left writes with its state, the right without. */

import { effect, signal, untracked } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { mean } from "../analysis";
import type { ModelInfo, Writing } from "../engine/types";
import { debounce, engine, leftOut, newest, report } from "../models";
import {
  every, fast, inWords, loseEvery, model, prompt, PROMPT_LIMIT, schedule, seed, temperature, topK,
  written, WRITTEN_LIMIT, type Reset,
} from "../view";
import { Column, Field, Panel } from "./parts";

/** Characters per step, and milliseconds between two steps. */
const READING = { characters: 2, pause: 80 };
const FAST = { characters: 100, pause: 0 };
/** Characters that are written at once for readers who want nothing to move. */
const STILL = 400;
/** Characters after which the costs are computed again while the models write. */
const COSTS_EVERY = 100;

const texts = [signal(""), signal("")];
const costs = [signal<number | null>(null), signal<number | null>(null)];
const costed = signal(0); // characters that the costs are of
const running = signal(false);
const note = signal("");
const rate = signal(0);

let generation = 0;
let writings: [Writing, Writing];
let info: ModelInfo;
let start: Uint8Array; // the prompt's tokens
let tokens: [number[], number[]]; // written by each
let ahead = 0; // characters that are written, or being written
let hurry = 0; // characters to write at once, and then to stop: those that a link shows
let looping = -1; // the generation that `run` is writing

const sleep = (milliseconds: number) => new Promise((done) => setTimeout(done, milliseconds));

/** The tokens to start from: a line break if there are none, as the model must read something. */
export async function promptTokens(name: ModelInfo, text: string) {
  const encoded = await engine.encode(name.name, text);
  const empty = encoded.tokens.length === 0;
  const lineBreak = Uint8Array.of(name.vocabulary.indexOf("\n"));
  const missing = empty ? "Without a prompt, the models start from a line break." : "";
  return { tokens: empty ? lineBreak : encoded.tokens, note: `${leftOut(encoded)} ${missing}`.trim() };
}

/** Write up to n characters on both sides, and return how many. */
async function step(mine: number, n: number): Promise<number> {
  const now = schedule.value.filter(([from]) => from <= ahead).at(-1)!;
  const next = schedule.value.find(([from]) => from > ahead)?.[0] ?? WRITTEN_LIMIT;
  const count = Math.min(n, next - ahead, WRITTEN_LIMIT - ahead);
  const options = { temperature: temperature.value, topK: topK.value };
  ahead += count;
  const results = await Promise.all([
    engine.write(info.name, writings[0], count, { ...options, resetEvery: null }),
    engine.write(info.name, writings[1], count, { ...options, resetEvery: now[1] }),
  ]);
  if (mine !== generation) return 0;
  results.forEach((result, side) => {
    writings[side] = result.writing;
    tokens[side].push(...result.tokens);
    texts[side].value += Array.from(result.tokens, (token) => info.vocabulary[token]).join("");
  });
  return count;
}

/** Read the prompt; false: the settings changed meanwhile. */
async function restart(): Promise<boolean> {
  const mine = ++generation;
  const described = await engine.load(model.value);
  const first = await promptTokens(described, prompt.value);
  const from = await Promise.all([
    engine.start(described.name, first.tokens, seed.value, null),
    engine.start(described.name, first.tokens, seed.value, schedule.value[0][1]),
  ]);
  if (mine !== generation) return false;
  [info, start, note.value] = [described, first.tokens, first.note];
  [writings, tokens] = [from, [[], []]];
  clear();
  return true;
}

function clear(): void {
  written.value = costed.value = ahead = 0;
  for (const side of [0, 1]) [texts[side].value, costs[side].value] = ["", null];
}

/** Write until paused, until the settings change, or until there is enough. */
async function run(): Promise<void> {
  if (looping === generation) return;
  const mine = (looping = generation);
  const [began, from] = [performance.now(), ahead];
  while (running.value && mine === generation && ahead < (hurry || WRITTEN_LIMIT)) {
    const { characters, pause } = fast.value || hurry ? FAST : READING;
    if (!(await step(mine, Math.min(characters, (hurry || Infinity) - ahead)))) return;
    written.value = ahead;
    rate.value = (1000 * (ahead - from)) / (performance.now() - began);
    await sleep(pause);
  }
  if (mine !== generation) return;
  looping = -1;
  hurry = 0;
  running.value = false;
}

/** Start anew with what is set now. */
function anew(): void {
  hurry = 0;
  running.value = true;
  restart().then((ready) => (ready ? run() : undefined)).catch(report);
}

/** Nats of what each wrote, given to the model with its state. */
const updateCosts = newest(
  async (count: number) => {
    const texts = tokens.map((written) => Uint8Array.from([...start, ...written.slice(0, count)]));
    return { count, means: await Promise.all(texts.map((text) => engine.surprise(info.name, text, null).then(mean))) };
  },
  ({ count, means }) => {
    costed.value = count;
    means.forEach((value, side) => (costs[side].value = value));
  },
);

/** Start the writers, or show again what a link shows. Done when there is a first text. */
export async function startWriters(): Promise<void> {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  hurry = written.value || (still ? STILL : 0);
  written.value = 0;
  running.value = true;
  if (await restart()) {
    await step(generation, READING.characters);
    void run().catch(report);
  }
  const again = debounce(300, anew);
  let changes = 0;
  effect(() => {
    prompt.value, seed.value, temperature.value, topK.value, model.value;
    if (changes++) {
      generation++; // what is being written is not of these settings
      untracked(() => (schedule.value = [[0, every.value]]));
      running.value = true;
      clear();
      again();
    }
  });
  effect(() => {
    const due = !running.value || written.value % COSTS_EVERY < READING.characters;
    if (due && written.value) void updateCosts(written.value);
  });
}

function toggle(): void {
  hurry = 0;
  running.value = !running.value;
  if (running.value) void run().catch(report);
}

function again(): void {
  schedule.value = [[0, every.value]];
  anew();
}

/** The slider: acts on what is written from now on. */
export function setEvery(value: Reset): void {
  loseEvery(value, ahead);
}

function Text({ side, label }: { side: number; label: string }) {
  const box = useRef<HTMLPreElement>(null);
  const text = texts[side].value;
  const cost = costs[side].value;
  useLayoutEffect(() => {
    if (running.value) box.current!.scrollTop = box.current!.scrollHeight;
  }, [text]);
  return (
    <>
      <pre ref={box} class="written" tabIndex={0} role="group" aria-label={label}>
        <b>{prompt.value}</b>
        {text}
      </pre>
      <p class="figure">
        {cost === null ? "…" : cost.toFixed(3)} <span>nats per character</span>
      </p>
    </>
  );
}

export function Writers() {
  const full = written.value >= WRITTEN_LIMIT;
  return (
    <Panel name="writers" title="Two writers" busy={!running.value && costed.value !== written.value}>
      <p>
        Both sides continue the same prompt with the same weights and the same random numbers, but the right one
        loses its state {inWords(every.value)}: move the slider at the top while they write. The figures say how
        well each text is written in the eyes of the model that keeps its state, in nats per character: the lower,
        the more likely.
      </p>
      <div class="controls">
        <Field label="Prompt" wide>
          <input
            type="text"
            value={prompt.value}
            maxLength={PROMPT_LIMIT}
            spellcheck={false}
            onInput={(event) => (prompt.value = event.currentTarget.value)}
          />
        </Field>
        <Field label="Seed">
          <input
            type="number"
            min={0}
            max={2 ** 32 - 1}
            value={seed.value}
            onInput={(event) => {
              const value = event.currentTarget.valueAsNumber;
              if (Number.isInteger(value) && value >= 0 && value < 2 ** 32) seed.value = value;
            }}
          />
        </Field>
        <Field label={`Temperature: ${temperature.value || "0 (the likeliest)"}`}>
          <input
            type="range"
            min={0}
            max={1.5}
            step={0.1}
            value={temperature.value}
            onInput={(event) => (temperature.value = event.currentTarget.valueAsNumber)}
          />
        </Field>
        <Field label="Top-k">
          <select
            value={topK.value ?? "all"}
            onChange={(event) => (topK.value = +event.currentTarget.value || null)}
          >
            <option value="all">all</option>
            {[...new Set([1, 2, 5, 10, 20, 30, ...(topK.value ? [topK.value] : [])])]
              .sort((a, b) => a - b)
              .map((k) => <option value={k}>{k}</option>)}
          </select>
        </Field>
        <div class="buttons">
          <button type="button" onClick={toggle} disabled={full}>
            {running.value ? "Pause" : "Write"}
          </button>
          <button type="button" onClick={again}>Again</button>
          <label>
            <input
              type="checkbox"
              checked={fast.value}
              onChange={(event) => (fast.value = event.currentTarget.checked)}
            />
            Fast
          </label>
        </div>
      </div>
      {note.value && <p class="note" role="status">{note.value}</p>}
      <div class="pair">
        <Column title="With its state">
          <Text side={0} label="Text written with the state" />
        </Column>
        <Column title={`State lost ${inWords(every.value)}`}>
          <Text side={1} label="Text written while losing the state" />
        </Column>
      </div>
      <p class="small">
        {written.value.toLocaleString("en")} characters
        {rate.value > 0 && `, ${Math.round(rate.value).toLocaleString("en")} per second on each side`}
        {full && `; that is enough, “Again” starts anew`}.
      </p>
    </Panel>
  );
}

