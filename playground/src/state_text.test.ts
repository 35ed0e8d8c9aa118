import { expect, test } from "vitest";
import type { ModelInfo } from "./engine/types";
import { packWriting, unpackWriting } from "./state_text";

const info = { name: "astra_beta", hiddenDim: 3, numLayers: 2, vocabulary: Array(65).fill("x") } as unknown as ModelInfo;
const writing = {
  carry: [Float32Array.of(0.1, -1, 1e-30), Float32Array.of(0, 0.5, 0.75)],
  last: 12, sinceReset: 7, seed: 4294967295, draws: 107,
};
const packed = packWriting(info, writing);

test("a writing is unpacked to the bit, wherever the text was wrapped", () => {
  expect(unpackWriting(info, packed)).toEqual(writing);
  expect(unpackWriting(info, `  ${packed.slice(0, 30)}\n ${packed.slice(30)}\n`)).toEqual(writing);
});

test("the numbers are little-endian float32", () => {
  const bytes = Buffer.from(packed.split(".")[5], "base64");
  expect([bytes.length, bytes.readFloatLE(4), bytes.readFloatLE(20)]).toEqual([24, -1, 0.75]);
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

/** The state with changed parts, and with the checksum that belongs to them (FNV-1a, counted in BigInt). */
function forged(changes: Record<number, string>): string {
  const body = packed.split(".").slice(0, -1).map((part, i) => changes[i] ?? part).join(".");
  let hash = 0x811c9dc5n;
  for (const byte of Buffer.from(body)) hash = ((hash ^ BigInt(byte)) * 0x01000193n) % 2n ** 32n;
  return `${body}.${hash.toString(16).padStart(8, "0")}`;
}

const states = (...values: number[]) => Buffer.from(Float32Array.from(values).buffer).toString("base64");

test("a forged state without changes is the state", () => expect(forged({})).toBe(packed));

test.each([
  [{ 0: "others" }, "not a state"],
  [{ 1: "65" }, "last character is 65"],
  [{ 1: "300" }, "the model's are 0 to 64"],
  [{ 2: "4294967296" }, "seed or count of 4294967296"],
  [{ 2: "9".repeat(400) }, "not a state"],
  [{ 3: "9".repeat(30) }, "not a state"],
  [{ 4: "9999999999" }, "seed or count of 9999999999"],
  [{ 5: "A" }, "not a state"],
  [{ 5: "AAA===" }, "not a state"],
  [{ 5: "AAA=" }, "not a state"],
  [{ 5: "" }, "0 numbers; astra_beta has 6"],
  [{ 5: states(0, 0, 0, 0, 0, -1.001) }, "number -1.001"],
  [{ 5: states(1e38, 0, 0, 0, 0, 0) }, "from −1 to 1"],
  [{ 5: states(0, 0, 0, NaN, 0, 0) }, "number NaN"],
])("a state with a right checksum and %j is refused in a sentence", (changes, why) => {
  expect(() => unpackWriting(info, forged(changes))).toThrow(why);
});
