// Compute an exported model with onnxruntime-web, for test_onnx.py.
//
//     node onnx_web.mjs NODE_MODULES MODEL.onnx < REQUEST > RESULT
//
// REQUEST {tokens: [...], greedy: N} is JSON, and so is RESULT: the logits of the tokens, and N greedy
// tokens after them, one call each.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [modules, path] = process.argv.slice(2);
const ort = createRequire(`${modules}/`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(path));
const [, ...states] = session.inputMetadata;
const [, ...nextStates] = session.outputNames;

const zeros = Object.fromEntries(
  states.map(({ name, shape: [, ...sizes] }) => [
    name,
    new ort.Tensor("float32", new Float32Array(sizes.reduce((a, b) => a * b)), [1, ...sizes]),
  ]),
);

async function run(tokens, carry) {
  const feeds = { tokens: new ort.Tensor("int32", Int32Array.from(tokens), [1, tokens.length]) };
  const results = await session.run({ ...feeds, ...carry });
  const next = states.map(({ name }, i) => [name, results[nextStates[i]]]);
  return [Array.from(results.logits.data), Object.fromEntries(next)];
}

const { tokens, greedy } = JSON.parse(readFileSync(0, "utf8"));
let [whole, carry] = await run(tokens, zeros);
const text = [];
let logits = whole.slice(-whole.length / tokens.length);
for (let i = 0; i < greedy; i++) {
  text.push(logits.indexOf(Math.max(...logits)));
  [logits, carry] = await run(text.slice(-1), carry);
}
process.stdout.write(JSON.stringify({ whole, greedy: text }));
