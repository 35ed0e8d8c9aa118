import { expect, test } from "vitest";
import { readSafetensors } from "./safetensors";

/** A file with this header, and as many zero bytes of data. */
function file(header: unknown, dataBytes = 0): ArrayBuffer {
  const text = new TextEncoder().encode(typeof header === "string" ? header : JSON.stringify(header));
  const bytes = new Uint8Array(8 + text.length + dataBytes);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  return bytes.buffer;
}

const entry = { dtype: "F32", shape: [2, 3], data_offsets: [0, 24] };

test("a file is read", () => {
  const { metadata, tensors } = readSafetensors(file({ __metadata__: { format: "x" }, a: entry }, 24));
  expect(metadata).toEqual({ format: "x" });
  expect(tensors.get("a")).toEqual({ shape: [2, 3], data: new Float32Array(6) });
});

test("an empty tensor, and one without dimensions", () => {
  const header = {
    a: { dtype: "F32", shape: [0, 5], data_offsets: [0, 0] },
    b: { dtype: "F16", shape: [], data_offsets: [0, 2] },
  };
  const { tensors } = readSafetensors(file(header, 2));
  expect([...tensors.values()].map(({ data }) => data.length)).toEqual([0, 1]);
});

test.each([
  ["nothing", new ArrayBuffer(0), "no header"],
  ["seven bytes", new ArrayBuffer(7), "no header"],
  ["a header longer than the file", new Uint8Array(16).fill(255).buffer, "cut off"],
  ["no JSON", file("{"), "not JSON"],
  ["no UTF-8", new Uint8Array([1, 0, 0, 0, 0, 0, 0, 0, 255]).buffer, "not JSON"],
  ["a list", file([]), "not an object"],
  ["null", file("null"), "not an object"],
  ["metadata that are numbers", file({ __metadata__: { a: 1 } }), "metadata"],
  ["an entry that is null", file({ a: null }), "a is incomplete"],
  ["no shape", file({ a: { ...entry, shape: undefined } }, 24), "a is incomplete"],
  ["a negative size", file({ a: { ...entry, shape: [-2, -3] } }, 24), "a is incomplete"],
  ["a size that is no integer", file({ a: { ...entry, shape: [1.5, 4] } }, 24), "a is incomplete"],
  ["one offset", file({ a: { ...entry, data_offsets: [24] } }, 24), "a is incomplete"],
  ["offsets in the wrong order", file({ a: { ...entry, data_offsets: [24, 0] } }, 24), "size of its shape"],
  ["another size", file({ a: { ...entry, shape: [2, 4] } }, 32), "size of its shape"],
  ["a huge size", file({ a: { ...entry, shape: [2 ** 40, 2 ** 40] } }, 24), "size of its shape"],
  ["too little data", file({ a: entry }, 23), "cut off"],
  ["offsets behind the end", file({ a: { ...entry, data_offsets: [2 ** 50, 2 ** 50 + 24] } }, 24), "cut off"],
  ["another type", file({ a: { ...entry, dtype: "BF16" } }, 24), "BF16"],
])("%s is refused in one sentence", (_, bytes, why) => {
  expect(() => readSafetensors(bytes as ArrayBuffer)).toThrow(why);
  expect(() => readSafetensors(bytes as ArrayBuffer)).toThrow(/^[^.]+(\.[^.]+)*\.$/);
});
