import { expect, test, vi } from "vitest";
import { Arena } from "./product";

test.each([[1, 1], [1, 17], [3, 2], [9, 18], [16, 16], [31, 33], [128, 65]])("a product of %i × %i", (rows, columns) => {
  const numbers = (n: number, from: number) => Float32Array.from({ length: n }, (_, i) => ((i * 7 + from) % 11) - 5);
  const M = numbers(rows * columns, 1);
  const at = (row: number, column: number) => M[row * columns + column];
  const [x, y] = [numbers(rows, 2), numbers(columns, 3)];
  const sum = (n: number, term: (i: number) => number) => Array.from({ length: n }, (_, i) => term(i)).reduce((a, b) => a + b, 0);
  // Integers: all sums are exact, whatever their order
  const expected = [...y].map((start, column) => start + sum(rows, (row) => x[row] * at(row, column)));
  const expectedT = [...x].map((start, row) => start + sum(columns, (column) => y[column] * at(row, column)));

  for (const simd of [true, false]) {
    const arena = new Arena([[rows, columns]], simd);
    const matrix = arena.matrix(rows, M);
    const vector = (values: Float32Array) => {
      const v = arena.vector(values.length);
      v.set(values);
      return v;
    };
    const [result, resultT] = [vector(y), vector(x)];
    matrix.times(vector(x), result);
    matrix.timesT(vector(y), resultT);
    expect([...result]).toEqual(expected);
    expect([...resultT]).toEqual(expectedT);
  }
});

test("some columns of a matrix", () => {
  const arena = new Arena([[2, 3]]);
  const x = arena.vector(2);
  x.set([1, 10]);
  const y = arena.vector(2);
  arena.matrix(2, Float32Array.of(1, 2, 3, 4, 5, 6), 1, 3).times(x, y);
  expect([...y]).toEqual([52, 63]);
});

test("without WebAssembly at all", () => {
  vi.stubGlobal("WebAssembly", undefined);
  try {
    const arena = new Arena([[1, 2]]);
    const [x, y] = [arena.vector(1), arena.vector(2)];
    x[0] = 3;
    arena.matrix(1, Float32Array.of(5, 7)).times(x, y);
    expect([...y]).toEqual([15, 21]);
  } finally {
    vi.unstubAllGlobals();
  }
});
