/**
 * All that is shown, as signals, and its text in the URL: a view can be sent to somebody.
 *
 * What follows from these by computation is not kept here. Values at their defaults are left out of the URL.
 */

import { computed, signal, type Signal } from "@preact/signals";
import { PASSAGE, PROMPT } from "./defaults";
import type { ModelName } from "./engine/types";

/** The state is reset every so many characters; null: never. */
export type Reset = number | null;

export const RESETS: Reset[] = [1, 2, 4, 8, 16, 32, 64, 128, null];
export const MODELS: ModelName[] = ["astra_beta", "astra_alpha", "elman_alpha"];
export const PANELS = ["writers", "surprise", "inside", "reach", "state"] as const;
export type Panel = (typeof PANELS)[number];

/** Characters that each field takes. A text is analysed in one to four seconds. */
export const PROMPT_LIMIT = 500;
export const TEXT_LIMIT = 5000;
export const STATE_LIMIT = 8000;
/** Characters that the two writers write before they stop. */
export const WRITTEN_LIMIT = 2000;

interface Parameter {
  name: string;
  /** Set the value from its text in a URL; false: it cannot be used. */
  read(text: string): boolean;
  reset(): void;
  /** undefined: the default. */
  text(): string | undefined;
}

const parameters: Parameter[] = [];

/** A value of the view. `read` returns undefined for a text that it cannot use. */
function parameter<T>(
  name: string,
  initial: T,
  read: (text: string) => T | undefined,
  write: (value: T) => string = String,
): Signal<T> {
  const value = signal(initial);
  parameters.push({
    name,
    read(text) {
      const found = read(text);
      if (found !== undefined) value.value = found;
      return found !== undefined;
    },
    reset: () => (value.value = initial),
    text: () => (write(value.value) === write(initial) ? undefined : write(value.value)),
  });
  return value;
}

const oneOf =
  <T extends string>(names: readonly T[]) =>
  (text: string) =>
    names.find((name) => name === text);

const integer = (low: number, high: number) => (text: string) =>
  /^\d{1,10}$/.test(text) && +text >= low && +text <= high ? +text : undefined;

const atMost = (length: number) => (text: string) => (text.length <= length ? text : undefined);

/** The slider's history: from which character on the state is reset how often. The first is from 0. */
export type Schedule = [from: number, every: Reset][];

const resetText = (every: Reset) => (every === null ? "never" : String(every));

function readReset(text: string): Reset | undefined {
  return RESETS.find((every) => resetText(every) === text);
}

/** "1", or "1,120:16,300:never" if the slider was moved after 120 and 300 characters. */
function readSchedule(text: string): Schedule | undefined {
  const schedule: Schedule = [];
  for (const part of `0:${text}`.split(",")) {
    const [from, every] = part.split(":");
    const [start, reset] = [integer(0, WRITTEN_LIMIT)(from), readReset(every ?? "")];
    const last = schedule.at(-1)?.[0] ?? -1;
    if (start === undefined || reset === undefined || start <= last) return undefined;
    schedule.push([start, reset]);
  }
  return schedule;
}

function writeSchedule(schedule: Schedule): string {
  return schedule.map(([from, every], i) => (i ? `${from}:` : "") + resetText(every)).join(",");
}

export const panel = parameter<Panel>("panel", "writers", oneOf(PANELS));
export const model = parameter<ModelName>("model", "astra_beta", oneOf(MODELS));
export const schedule = parameter<Schedule>("every", [[0, 1]], readSchedule, writeSchedule);
export const every = computed(() => schedule.value[schedule.value.length - 1][1]);

/** The question of the guided tour, counted from 1; 0: no tour. */
export const tour = parameter("tour", 0, integer(1, 5));

/** Large type, for a class. */
export const projector = parameter("projector", false, (text) => (text === "" || text === "true" ? true : undefined));

export const prompt = parameter("prompt", PROMPT, atMost(PROMPT_LIMIT));
export const seed = parameter("seed", 0, integer(0, 2 ** 32 - 1));
export const temperature = parameter("temperature", 0.8, (text) =>
  /^\d(\.\d{1,2})?$/.test(text) && +text <= 2 ? +text : undefined,
);
export const topK = parameter<number | null>(
  "top_k",
  null,
  (text) => (text === "all" ? null : integer(1, 65)(text)),
  (k) => (k === null ? "all" : String(k)),
);
export const fast = parameter("fast", false, (text) => (text === "true" ? true : undefined));
/** Characters written by each of the two writers. */
export const written = parameter("written", 0, integer(1, WRITTEN_LIMIT));

export const text = parameter("text", PASSAGE, atMost(TEXT_LIMIT));
/** The character that is looked at, counted from 0. At first, the end of a line. */
export const at = parameter("at", PASSAGE.indexOf("heart\n") + 5, integer(0, TEXT_LIMIT));
/** The unit of the state that is looked at; null: the one that follows something most closely. */
export const unit = parameter<number | null>("unit", null, integer(0, 65535));

export const draft = parameter("draft", PROMPT, atMost(TEXT_LIMIT));
export const stateText = parameter("state", "", atMost(STATE_LIMIT));
/** Characters written on from the state. */
export const continued = parameter("continued", 0, integer(1, WRITTEN_LIMIT));

/** The view as the part of a URL after "#". */
export function writeView(): string {
  const found = new URLSearchParams();
  for (const { name, text } of parameters) {
    const value = text();
    if (value !== undefined) found.set(name, value);
  }
  return found.toString();
}

/** Show what the part of a URL after "#" says, and return what of it cannot be used, e.g. "seed=x". */
export function readView(hash: string): string[] {
  const unused: string[] = [];
  for (const each of parameters) each.reset();
  for (const [name, value] of new URLSearchParams(hash)) {
    if (!parameters.find((each) => each.name === name)?.read(value)) {
      unused.push(`${name}=${value}`);
    }
  }
  schedule.value = schedule.value.filter(([from]) => from <= written.value); // the rest was never written
  return unused;
}

/** Show another model: its units are others. */
export function choose(name: ModelName): void {
  model.value = name;
  unit.value = null;
}

/** Reset the state every so many characters, from character `from` of what is being written. */
export function resetFrom(from: number, value: Reset): void {
  const before = schedule.value.filter(([start]) => start < from);
  if (before.at(-1)?.[1] === value) schedule.value = before;
  else schedule.value = [...before, [before.length ? from : 0, value]];
}

/** A text is marked where the state was reset, if so many characters at least lie between two resets. */
export const MARKED_FROM = 4;

/** Where to mark what was written after `read` tokens of a prompt: before these characters, the state was set to zero. */
export function marks(moves: Schedule, read: number, length: number): number[] {
  const found: number[] = [];
  let [since, move] = [0, 0];
  // Each character is read before the next one is drawn, with the slider as it is for that one
  for (let i = -read; i < length - 1; i++) {
    while (moves[move + 1]?.[0] <= i + 1) move++;
    const every = moves[move][1] ?? Infinity;
    if (since >= every) {
      since = 0;
      if (every >= MARKED_FROM && i >= 0) found.push(i);
    }
    since++;
  }
  return found;
}

/** "every 4 characters", after "reset the state". */
export function inWords(value: Reset): string {
  if (value === null) return "never";
  return value === 1 ? "before every character" : `every ${value} characters`;
}

/** "reset every 4 characters", after "the state is". */
export function resetInWords(value: Reset): string {
  return value === null ? "never reset" : `reset ${inWords(value)}`;
}
