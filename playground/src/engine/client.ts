import { proxy, wrap } from "comlink";
import type { Engine } from "./types";

/** Start the worker, and return the engine in it. */
export function startEngine(): Engine {
  const worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module" });
  const engine = wrap<Engine>(worker) as unknown as Engine;
  // A function is not copied into the worker: it is called back.
  const memoryCurve: Engine["memoryCurve"] = (name, tokens, resets, onPoint, slot) =>
    engine.memoryCurve(name, tokens, resets, proxy(onPoint), slot);
  return new Proxy(engine, { get: (target, key) => (key === "memoryCurve" ? memoryCurve : Reflect.get(target, key)) });
}
