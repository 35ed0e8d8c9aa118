/**
 * Characters per second in Node, on one thread:
 *
 *     npx vite build --ssr src/engine/speed.ts --outDir node_modules/.speed && node node_modules/.speed/speed.js
 *
 * With two arguments more, a folder of node_modules with onnxruntime-web and one with the models as NAME.onnx, that
 * computes the same logits: a call per character, the carry handed on, and all characters in one call.
 * Times are of the CPU, because a machine has other work; the best of several rounds counts.
 */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createEngine } from "./engine";
import { loadModel } from "./model";
import type { ModelName } from "./types";

const N = 1000; // characters per round
const ROUNDS = 12;
const MODELS: ModelName[] = ["astra_alpha", "astra_beta", "elman_alpha"];
const [pretrained, modules, models] = ["../jaxgru/lm/pretrained", ...process.argv.slice(2)];
const read = (path: string) => new Uint8Array(readFileSync(path)).buffer;
const tokens = Uint8Array.from({ length: N }, (_, i) => (i * 7) % 65);

/** CPU milliseconds of one call. */
async function time(run: () => unknown): Promise<number> {
  const start = process.cpuUsage();
  await run();
  const { user, system } = process.cpuUsage(start);
  return (user + system) / 1000;
}

async function contestants(name: ModelName): Promise<Record<string, () => unknown>> {
  const file = read(`${pretrained}/${name}.safetensors`);
  const engine = createEngine(async () => file);
  const options = { temperature: 0.8, topK: 30, resetEvery: null };
  const start = await engine.start(name, tokens, 0, null);
  const logits = (simd: boolean) => {
    const model = loadModel(file, simd);
    return () => {
      const carry = model.initialCarry();
      for (const token of tokens) {
        model.step(carry, token);
        model.logits(carry);
      }
    };
  };
  const all: Record<string, () => unknown> = {
    "load": () => loadModel(file),
    "logits": logits(true),
    "logits, typed arrays alone": logits(false),
    "read for the surprise": () => engine.surprise(name, tokens, null),
    "write": () => engine.write(name, start, N, options),
    "reach in 150 characters": () => engine.reach(name, tokens.subarray(0, 151), 150, null),
  };
  if (!modules) return all;

  const ort = createRequire(`${modules}/`)("onnxruntime-web");
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(read(`${models}/${name}.onnx`));
  const [, ...states] = session.inputNames;
  const [, ...nextStates] = session.outputNames;
  const { H } = loadModel(file);
  const zeros = () => states.map(() => new ort.Tensor("float32", new Float32Array(H), [1, H]));
  const run = async (tokens: Iterable<number>, carry: unknown[]) => {
    const data = Int32Array.from(tokens);
    const feeds = Object.fromEntries(states.map((state: string, i: number) => [state, carry[i]]));
    const results = await session.run({ tokens: new ort.Tensor("int32", data, [1, data.length]), ...feeds });
    return nextStates.map((state: string) => results[state]);
  };
  all["onnxruntime-web, a call per character"] = async () => {
    let carry = zeros();
    for (const token of tokens) carry = await run([token], carry);
  };
  all["onnxruntime-web, one call"] = () => run(tokens, zeros());
  return all;
}

for (const name of MODELS) {
  const all = await contestants(name);
  const best: Record<string, number> = {};
  for (let round = 0; round < ROUNDS; round++)
    for (const [what, run] of Object.entries(all)) best[what] = Math.min(best[what] ?? Infinity, await time(run));
  console.log(name);
  for (const [what, ms] of Object.entries(best)) {
    const speed = /load|reach/.test(what) ? "" : `${Math.round((N / ms) * 1000)} characters per second`;
    console.log(`  ${what.padEnd(40)} ${ms.toFixed(1).padStart(7)} ms  ${speed}`);
  }
}
