/** The models, in two workers: one writes, one analyses, so that neither waits for the other. */

import { signal } from "@preact/signals";
import { wrap, type Remote } from "comlink";
import type { Encoded, Engine, ModelInfo, ModelName } from "./engine/types";
import { MODELS } from "./view";

function spawn(): Remote<Engine> {
  return wrap<Engine>(new Worker(new URL("./engine/worker.ts", import.meta.url), { type: "module" }));
}

export const writer = spawn();
export const analyst = spawn();

/** One sentence if a model cannot be used, else empty. */
export const failure = signal("");

const loaded: Partial<Record<ModelName, Promise<ModelInfo>>> = {};

/** Describe a model, which both workers then have. */
export function load(name: ModelName): Promise<ModelInfo> {
  loaded[name] ??= Promise.all([writer.load(name), analyst.load(name)]).then(
    ([info]) => info,
    (error) => {
      delete loaded[name];
      throw new Error(`The model ${name} could not be loaded (${error.message}); reload the page to try again.`);
    },
  );
  return loaded[name];
}

/** Load what is not shown yet: the page then needs no network. */
export async function loadAll(): Promise<void> {
  for (const name of MODELS) await load(name);
}

/** Show why something failed. */
export function report(error: unknown): void {
  failure.value = error instanceof Error ? error.message : String(error);
}

/** Wrap a computation for many calls: of those that come while one runs, only the last is computed. */
export function newest<A extends unknown[], R>(compute: (...given: A) => Promise<R>, use: (result: R) => void) {
  let waiting: A | undefined;
  let busy = false;
  return async (...given: A) => {
    waiting = given;
    if (busy) return;
    busy = true;
    while (waiting) {
      const current = waiting;
      waiting = undefined;
      try {
        use(await compute(...current));
      } catch (error) {
        report(error);
      }
    }
    busy = false;
  };
}

/** Call a function when the calls have paused for so many milliseconds. */
export function debounce(milliseconds: number, call: () => void): () => void {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, milliseconds) as unknown as number;
  };
}

/** One sentence about the characters that were left out, or empty. */
export function leftOut({ unknown }: Encoded): string {
  if (!unknown.length) return "";
  const some = unknown.slice(0, 8).map((character) => `“${character}”`).join(" ");
  const more = unknown.length > 8 ? ` and ${unknown.length - 8} more` : "";
  return `The models know 65 characters; left out here: ${some}${more}.`;
}
