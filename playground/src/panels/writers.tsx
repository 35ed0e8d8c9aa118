/** Panel 1: one prompt, one seed, one set of weights; the left writes with its state, the right without. */

import { batch, computed, effect, signal, untracked } from "@preact/signals";
import { Fragment, type ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { mean } from "../analysis";
import { Bars } from "../bars";
import { Code } from "../code";
import type { ModelInfo, Writing } from "../engine/types";
import { charactersOf, debounce, engine, failure, leftOut, loaded, newest, report } from "../models";
import {
  every, fast, inWords, MARKED_FROM, marks, model, prompt, PROMPT_LIMIT, resetFrom, schedule, seed, temperature, topK,
  written, WRITTEN_LIMIT, type Reset, type Schedule,
} from "../view";
import { Field, NumberField, Panel, resetTitle, TextField } from "./parts";

/** Characters per step, and milliseconds between two steps. */
const READING = { characters: 2, pause: 80 };
const FAST = { characters: 100, pause: 0 };
/** Characters that are written at once for readers who want nothing to move. */
const STILL = 400;
/** Characters after which the costs are computed again while the models write. */
const COSTS_EVERY = 50;
/** Milliseconds between two changes of the bars while the models write: each can be read. */
const BARS_PAUSE = 300;

/** What both write on from. */
interface Begun {
  info: ModelInfo;
  start: Uint8Array; // the prompt's tokens
  writings: [Writing, Writing];
  tokens: [number[], number[]]; // written by each
}

/** What one of them may write next, and what it remembers. */
interface Next {
  info: ModelInfo;
  probabilities: Float64Array;
  memory: string[];
}

const begun = signal<Begun | null>(null); // null: the model is not loaded, or the prompt not read
const texts = [signal(""), signal("")];
const costs = signal<{ from: number; means: number[] } | null>(null); // of the characters from there on
const costed = signal(0); // characters up to which the costs are
const nexts = signal<Next[]>([]);
/** Whether the writers write, or are about to. */
export const running = signal(false);
const note = signal("");
const rate = signal(0);
const still = matchMedia("(prefers-reduced-motion: reduce)");

let generation = 0;
let ahead = 0; // characters that are written, or being written
let hurry = 0; // so many characters are written at once: those that a link shows
let end = WRITTEN_LIMIT; // so many are written, and no more
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
async function step(mine: number, { info, writings, tokens }: Begun, n: number): Promise<number> {
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
    texts[side].value += charactersOf(info, result.tokens).join("");
  });
  return count;
}

/** Forget what was written: it is not of what is set now. */
function clear(): void {
  generation++;
  begun.value = null;
  written.value = costed.value = ahead = 0;
  nexts.value = [];
  costs.value = null;
  for (const text of texts) text.value = "";
}

/** Load the model, read the prompt, and write. All that the page shows begins here, at first and after a failure. */
async function begin(): Promise<void> {
  clear();
  failure.value = "";
  const mine = generation;
  try {
    const info = await engine.load(model.value);
    const { tokens: start, note: sentence } = await promptTokens(info, prompt.value);
    const writings = await Promise.all([
      engine.start(info.name, start, seed.value, null),
      engine.start(info.name, start, seed.value, schedule.value[0][1]),
    ]);
    if (mine !== generation) return;
    note.value = sentence;
    begun.value = { info, start, writings, tokens: [[], []] };
    void run(begun.value);
    if (loaded.value?.name !== info.name) loaded.value = info;
  } catch (error) {
    fail(mine, error);
  }
}

function fail(mine: number, error: unknown): void {
  if (mine !== generation) return;
  running.value = false;
  begun.value = null; // “Write” then begins anew
  report(error);
}

/** Write until paused, until the settings change, or until there is enough. */
async function run(from: Begun): Promise<void> {
  if (looping === generation) return;
  const mine = (looping = generation);
  const [began, first] = [performance.now(), ahead];
  try {
    while (running.value && mine === generation && ahead < end) {
      const hurried = ahead < hurry;
      const { characters, pause } = fast.value || hurried ? FAST : READING;
      if (!(await step(mine, from, Math.min(characters, (hurried ? Math.min(hurry, end) : end) - ahead)))) return;
      written.value = ahead;
      rate.value = (1000 * (ahead - first)) / (performance.now() - began);
      await sleep(pause);
    }
  } catch (error) {
    fail(mine, error);
  }
  if (mine !== generation) return;
  looping = -1;
  running.value = false;
}

