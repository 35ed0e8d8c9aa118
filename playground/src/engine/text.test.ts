import { expect, test } from "vitest";
import { encode } from "./text";

const vocabulary = ["\n", " ", "a", "b", "€"];

test("tokens, their places, and what the vocabulary lacks", () => {
  const { tokens, offsets, unknown } = encode(vocabulary, "a😀b€\0a😀é");
  expect([...tokens]).toEqual([2, 3, 4, 2]);
  expect([...offsets]).toEqual([0, 3, 4, 6]); // an emoji has two UTF-16 units
  expect(unknown).toEqual(["😀", "\0", "é"]);
});

test("half an emoji", () => {
  expect(encode(vocabulary, "a\ud83d").unknown).toEqual(["\ud83d"]);
});

test("an empty text", () => {
  const { tokens, offsets, unknown } = encode(vocabulary, "");
  expect([tokens.length, offsets.length, unknown.length]).toEqual([0, 0, 0]);
});

test("a megabyte, every second character unknown", () => {
  const { tokens, offsets, unknown } = encode(vocabulary, "aé".repeat(500_000));
  expect(tokens.length).toBe(500_000);
  expect(offsets.at(-1)).toBe(999_998);
  expect(unknown).toEqual(["é"]);
});
