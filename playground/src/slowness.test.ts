import { expect, test } from "vitest";
import { slowestFirst } from "./slowness";

test("the slowest unit of each layer comes first", () => {
  const T = 40;
  const units = [
    (t: number) => (-1) ** t, // layer 1: changes at each step, drifts, and changes every fourth step
    (t: number) => t / T,
    (t: number) => (-1) ** Math.floor(t / 4),
    (t: number) => 0.01 * (t / T), // layer 2: small but slow; large and quick; quicker
    (t: number) => Math.sin(t),
    (t: number) => Math.sin(3 * t),
  ];
  const states = Float32Array.from({ length: 6 * T }, (_, i) => units[i % 6](Math.floor(i / 6)));
  expect([...slowestFirst(states, 6, 3)]).toEqual([1, 2, 0, 3, 4, 5]);
});