/** Write on; readers who want nothing to move get much at once. */
function go(): void {
  hurry = still.matches ? Math.min(ahead + STILL, WRITTEN_LIMIT) : 0;
  end = hurry || WRITTEN_LIMIT;
  running.value = true;
}

/** Where the slider was moved last: what came before was written with another reset. */
const moved = computed(() => schedule.value.at(-1)![0]);

/** Nats of what each wrote since the slider was moved, given to the model with its state. */
const updateCosts = newest(
  async (of: Begun, from: number, count: number) => {
    const texts = of.tokens.map((written) => Uint8Array.from([...of.start, ...written.slice(0, count)]));
    const nats = await Promise.all(texts.map((text) => engine.surprise(of.info.name, text, null)));
    // The first token has no cost; without a move, the prompt counts
    return { of, from, count, means: nats.map((each) => mean(from ? each.subarray(of.start.length - 1 + from) : each)) };
  },
  ({ of, from, count, means }) => {
    if (of !== begun.value) return;
    costed.value = count;
    costs.value = { from, means };
  },
);

let drawn = 0; // when the bars changed

/** What each may write next, with the slider where it is. */
const updateNexts = newest(
  async (of: Begun, reset: Reset) => {
    const { info } = of;
    const found = [null, reset].map(async (resetEvery, side): Promise<Next> => {
      const writing = of.writings[side];
      const read = [...of.start, ...of.tokens[side]];
      const kept = resetEvery !== null && writing.sinceReset >= resetEvery ? 0 : writing.sinceReset;
      const options = { temperature: temperature.value, topK: topK.value, resetEvery };
      const probabilities = await engine.next(info.name, writing, options);
      return { info, probabilities, memory: charactersOf(info, read.slice(-kept - 1)) };
    });
    return { of, found: await Promise.all(found) };
  },
  ({ of, found }) => {
    if (of === begun.value) nexts.value = found;
  },
);

/** Start the writers, or show again what a link shows. */
export function startWriters(): void {
  go();
  if (written.value) hurry = end = written.value;
  void begin();
  const later = debounce(300, () => void begin());
  let changes = 0;
  effect(() => {
    prompt.value, seed.value, temperature.value, topK.value, model.value;
    if (changes++) {
      untracked(() => (schedule.value = [[0, every.value]]));
      clear();
      go();
      later();
    }
  });
  effect(() => {
    const due = !running.value || written.value % COSTS_EVERY < READING.characters;
    if (due && written.value > moved.value && begun.value) void updateCosts(begun.value, moved.value, written.value);
  });
  effect(() => {
    written.value, running.value;
    const [of, reset, now] = [begun.value, every.value, performance.now()];
    if (!of || (running.value && now - drawn < BARS_PAUSE)) return;
    drawn = now;
    void updateNexts(of, reset);
  });
}

function toggle(): void {
  if (running.value) running.value = false;
  else {
    go();
    void (begun.value ? run(begun.value) : begin());
  }
}

/** Write one character more on both sides. */
function one(): void {
  hurry = end = Math.min(ahead + 1, WRITTEN_LIMIT);
  running.value = true;
  void (begun.value ? run(begun.value) : begin());
}

/** Write on, also beyond what was to be written at once. */
export function writeOn(): void {
  if (running.value) go();
  else toggle();
}

/** Write anew with the slider moved so; if `count` is given, so many characters at once. */
export function writeAnew(moves: Schedule, count?: number): void {
  // At once: with the new slider, what was written before shows nothing
  batch(() => {
    schedule.value = moves;
    clear();
  });
  go();
  if (count) hurry = end = count;
  void begin();
}

/** Stop after so many characters more. */
export function stopAfter(count: number): void {
  end = Math.min(end, ahead + count);
}

/** The slider: acts on what is written from now on. */
export function setEvery(value: Reset): void {
  resetFrom(ahead, value);
}

/** Pixels: a field that is so close to its bottom follows what is written. */
const NEARLY = 8;

