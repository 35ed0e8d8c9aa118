import { expect, test } from "vitest";
import { draw, nextToken, probabilities, uniform } from "./sampling";

test("greedy takes the first of the most likely", () => {
  const options = { temperature: 0, topK: null, resetEvery: null };
  expect(nextToken(Float32Array.of(1, 3, 2, 3), 0.99, options)).toBe(1);
  expect(nextToken(Float32Array.of(-5), 0, options)).toBe(0);
});

test("a token of probability 0 is never drawn, and every other can be", () => {
  const p = Float64Array.of(0, 0.25, 0, 0.5, 0.25, 0);
  expect([0, 0.2, 0.25, 0.7, 0.75, 1 - 2 ** -32].map((u) => draw(p, u))).toEqual([1, 1, 3, 3, 4, 4]);
  expect(draw(Float64Array.of(0.3, 0.3, 0.4 - 1e-9, 0), 1 - 2 ** -32)).toBe(2); // rounding: the sum is less than 1
});

test("draws have the distribution", () => {
  const logits = Float32Array.of(0, 1, 2, -1, 2);
  const options = { temperature: 0.7, topK: 3, resetEvery: null };
  const p = probabilities(logits, options.temperature, options.topK);
  const n = 20_000;
  const counts = new Array(logits.length).fill(0);
  for (let i = 0; i < n; i++) counts[nextToken(logits, uniform(5, i), options)]++;
  counts.forEach((count, token) => {
    const deviation = Math.sqrt(n * p[token] * (1 - p[token]));
    expect(Math.abs(count - n * p[token])).toBeLessThanOrEqual(5 * deviation);
  });
});

test("uniform numbers depend on the seed and the draw alone, and fill [0, 1)", () => {
  const numbers = (seed: number) => Array.from({ length: 10_000 }, (_, i) => uniform(seed, i));
  const [a, b] = [numbers(1), numbers(2)];
  expect(uniform(1, 1234)).toBe(a[1234]);
  expect(a.filter((x, i) => x === b[i])).toEqual([]);
  for (const x of [a, b]) {
    expect(Math.min(...x)).toBeGreaterThanOrEqual(0);
    expect(Math.max(...x)).toBeLessThan(1);
    const bins = new Array(10).fill(0);
    for (const v of x) bins[Math.floor(v * 10)]++;
    // χ² with 9 degrees of freedom is above 33.7 once in 10,000 such tests; the seeds are fixed
    expect(bins.reduce((sum, n) => sum + (n - 1000) ** 2 / 1000, 0)).toBeLessThan(33.7);
  }
  expect(uniform(2 ** 40 + 1, 0)).not.toBe(uniform(1, 0));
});

test.each([[-1, null], [NaN, null], [Infinity, null], [1, 0], [1, 3], [1, 1.5]])(
  "temperature %s with top-k %s is refused in one sentence",
  (temperature, topK) => {
    const options = { temperature, topK, resetEvery: null };
    expect(() => nextToken(Float32Array.of(0, 0), 0, options)).toThrow(/^[^.]+(\.\d+)?[^.]*; it must be .*\.$/);
  },
);

test("a temperature close to 0 is greedy, without NaN", () => {
  expect([...probabilities(Float32Array.of(1, 3, 2), 1e-300, null)]).toEqual([0, 1, 0]);
});
