import { beforeEach, expect, test } from "vitest";
import { LINKS } from "./defaults";
import * as view from "./view";

beforeEach(() => void view.readView(""));

test("the default view needs no text", () => expect(view.writeView()).toBe(""));

test("a view is read as it was written", () => {
  const hash =
    "panel=reach&model=astra_alpha&every=1%2C120%3A16%2C300%3Anever&tour=5&prompt=A%26B+%3D&seed=4294967295" +
    "&temperature=0&top_k=5&fast=true&written=2000&text=O%0A%F0%9F%98%80&at=3&unit=300&draft=&state=x.y&continued=100";
  expect(view.readView(hash)).toEqual([]);
  expect(view.schedule.value).toEqual([[0, 1], [120, 16], [300, null]]);
  expect([view.every.value, view.prompt.value, view.text.value]).toEqual([null, "A&B =", "O\n😀"]);
  expect([view.temperature.value, view.topK.value, view.draft.value]).toEqual([0, 5, ""]);
  expect(view.writeView()).toBe(hash);
});

test.each([
  "model=gpt", "panel=", "every=3", "every=1,0:2", "every=1,5:2,5:4", "every=1,9999:2", "seed=-1", "seed=1e3", "seed=4294967296",
  "temperature=2.5", "temperature=", "top_k=0", "top_k=66", "fast=1", "written=0", "tour=6", "written=2001", "at=x", "nothing=1", "%=%", "x",
])("%s cannot be used, and leaves the default", (hash) => {
  expect(view.readView(`${hash}&unit=7`)).toHaveLength(1);
  expect(view.writeView()).toBe("unit=7");
});

test("what is not in a text goes back to its default", () => {
  view.readView("seed=5");
  view.readView("unit=7");
  expect(view.writeView()).toBe("unit=7");
});

test("of the slider's history, a link keeps what was written", () => {
  expect(view.readView("every=1,100:2,500:16&written=100")).toEqual([]);
  expect(view.schedule.value).toEqual([[0, 1], [100, 2]]);
});

test("how often the state is reset reads right in its sentences", () => {
  expect([null, 1, 16].map(view.resetInWords)).toEqual(["never reset", "reset before every character", "reset every 16 characters"]);
});

test("a text that is too long for its field cannot be used", () => {
  expect(view.readView(`prompt=${"a".repeat(view.PROMPT_LIMIT)}`)).toEqual([]);
  expect(view.readView(`prompt=${"a".repeat(view.PROMPT_LIMIT + 1)}`)).toHaveLength(1);
});

test("the slider's history begins where it was moved", () => {
  view.resetFrom(0, 4);
  expect(view.schedule.value).toEqual([[0, 4]]);
  view.resetFrom(10, 8);
  view.resetFrom(10, 16); // before anything more was written
  view.resetFrom(20, null);
  expect(view.schedule.value).toEqual([[0, 4], [10, 16], [20, null]]);
  view.resetFrom(20, 16); // back to what it was
  expect(view.schedule.value).toEqual([[0, 4], [10, 16]]);
});

test.each([
  // After 7 characters of a prompt, the first is drawn from all of them, and the second from its 8 as well
  [[[0, 8]], 7, 18, [1, 9]],
  [[[0, 8]], 8, 18, [0, 8, 16]],
  [[[0, 8]], 8, 17, [0, 8]], // nothing was drawn yet after the last reset
  [[[0, null]], 8, 99, []],
  [[[0, 2]], 8, 99, []], // too many
  [[[0, null], [10, 4]], 8, 18, [9, 13]],
  [[[0, 1], [10, 4], [16, null]], 8, 40, [12]],
] as [view.Schedule, number, number, number[]][])("of %j after %i characters, %i show the resets %j", (moves, read, length, found) => {
  expect(view.marks(moves, read, length)).toEqual(found);
});

test("another model shows a unit of its own", () => {
  view.readView("unit=7");
  view.choose("elman_alpha");
  expect(view.writeView()).toBe("model=elman_alpha");
});

test.each(LINKS)("the link %s for a class can be used whole", (link) => {
  expect(view.readView(link)).toEqual([]);
});
