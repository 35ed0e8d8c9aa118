import { proxy, wrap, type Remote } from "comlink";
import type { Engine } from "./types";

/** Start the worker, and return the engine in it. If the worker fails, so do its calls; the next call starts another. */
export function startEngine(): Engine {
  const waiting = new Set<(error: Error) => void>();
  let remote: Remote<Engine> | null = start();

  function start(): Remote<Engine> {
    const worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module" });
    worker.addEventListener("error", () => {
      worker.terminate();
      remote = null;
      for (const fail of waiting) fail(new Error("The program that runs the models could not be loaded; “Start again” tries again."));
      waiting.clear();
    });
    return wrap<Engine>(worker);
  }

  const call = (key: keyof Engine) => (...given: unknown[]) =>
    new Promise((done, fail) => {
      waiting.add(fail);
      remote ??= start();
      // A function is not copied into the worker: it is called back.
      const sent = given.map((each) => (typeof each === "function" ? proxy(each) : each));
      const result = (remote[key] as (...sent: unknown[]) => Promise<unknown>)(...sent);
      void result.then(done, fail).finally(() => waiting.delete(fail));
    });
  return new Proxy({} as Engine, { get: (_, key) => call(key as keyof Engine) });
}