/** What the right one wrote, with the slider's moves and the resets: marks that are no part of the text. */
function Marked({ text }: { text: string }) {
  const moves = schedule.value;
  const resets = marks(moves, begun.value?.start.length ?? 0, text.length);
  return moves.map(([from, value], i) => {
    const end = moves[i + 1]?.[0] ?? text.length;
    const cuts = [from, ...resets.filter((at) => at >= from && at < end), end];
    return (
      <Fragment key={from}>
        {i > 0 && from <= text.length && <mark data-move={inWords(value)} />}
        {cuts.slice(1).map((cut, j) => <Fragment key={j}>{j > 0 && <i />}{text.slice(cuts[j], cut)}</Fragment>)}
      </Fragment>
    );
  });
}

function Text({ side, title, label }: { side: number; title: string; label: string }) {
  const box = useRef<HTMLPreElement>(null);
  const text = texts[side].value;
  const cost = costs.value?.from === moved.value ? costs.value.means[side] : null;
  const next = nexts.value[side];
  const height = useRef(0);
  useLayoutEffect(() => {
    const field = box.current!;
    const atBottom = field.scrollTop + field.clientHeight > height.current - NEARLY;
    height.current = field.scrollHeight;
    if (running.value && atBottom) field.scrollTop = field.scrollHeight;
  }, [text]);
  return (
    <div class="column">
      <div class="head">
        <h3>{title}</h3>
        <p class="figure">
          {cost === null ? "…" : cost.toFixed(2)} <span>surprise {moved.value > 0 ? "since the move" : "per character"}</span>
        </p>
      </div>
      <pre ref={box} class="written" tabIndex={0} role="group" aria-label={label}>
        <b><bdi>{prompt.value}</bdi></b>
        {side ? <Marked text={text} /> : text}
      </pre>
      <Bars
        probabilities={next?.probabilities ?? null}
        characters={next?.info.vocabulary ?? []}
        memory={next?.memory ?? []}
        label={`Bets on the next character: ${title}`}
      />
    </div>
  );
}

/** What the reader sets once, if at all. */
function Options() {
  return (
    <details class="options">
      <summary>Seed, temperature and top-k</summary>
      <div class="controls">
        <NumberField label="Seed" most={2 ** 32 - 1} value={seed.value} onValue={(value) => (seed.value = value)} />
        <Field label={`Temperature: ${temperature.value || "0 (the likeliest)"}`}>
          <input
            type="range"
            min={0}
            max={2}
            step={0.01}
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
      </div>
      <p class="small">
        The seed picks the random numbers: the same seed writes the same text. A higher temperature lets unlikely
        characters come more often. Top-k lets only the k likeliest characters come.
      </p>
    </details>
  );
}

/** `children`: what comes into sight with the panel. */
export function Writers({ children }: { children: ComponentChildren }) {
  const full = written.value >= WRITTEN_LIMIT;
  return (
    <Panel name="writers" title="Two writers" busy={!running.value && written.value > moved.value && costed.value !== written.value}>
      {children}
      <div class="controls">
        <div class="buttons">
          <button type="button" onClick={toggle} disabled={full}>
            {running.value ? "Pause" : "Write"}
          </button>
          <button type="button" onClick={one} disabled={full}>One more character</button>
          <button type="button" onClick={() => writeAnew([[0, every.value]])}>Start again</button>
          <label>
            <input
              type="checkbox"
              checked={fast.value}
              onChange={(event) => (fast.value = event.currentTarget.checked)}
            />
            Fast
          </label>
        </div>
        <TextField label="Prompt" rows={1} limit={PROMPT_LIMIT} value={prompt} />
      </div>
      {note.value && <p class="note" role="status">{note.value}</p>}
      <div class="pair">
        <Text side={0} title="With its state" label="Text written with the state" />
        <Text side={1} title={resetTitle(every.value)} label="Text written while the state is reset" />
      </div>
      {schedule.value.some(([, reset]) => reset !== null && reset >= MARKED_FROM) && (
        <p>A thin line in the text is a reset: the model forgets what is before it.</p>
      )}
      <p class="small">
        The number shows how much each text surprises the model that keeps its state, in nats per character, on average.
        Lower is better: a sure thing costs 0 nats, an even bet 0.7, a blind guess among 65 characters 4.2.
        {" "}
        <span role="status">{!begun.value && !failure.value && `Loading ${model.value}… `}</span>
        Written so far: {written.value.toLocaleString("en")} characters
        {rate.value > 0 && `, ${Math.round(rate.value).toLocaleString("en")} per second on each side`}
        {full && `; that is enough`}.
      </p>
      <Options />
      <Code />
    </Panel>
  );
}
