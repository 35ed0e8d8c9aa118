/** The models, in a worker, and what the panels need to call them. */

import { signal } from "@preact/signals";
import { startEngine } from "./engine/client";
import type { Encoded, ModelInfo } from "./engine/types";
import { quote } from "./letters";
import { MODELS } from "./view";

export const engine = startEngine();

/** One sentence if something failed, else empty. */
export const failure = signal("");

/** The model of the last text that was begun; null after a failure, until a text is begun again. */
export const loaded = signal<ModelInfo | null>(null);

const sentence = (error: unknown) => (error instanceof Error ? error.message : String(error));

/** Load what is not shown yet: the page then needs no network. */
export async function loadAll(): Promise<void> {
  for (const name of MODELS) await engine.load(name).catch((error) => (failure.value = sentence(error)));
}

/** Show why something failed, but for calls that a newer one ended. */
export function report(error: unknown): void {
  if (error instanceof Error && error.name === "AbortError") return;
  failure.value = sentence(error);
  loaded.value = null;
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

/** The characters of tokens. */
export const charactersOf = (info: ModelInfo, tokens: Iterable<number>) =>
  Array.from(tokens, (token) => info.vocabulary[token]);

/** One sentence about the characters that were left out, or empty. */
export function leftOut({ unknown }: Encoded): string {
  if (!unknown.length) return "";
  const some = unknown.slice(0, 8).map(quote).join(" ");
  const more = unknown.length > 8 ? ` and ${unknown.length - 8} more` : "";
  return `The models know 65 characters; left out here: ${some}${more}.`;
}
