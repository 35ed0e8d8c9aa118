import { expect, test } from "vitest";
import type { ModelInfo } from "./engine/types";
import { packWriting, unpackWriting } from "./state_text";

const info = { name: "astra_beta", hiddenDim: 3, numLayers: 2 } as ModelInfo;
const writing = {
  carry: [Float32Array.of(0.1, -1, 1e-30), Float32Array.of(0, 0.5, 3)],
  last: 12, sinceReset: 7, seed: 4294967295, draws: 107,
};
const packed = packWriting(info, writing);

test("a writing is unpacked to the bit, wherever the text was wrapped", () => {
  expect(unpackWriting(info, packed)).toEqual(writing);
  expect(unpackWriting(info, `  ${packed.slice(0, 30)}\n ${packed.slice(30)}\n`)).toEqual(writing);
});

test("the numbers are little-endian float32", () => {
  const bytes = Buffer.from(packed.split(".")[5], "base64");
  expect([bytes.length, bytes.readFloatLE(4), bytes.readFloatLE(20)]).toEqual([24, -1, 3]);
});

test.each([
  ["", "not a state"],
  ["ROMEO: ", "not a state"],
  [packed.slice(0, -4), "not all of it"],
  [packed.replace("astra_beta.12", "astra_beta.13"), "changed"],
])("%s is refused in a sentence", (text, why) => {
  expect(() => unpackWriting(info, text)).toThrow(why);
});

test("another model's state, or one of another size, is refused", () => {
  expect(() => unpackWriting({ ...info, name: "astra_alpha" }, packed)).toThrow("one of astra_beta");
  expect(() => unpackWriting({ ...info, hiddenDim: 4 }, packed)).toThrow("6 numbers; astra_beta has 8");
});
