import { expect, test } from "vitest";
import { slowestFirst } from "./slowness";

test("the slowest unit comes first", () => {
  const T = 40;
  const units = [
    (t: number) => (-1) ** t, // changes at each step, every 32nd, and every fourth
    (t: number) => (-1) ** Math.floor(t / 32),
    (t: number) => (-1) ** Math.floor(t / 4),
    (t: number) => 0.01 * (t / T), // small but slow
  ];
  const states = Float32Array.from({ length: 4 * T }, (_, i) => units[i % 4](Math.floor(i / 4)));
  expect([...slowestFirst(states, 4)]).toEqual([3, 1, 2, 0]);
});
