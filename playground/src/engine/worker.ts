import { expose, releaseProxy, type Remote } from "comlink";
import { createEngine } from "./engine";
import { fetchModel } from "./files";
import type { Engine } from "./types";

const engine = createEngine(fetchModel);

const memoryCurve: Engine["memoryCurve"] = async (name, tokens, resets, onPoint, slot) => {
  try {
    await engine.memoryCurve(name, tokens, resets, onPoint, slot);
  } finally {
    (onPoint as unknown as Remote<typeof onPoint>)[releaseProxy]();
  }
};

expose({ ...engine, memoryCurve });
