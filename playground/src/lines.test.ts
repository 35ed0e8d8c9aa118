import { expect, test } from "vitest";
import { breakLines } from "./lines";

const lines = (text: string, columns: number) => {
  const starts = breakLines([...text], columns);
  return starts.map((start, i) => text.slice(start, starts[i + 1]));
};

test.each([
  ["ab cd ef", 5, ["ab cd ", "ef"]],
  ["ab cd ef", 4, ["ab ", "cd ", "ef"]],
  ["abcdefgh", 3, ["abc", "def", "gh"]],
  ["a\n\nb\n", 9, ["a\n", "\n", "b\n"]],
  ["abc\nd", 3, ["abc\n", "d"]],
  ["ab abcdef", 4, ["ab ", "abcd", "ef"]],
  ["", 4, [""]],
])("%j in %i columns", (text, columns, expected) => expect(lines(text, columns)).toEqual(expected));
